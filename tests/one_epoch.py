"""One epoch of a small model on one device and on a mesh: what tests of many models share."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.equivalence import Trained, assert_same, op_by_op, train

BATCH = 5  # no multiple of the ranks
NUM_SAMPLES = 2 * BATCH


class Samples:
    """Random samples, the same ones each time: two batches."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def real(self, *shape: int) -> np.ndarray:
        return self._rng.normal(size=(NUM_SAMPLES, *shape)).astype("float32")

    def share(self, *shape: int) -> np.ndarray:
        """Numbers between zero and one."""
        return self._rng.uniform(size=(NUM_SAMPLES, *shape)).astype("float32")

    def labels(self, number: int, *shape: int) -> np.ndarray:
        return self._rng.integers(0, number, (NUM_SAMPLES, *shape)).astype("int32")

    def one_hot(self, number: int, *shape: int) -> np.ndarray:
        return np.eye(number, dtype="float32")[self.labels(number, *shape)]


Build = Callable[[], keras.Model]
Draw = Callable[[Samples], tuple]


def cases(models: Mapping[str, Any], by_default: Iterable[str], in_both_ways: Iterable[str]):
    """(name, mode), one model after the other: the plain run serves both modes.

    Tensor parallelism splits the batch as well, so that the rest need not be tried without it.
    Models that are not tried by default differ in ops, whose rules have tests of their own.
    """
    found = []
    for name in models:
        marks = [pytest.mark.xdist_group(name), pytest.mark.slow]
        if name not in by_default:
            marks.append(pytest.mark.nightly)
        for mode in ("data", "tensor") if name in in_both_ways else ("tensor",):
            found.append(pytest.param(name, mode, marks=marks, id=f"{name}-{mode}"))
    return found


def layout_of_strangers(model: keras.Model, seed: int = 0) -> list[tap.Constraint]:
    """Embeddings by rows; of the other layers with kernels every other one by the last dim."""
    choose = random.Random(seed)
    chosen: dict[str, bool] = {}
    constraints = []
    for weight in model.trainable_weights:
        owner, _, name = weight.path.rpartition("/")
        if len(weight.shape) < 2:
            continue
        split = chosen.setdefault(owner, choose.random() < 0.5)
        if "embeddings" in name:
            constraints.append(tap.shard(re.escape(weight.path), dim=0, axis="model"))
        elif split and weight.shape[-1] > 1:
            constraints.append(tap.shard(re.escape(weight.path), dim=-1, axis="model"))
    return constraints


def fitted(build: Build, draw: Draw, **arguments: Any) -> Trained:
    """Train from the same start on the same samples, whatever the mesh."""
    keras.utils.clear_session(free_memory=False)  # so that layers get the same names again
    return train(build, draw(Samples()), batch_size=BATCH, **arguments)


@functools.lru_cache(maxsize=1)
def on_one_device(build: Build, draw: Draw) -> Trained:
    return fitted(op_by_op(build), draw)


def assert_trains_as_on_one_device(build: Build, draw: Draw, mode: str) -> None:
    """Under data or tensor parallelism; and no op, in loops and branches too, falls back."""
    plain = on_one_device(build, draw)
    assert np.isfinite(plain.losses).all()
    # The seed splits the first of two layers.
    constraints = layout_of_strangers(plain.model, seed=1) if mode == "tensor" else []
    parallel = fitted(
        build, draw, mesh=tap.split([2, 2]), constraints=constraints, start=plain.start
    )
    assert_same(parallel, plain)
    if mode == "tensor":
        assert any("S(" in spec for spec in parallel.specs().values()), "nothing is split"
    prepared = parallel.executable().partitioned.prepared
    assert not {op.type for op in prepared.all_fallbacks()}
