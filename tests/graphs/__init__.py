"""Steps of small models, saved as text: forward and backward pass, simplified, at one batch size.

`python -m scripts.save_graphs` writes them.
"""

from __future__ import annotations

import functools
import gzip
import pathlib

from tfpar.ir.step import StepGraph
from tfpar.ir.text import parse_step

FOLDER = pathlib.Path(__file__).parent
NAMES = ("gpt", "wide", "resnet", "gshard_moe", "t5")
BATCH = 8


@functools.cache
def saved_text(name: str) -> str:
    return gzip.decompress((FOLDER / f"{name}.txt.gz").read_bytes()).decode()


def saved(name: str) -> StepGraph:
    """The step of this model: a new value each time, as passes change graphs in place."""
    return parse_step(saved_text(name))
