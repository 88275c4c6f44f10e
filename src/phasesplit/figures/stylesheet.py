"""The style of all report pages: light and dark, wide and narrow, on screen and on paper."""

from phasesplit.figures.style import THEME


def stylesheet() -> str:
    """Return the style sheet, its colours those of the figures."""
    light, dark = ("".join(f"--{name}:{pair[index]};" for name, pair in THEME.items()) for index in (0, 1))
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{_RULES}"
    )


_RULES = """\
:root{--figure-font:"DejaVu Sans",Verdana,Geneva,sans-serif}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main,header,footer{max-width:76rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:2rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .35rem;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.5rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:1.5rem 0 .4rem}
p{margin:.4rem 0;max-width:52rem}
.lead,.note,figcaption,footer,dt,dd,th{color:var(--faint)}
.lead{margin:0;overflow-wrap:anywhere}
.banner{margin:1.25rem 0;padding:.8rem 1.1rem;border-left:.4rem solid var(--token);border-radius:.25rem}
.banner{background:var(--idle)}
.banner strong{display:block;font-size:1.1rem}
.banner ul{margin:.3rem 0 0;padding-left:1.2rem}
.banner.alarm{background:var(--alarm);border-color:var(--ink);color:var(--on-strong)}
.banner.alarm strong{font-size:1.35rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.75rem;margin:1.5rem 0 0}
.tiles div{border:1px solid var(--grid);border-radius:.4rem;padding:.6rem .8rem}
.tiles dt{font-size:.8rem}
.tiles dd{margin:0;color:var(--ink);font-size:1.3rem;font-weight:650;white-space:nowrap}
.verdict{font-size:1.1rem;font-weight:650}
.kept{color:var(--mixed)}
.broken{color:var(--alarm)}
.scroll{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;min-width:min(100%,30rem)}
th,td{padding:.3rem .9rem .3rem 0;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th{font-size:.8rem;font-weight:600;vertical-align:bottom}
th:first-child,td:first-child,.words td,.words th{text-align:left}
.words td:nth-child(2){white-space:normal}
.designs td:first-child{white-space:normal;min-width:13rem}
td.broken{font-weight:700}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,25rem),1fr));gap:1.25rem 1.75rem}
.figures{margin:1rem 0}
figure{margin:0;break-inside:avoid}
.figures>div{min-width:0}
.three{grid-template-columns:repeat(auto-fill,minmax(min(100%,20rem),1fr))}
svg{display:block;width:100%;height:auto}
figcaption{font-size:.88rem;margin-top:.2rem}
details{margin:.8rem 0}
summary{cursor:pointer;font-weight:600}
dl.terms{display:grid;grid-template-columns:minmax(7rem,max-content) 1fr;gap:.25rem 1rem;font-size:.92rem}
dl.terms dt{font-weight:650;color:var(--ink)}
dl.terms dd{margin:0}
footer{padding-top:1.5rem;padding-bottom:2.5rem;font-size:.85rem}
@media (max-width:40rem){main,header,footer{padding-left:.9rem;padding-right:.9rem}h1{font-size:1.35rem}
th,td{padding-right:.5rem;font-size:.8rem}th{font-size:.72rem}
th:first-child,td:first-child{white-space:normal;min-width:5.5rem}
dl.terms{grid-template-columns:1fr}dl.terms dd{margin-bottom:.4rem}}
@media print{body{font-size:10pt}header{padding-top:0}.figures{grid-template-columns:1fr 1fr}
.scroll{overflow:visible}table{font-size:8pt;min-width:0}th,td{white-space:normal;padding-right:.4rem}
th{font-size:7pt}.designs td:first-child{min-width:8rem}
h2{break-after:avoid}tr,.banner,.tiles div{break-inside:avoid}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
