"""`phasesplit reproduce`: the published provisioning study again, as published and set right, side by side."""

import time
from pathlib import Path
from typing import Annotated

import typer

from phasesplit.cli import study_run
from phasesplit.cli.options import option
from phasesplit.cli.plan_outputs import checked_plan_outputs
from phasesplit.errors import SpecError


def reproduce(
    quick: Annotated[
        bool, option("--quick", text="One seed and 60 s of requests in place of three seeds and 120 s.")
    ] = False,
    workers: Annotated[
        int | None, option("--workers", text="Processes that simulate; by default one for each core.", metavar="N")
    ] = None,
    as_json: Annotated[bool, option("--json", text="Print the study as JSON, and nothing else.")] = False,
    html: Annotated[
        Path | None, option("--html", text="Write the study as one HTML file, figures inside.", metavar="FILE")
    ] = None,
) -> None:
    """Run the provisioning study of the Splitwise paper: as published, and with its errors set right.

    Every difference is explained by what was measured: one correction at a time is switched on.

    \b
    Example:
    phasesplit reproduce --quick --html study.html
    """  # noqa: D301 - \b is how click is told to keep these lines
    began_s = time.perf_counter()
    if workers is not None and workers < 1:
        raise SpecError.bad("--workers", workers, "1 or more")
    outputs = checked_plan_outputs([], html=html)
    found = study_run.run_study(quick, workers)
    elapsed_s = time.perf_counter() - began_s
    if "html" in outputs:
        from phasesplit.figures.reproduction_report import write_reproduction_html

        write_reproduction_html(found, outputs["html"])
    if as_json:
        import orjson

        from phasesplit.files.reproduction import reproduction_summary

        typer.echo(orjson.dumps(reproduction_summary(found, elapsed_s), option=orjson.OPT_INDENT_2).decode())
        return
    from phasesplit.cli.reproduce_view import study_text

    typer.echo(study_text(found))
    typer.echo(f"{found.questions:,} simulations in {elapsed_s:.0f} s")
    for path in outputs.values():
        typer.echo(f"wrote {path}")
