"""What the commands share: how an option is declared, and what they say before a kernel is compiled."""

from typing import Annotated, Any

import typer

COMPILING = "compiling the simulation kernel, once for this version (about half a minute) ..."


def option(*flags: str, text: str, metavar: str | None = None) -> Any:
    """Return an option without its default in the help: the text says it where it is of use."""
    return typer.Option(*flags, help=text, metavar=metavar, show_default=False)


Rate = Annotated[
    float | None,
    option("--rate", text="Mean requests per second; by default the workload's own.", metavar="PER_S"),
]

Duration = Annotated[
    float | None, option("--duration", text="Seconds of arrivals; by default the workload's own.", metavar="S")
]

Count = Annotated[int | None, option("--count", text="So many requests instead of a duration.", metavar="N")]

Clip = Annotated[
    str | None,
    option("--clip", text="Make longer prompts and outputs so long.", metavar="PROMPT_TOKENS:OUTPUT_TOKENS"),
]

Join = Annotated[
    str | None, option("--join", text="Gateway to join; without one the worker serves by itself.", metavar="URL")
]

WorkerName = Annotated[
    str | None,
    option("--name", text="Its name, unique in the cluster; by default of host and role.", metavar="NAME"),
]

Home = Annotated[
    str, option("--home", "--role", text="What it is for; by default unsplit.", metavar="prefill|decode|mixed|unsplit")
]
