"""Answers that tests send to workers."""

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phasesplit.errors import SpecError


class Awkward(Exception):  # noqa: N818 - no error of the package
    """Cannot be unpickled: its constructor takes two arguments, and its state has one."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


def square(number: int) -> int:
    return number * number


def square_and_pid(number: int) -> tuple[int, int]:
    time.sleep(0.02)
    return number * number, os.getpid()


def say(text: str) -> str:
    print(text)  # noqa: T201 - to see where it goes
    return text


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def misbehave(how: str) -> str:
    """Do what the question says: it is one of the ways in which an answer goes wrong."""
    if how == "refuse":
        raise SpecError("this is not allowed")
    if how == "awkward":
        raise Awkward("trouble", "home")
    if how == "unpicklable":
        return lambda: None  # type: ignore[return-value]
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return how


@dataclass
class DieOnce:
    """Ends its process at its first question, as the marker file remembers, and answers from then on."""

    marker: Path

    def __call__(self, number: int) -> int:
        if not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number


@dataclass
class Counted:
    """Answers how many questions this copy has answered, and writes a line to a file whenever it is unpickled."""

    log: Path
    seen: list[Any] = field(default_factory=list)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with self.log.open("a", encoding="ascii") as file:
            file.write(f"{os.getpid()}\n")

    def __call__(self, question: Any) -> int:
        time.sleep(0.01)
        self.seen.append(question)
        return len(self.seen)


@dataclass
class Logged:
    """Sleeps, and leaves a file named by the seconds once it has."""

    folder: Path

    def __call__(self, seconds: float) -> float:
        time.sleep(seconds)
        (self.folder / str(seconds)).touch()
        return seconds
