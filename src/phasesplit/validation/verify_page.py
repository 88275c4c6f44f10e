"""Predicted against measured as one HTML file: how far apart, in which stage, and what both rest on."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from phasesplit._version import __version__
from phasesplit.io.compression import write_bytes
from phasesplit.report import readable
from phasesplit.report.page import (
    Cell,
    Drawing,
    Markup,
    Value,
    banner,
    colour,
    details,
    drawings,
    inline_svg,
    note,
    page,
    paragraph,
    section,
    side_by_side,
    table,
    terms,
    tiles,
    title,
)
from phasesplit.report.panels import draw_curves

_NAMES = {"ttft_s": "TTFT: time to first token", "itl_s": "ITL: gaps between tokens", "e2e_s": "E2E: whole requests"}
_STAGE_COLOURS = {
    "queue": "prefill-wait",
    "prefill": "prefill",
    "exposed transfer": "transfer",
    "wait": "decode-wait",
    "decode": "decode",
    "front end": "idle",
}
_GLOSSARY = (
    ("TTFT", "time to first token: first token - the instant at which the request was due"),
    ("ITL", "inter-token latency: the gap between two consecutive output tokens of one request"),
    ("E2E", "end to end: last token - the instant at which the request was due"),
    ("queue", "from arrival until prefill runs"),
    ("prefill", "until the first token"),
    ("exposed transfer", "what of the KV cache's way to the decode machine the first token did not hide"),
    ("wait", "from whole KV until the second token"),
    ("decode", "from the second token to the last"),
    ("front end", "what the client sees beyond that: HTTP, and its own reading"),
    ("error", "predicted / measured - 1"),
)


class _Quantiles:
    """A distribution of which some quantiles are known, the values between them by interpolation."""

    exact = False

    def __init__(self, shares: Sequence[float], values: Sequence[float | None]) -> None:
        known = [(share, value) for share, value in zip(shares, values, strict=True) if value is not None]
        self._shares, self._values = [share for share, _ in known], [value for _, value in known]
        self.count = len(known)
        self.mean = float(np.mean(self._values)) if known else float("nan")
        self.largest = max(self._values, default=float("nan"))

    def quantile(self, q: float) -> float:
        """Return the quantile q."""
        return float(np.interp(q, self._shares, self._values))

    def curve(self, points: int = 400) -> tuple[Any, Any]:
        """Return values and shares of the distribution function."""
        shares = np.linspace(0, 1, points)
        return np.interp(shares, self._shares, self._values), shares


def write_verify_html(
    records: Sequence[Mapping[str, Any]], path: str | Path, *, heading: str = "", notes: Sequence[str] = ()
) -> None:
    """Write verifications as one HTML file that needs no network; the same records give the same bytes.

    Args:
        records: Each as `phasesplit verify --json` prints it, at least one.
        path: Where to.
        heading: Title; by default of the first record.
        notes: Sentences above everything else.

    Raises:
        SpecError: The file cannot be written.
    """
    write_bytes(path, verify_report(records, heading=heading, notes=notes).encode())


def verify_report(records: Sequence[Mapping[str, Any]], *, heading: str = "", notes: Sequence[str] = ()) -> str:
    """Return verifications as an HTML page.

    Args:
        records: As for `write_verify_html`.
        heading: The same.
        notes: The same.
    """
    first = records[0]
    blocks = [paragraph(text) for text in notes]
    for number, record in enumerate(records):
        blocks += _one(record, f"v{number}", is_alone=len(records) == 1)
    blocks.append(section("Words", terms(_GLOSSARY)))
    return page(
        heading or f"Predicted against measured: {first['cluster']['name']}", _lead(first), blocks,
        f"phasesplit {__version__}",
    )  # fmt: skip


def _lead(record: Mapping[str, Any]) -> str:
    trace = record["trace"]
    return (
        f"{trace['name']}: {trace['requests']:,} requests in {readable.seconds(trace['duration_s'])}, "
        f"{readable.number(trace['rate_per_s'])} a second"
    )


def _one(record: Mapping[str, Any], name: str, *, is_alone: bool) -> list[Markup]:
    pools = " + ".join(f"{count} {role}" for role, count in record["cluster"]["pools"].items())
    blocks = []
    if record["warnings"]:
        doubts = [readable.sentence(text) for text in record["warnings"]]
        blocks.append(banner("Before trusting these figures", doubts, alarm=False))
    blocks.append(tiles(_key_figures(record)))
    blocks += [paragraph(readable.sentence(one["text"])) for one in record["explanations"]]
    blocks.append(drawings([_curves(record, metric, name) for metric in _NAMES] + [_stage_bars(record, name)]))
    blocks.append(table(("latency", "predicted", "measured", "error", "goal"), map(_latency, record["latencies"])))
    blocks.append(
        side_by_side(
            table(("mean time", "predicted", "measured", "difference"), map(_stage, record["stages"])),
            table(("", "predicted", "measured"), map(_total, record["totals"])),
        )
    )
    blocks.append(paragraph(_placements(record)))
    blocks.append(details("What both sides rest on", *map(paragraph, _basis(record))))
    return [section(f"{record['cluster']['name']}: {pools}" if not is_alone else pools, *blocks)]


def _key_figures(record: Mapping[str, Any]) -> list[tuple[str, Cell]]:
    by_name = {figure["name"]: figure for figure in record["latencies"]}
    met = sum(figure["met"] is True for figure in record["latencies"])
    entries: list[tuple[str, Cell]] = [("goals met", Value(met, f"{met} of {len(record['latencies'])}"))]
    for metric in ("TTFT", "ITL", "E2E"):
        figure = by_name[f"{metric} p50"]
        error = _known(figure["error"])
        entries.append((f"{metric} p50, measured", Value(_known(figure["measured"]), _shown(figure, "measured"))))
        entries.append((f"{metric} p50, error", Value(error, _percent(error))))
    return entries


def _latency(figure: Mapping[str, Any]) -> Sequence[Cell]:
    error = _known(figure["error"])
    return (
        figure["name"],
        Value(_known(figure["predicted"]), _shown(figure, "predicted")),
        Value(_known(figure["measured"]), _shown(figure, "measured")),
        Value(error, _percent(error), figure["met"] is False),
        Value(figure["goal"], f"{figure['goal']:.0%}"),
    )


def _stage(figure: Mapping[str, Any]) -> Sequence[Cell]:
    predicted, measured = _known(figure["predicted"]), _known(figure["measured"])
    return (
        figure["name"],
        Value(predicted, _shown(figure, "predicted")),
        Value(measured, _shown(figure, "measured")),
        Value(predicted - measured, f"{1e3 * (predicted - measured):+.1f} ms"),
    )


def _total(figure: Mapping[str, Any]) -> Sequence[Cell]:
    return (
        figure["name"].replace("_", " "),
        Value(_known(figure["predicted"]), _shown(figure, "predicted")),
        Value(_known(figure["measured"]), _shown(figure, "measured")),
    )


def _shown(figure: Mapping[str, Any], side: str) -> str:
    value = _known(figure[side])
    if figure["unit"] == "s":
        return readable.seconds(value)
    if figure["unit"] == "share":
        return readable.percent(value)
    return f"{readable.number(value)}/s" if figure["unit"] == "per_s" else readable.number(value)


def _percent(share: float) -> str:
    return readable.NONE if np.isnan(share) else f"{share:+.1%}"


def _known(value: float | None) -> float:
    return float("nan") if value is None else value


def _placements(record: Mapping[str, Any]) -> str:
    differ = record["placements"]["differ"]
    if not differ:
        return "Every request went to the machines that were predicted."
    first = record["placements"]["first"][0]
    return (
        f"{readable.counted(differ, 'request')} went elsewhere than predicted; the first is request "
        f"{first['request']}: {' and '.join(first['measured'])} instead of {' and '.join(first['predicted'])}."
    )


def _basis(record: Mapping[str, Any]) -> list[str]:
    front = record["front_end"]
    parts = ", ".join(
        f"{1e3 * value:.2f} ms ({name.removesuffix('_s').replace('_', ' ')})"
        for name, value in front.items()
        if name != "added"
    )
    cores = ", ".join(f"{name} on core {core}" for name, core in record["cores"].items())
    share = record["core_share"]
    return [
        f"Phase times: {record['profile']}.",
        f"KV memory: {', '.join(f'{name} {blocks:,}' for name, blocks in record['kv_blocks'].items())} blocks of "
        f"{record['block_tokens']} tokens, the same on both sides.",
        f"Cores: {cores}." + (f" Each worker has {share:.0%} of its core, on both sides." if share < 1 else ""),
        f"Front end, measured on the idle cluster: {parts}; "
        f"{'added to the prediction' if front['added'] else 'not in the prediction'}.",
        f"The gateway had {record['gateway_share']:.0%} of a core, the client {record['client_share']:.0%}.",
    ]


def _curves(record: Mapping[str, Any], metric: str, name: str) -> Drawing:
    kept = record["distributions"]
    sides = [("measured", "unsplit"), ("predicted", "prefill")]
    curves = [(side, tint, _Quantiles(kept["shares"], kept[metric][side])) for side, tint in sides]
    of = "gaps" if metric == "itl_s" else "requests"

    def draw(axes: Any) -> None:
        if all(one.count for _, _, one in curves):
            draw_curves(axes, curves, name=_NAMES[metric], of=of)
        else:
            title(axes, _NAMES[metric])
            note(axes, f"No {of} to show.")

    short = metric.removesuffix("_s").upper()
    caption = f"{short}, predicted and measured: the closer the curves, the better the prediction."
    return Drawing(Markup(inline_svg(f"{name}-{metric}", escape(caption), draw)), caption)


def _stage_bars(record: Mapping[str, Any], name: str) -> Drawing:
    def draw(axes: Any) -> None:
        shown = [figure for figure in record["stages"] if _known(figure["predicted"]) or _known(figure["measured"])]
        title(axes, "Where the mean request's time goes", [(one["name"], _STAGE_COLOURS[one["name"]]) for one in shown])
        for row, side in ((1.0, "predicted"), (0.0, "measured")):
            begin_s = 0.0
            for figure in shown:
                width_s = max(_known(figure[side]), 0.0)
                axes.barh(
                    row, 1e3 * width_s, left=1e3 * begin_s, height=0.5, color=colour(_STAGE_COLOURS[figure["name"]])
                )
                begin_s += width_s
            axes.text(0, row + 0.31, f"{side}: {readable.seconds(begin_s)}", va="bottom", fontweight="bold")
        axes.set(ylim=(-0.45, 1.65), xlabel="ms")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)

    caption = "The mean request by stage: a stage of another width is where the prediction is wrong."
    return Drawing(Markup(inline_svg(f"{name}-stages", escape(caption), draw)), caption)
