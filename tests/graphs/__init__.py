"""Steps of small models, saved as text: forward and backward pass, simplified, at one batch size.

Planning is tested on them without TensorFlow. `tests/graphs/models.py` says how the models are
built, and `python -m scripts.save_graphs` traces and saves their steps.
"""

from __future__ import annotations

import functools
import gzip
import pathlib
import pickle

from tfpar.ir import StepGraph, parse_step

FOLDER = pathlib.Path(__file__).parent
NAMES = ("gpt", "wide", "resnet", "gshard_moe", "t5")
"""Those of which plans, prices and collectives are compared."""
BATCH = 8
"""How many samples most of them take."""


def saved_names() -> list[str]:
    """All whose steps are saved."""
    return sorted(path.name.removesuffix(".txt.gz") for path in FOLDER.glob("*.txt.gz"))


@functools.cache
def saved_text(name: str) -> str:
    return gzip.decompress((FOLDER / f"{name}.txt.gz").read_bytes()).decode()


def saved(name: str) -> StepGraph:
    """The step of this model: a new value each time, as passes change graphs in place."""
    return pickle.loads(_pickled(name))


@functools.cache
def _pickled(name: str) -> bytes:
    """Reads ten times as fast as text."""
    return pickle.dumps(parse_step(saved_text(name)))
