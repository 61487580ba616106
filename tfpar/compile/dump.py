"""Dump of every graph that the compiler makes of a step, to a folder."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tfpar.compile.passes import Observer, ignore_pass

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
