"""What a refusal must name: one line with the place, the value and what is allowed, in whatever words."""

import re


def _bounded(named: object) -> str:
    """Return a pattern that finds a name or a number as a whole: neither `1` in `1.5` nor `role` in `roles`."""
    text = named if isinstance(named, str) else repr(named)
    before = r"(?<!\w)(?<!\d[.,])(?<![\w)][-+])" if re.match(r"\w", text) else ""
    after = r"(?!\w)(?![.,]\d)" if re.search(r"\w$", text) else ""
    return before + re.escape(text) + after


def _of_command(refused: object) -> tuple[int, str, str]:
    """Return exit status, standard output and standard error of a command's result."""
    if isinstance(refused, tuple):
        status, out, err = refused
    elif hasattr(refused, "returncode"):
        status, out, err = refused.returncode, refused.stdout, refused.stderr  # type: ignore[attr-defined]
    else:
        status, out, err = refused.code, refused.out, refused.err  # type: ignore[attr-defined]
    return status, out, re.sub(r"compiling the simulation kernel.*\n", "", err)


def assert_refused(refused: object, *named: object, status: int = 2) -> None:
    """Assert that something was refused in one line that says where, what and what is allowed.

    Args:
        refused: The message, the error with it, or a command's result: its exit status, standard output and standard
            error, as a tuple or as attributes (of `subprocess` too). A command prints nothing on standard output.
        named: The parts that the line must have, in this order, the rest of its words being free: file, line or field,
            the value, what is allowed. A part that is not text stands there as `repr` writes it.
        status: Exit status of the command.
    """
    if isinstance(refused, str | BaseException):
        line = str(refused)
    else:
        found, out, err = _of_command(refused)
        assert (found, out) == (status, ""), f"exit status {found}, standard output {out!r}: {err}"
        assert err.startswith("phasesplit: "), err
        line = err.removesuffix("\n")
    assert line, "refused without a word"
    assert "\n" not in line, f"more than one line: {line!r}"
    patterns = [_bounded(part) for part in named]
    for count, part in enumerate(named, start=1):
        assert re.search(".*".join(patterns[:count]), line), f"{part!r} is missing or out of order in: {line}"
