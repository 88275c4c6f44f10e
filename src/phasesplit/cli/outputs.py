"""What a command writes: every output checked before the work, and all of them written or none."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phasesplit.errors import SpecError

if TYPE_CHECKING:
    from phasesplit.simulation.result import Result

Writer = Callable[["Result", Path], None]

_FIGURE_ENDINGS = (".png", ".pdf", ".svg")


def checked_outputs(inputs: Sequence[str | Path | None], **named: Path | None) -> dict[Path, Writer]:
    """Return what writes each output, all of them checked before any work is done.

    Args:
        inputs: Files that are read, which no output may replace; None where there is none.
        named: Path by option: requests, parquet, figure, html; None where it was not given.

    Raises:
        SpecError: An output cannot be written, or two options name one file.
    """
    asked = {name: path for name, path in named.items() if path is not None}
    if not asked:
        return {}
    from phasesplit.files.results import REQUEST_ENDINGS, check_output, write_requests

    kinds: dict[str, tuple[tuple[str, ...], Writer]] = {
        "requests": (REQUEST_ENDINGS, write_requests),
        "parquet": ((".parquet",), write_requests),
        "figure": (_FIGURE_ENDINGS, partial(_draw, "write_figure")),
        "html": ((".html",), partial(_draw, "write_html")),
    }
    outputs: dict[Path, Writer] = {}
    for name, path in asked.items():
        endings, writer = kinds[name]
        check_output(path, endings, f"--{name}")
        if path.resolve() in {other.resolve() for other in (*outputs, *(Path(read) for read in inputs if read))}:
            raise SpecError.bad(f"--{name}", str(path), "a file that no other option names")
        outputs[path] = writer
    return outputs


def _draw(function: str, result: "Result", path: Path) -> None:
    from phasesplit import figures

    getattr(figures, function)(result, path)


def write_outputs(result: "Result", outputs: dict[Path, Writer]) -> None:
    """Write all outputs, or none of them.

    Raises:
        SpecError: One cannot be written.
    """
    if not outputs:
        return
    from phasesplit.files.results import written_whole

    with ExitStack() as files:
        for path, writer in outputs.items():
            writer(result, files.enter_context(written_whole(path)))
