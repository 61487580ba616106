"""Passes of the compiler, each with its name, from graph to graph; their observers, and dumps."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from tfpar.ir.graph import Graph


@dataclasses.dataclass(frozen=True)
class Pass:
    """One step of the compiler.

    Attributes:
        name: in words, as dumps show it.
        run: gives the graph after it: the same one, changed in place, or another.
    """

    name: str
    run: Callable[[Graph], Graph]


class Observer(Protocol):
    """Observer of passes, called after each."""

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        """See what came of a pass.

        Args:
            name: of the pass; "captured" before the first one.
            text: writes the graph as text; costs time, and only holds until the next pass.
        """


def ignore_pass(name: str, text: Callable[[], str]) -> None:
    """Ignore the pass, as an observer who does not look."""


# --- dumps ----------------------------------------------------------------------------------

DUMP = "TFPAR_DUMP"
"""The environment variable that names the folder for dumps; without it nothing is written."""


@dataclasses.dataclass
class Dump:
    """An observer who writes one step to files, after each pass: `04-trim.txt`."""

    folder: Path
    written: int = 0

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        file = f"{self.written:02}-{name.replace(' ', '-')}.txt"
        (self.folder / file).write_text(text(), encoding="utf-8")
        self.written += 1


def dump_of(
    step: str, rank: int | None = None, environment: Mapping[str, str] = os.environ
) -> Observer:
    """Who writes down what each pass makes of a step; nobody unless asked.

    Each compilation gets a folder of its own: `train_step-0`, and `train_step-1` for another batch
    shape or another run.

    Args:
        rank: of this process among several, which then write to folders of their own.
    """
    top = environment.get(DUMP)
    if not top:
        return ignore_pass
    within = Path(top).expanduser()
    if rank is not None:
        within /= f"rank-{rank}"
    within.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", step)
    for count in itertools.count():
        folder = within / f"{name}-{count}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return Dump(folder)
    raise AssertionError("counting does not end")
