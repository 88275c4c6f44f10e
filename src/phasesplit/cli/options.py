"""What the commands share: how an option is declared, and what they say before a kernel is compiled."""

from typing import Any

import typer

COMPILING = "compiling the simulation kernel, once for this version (about half a minute) ..."


def option(*flags: str, text: str, metavar: str | None = None) -> Any:
    """Return an option without its default in the help: the text says it where it is of use."""
    return typer.Option(*flags, help=text, metavar=metavar, show_default=False)
