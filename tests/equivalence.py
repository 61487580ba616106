"""p(X) = G(X): train the same model plainly and on a mesh, and compare everything."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfpar as tap
from tfpar.tf.keras import parallel_model


@dataclasses.dataclass
class Trained:
    """A trained model, the loss of each step, and what fit returned."""

    model: keras.Model
    losses: list[float]
    history: dict[str, list[float]]
    weights: list[np.ndarray]
    start: list[np.ndarray]

    def collectives(self, kind: str = "train") -> list[tuple[str, tuple[str, ...], int]]:
        return parallel_model(self.model).executables[kind].partitioned.collectives()

    def exchanged(self) -> list[tuple[str, tuple[str, ...], int]]:
        """Of `collectives`, those but all-reduces and gathered rows of sparse gradients."""
        partitioned = self.executable().partitioned
        readers = partitioned.graph.consumers()

        def exchanges(moved) -> bool:
            read_by = {op.type for op in readers.get(moved.tensor, ())}
            return moved.kind != "all_reduce" and read_by != {"UnsortedSegmentSum"}

        moves = zip(self.collectives(), partitioned.communications(), strict=True)
        return [collective for collective, moved in moves if exchanges(moved)]

    def executable(self, kind: str = "train"):
        return parallel_model(self.model).executables[kind]

    def specs(self, kind: str = "train") -> dict[str, str]:
        """Variable name -> spec as text."""
        partitioned = self.executable(kind).partitioned
        return {v.name: ",".join(map(str, s)) for v, s in partitioned.variable_specs.items()}


class _Losses(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(float(logs["loss"]))


@contextlib.contextmanager
def without_graph_optimizers() -> Iterator[None]:
    """Without TensorFlow's graph optimizers, which take longer than a small model's few steps.

    They fuse ops, which in half precision rounds otherwise.
    """
    options = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(options, False)
    tf.config.optimizer.set_experimental_options({options: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({options: before})


Build = Callable[[], keras.Model]


def op_by_op(build: Build) -> Build:
    """Builds the same model, whose steps run without being traced.

    That takes a third of the time for a few small steps. Keras does not do quite the same then: it
    weights what it reports of each of several losses otherwise.
    """

    def build_untraced() -> keras.Model:
        model = build()
        model.run_eagerly = True
        return model

    return build_untraced


def traced(build: Build) -> Build:
    """Builds the same model, whose steps are traced, as they are by default."""
    return build


def train(
    build: Build,
    data: Sequence[Any],
    *,
    mesh=None,
    constraints=(),
    planner=None,
    cluster=None,
    batch_size: int = 8,
    start=None,
    seed: int = 7,
    options: Mapping[str, Any] | None = None,
    **fit_arguments: Any,
) -> Trained:
    """Build under the mesh (or plainly) and fit; the seed makes both runs start alike.

    Without a planner the layout is the test's own: the constraints, or data parallelism. `options`
    are more arguments of `auto_parallel`.
    """
    keras.utils.set_random_seed(seed)
    if mesh is None:
        model = build()
    else:
        with tap.auto_parallel(
            mesh, constraints, planner=planner, cluster=cluster, **(options or {})
        ):
            model = build()
    if start is not None:
        model.set_weights(start)
    before = [np.array(w) for w in model.get_weights()]
    losses = _Losses()
    x, y, *weight = data
    if weight:
        fit_arguments["sample_weight"] = weight[0]
    history = model.fit(
        x, y, batch_size=batch_size, verbose=0, shuffle=False, callbacks=[losses], **fit_arguments
    )
    weights = [np.array(w) for w in model.get_weights()]
    return Trained(model, losses.values, history.history, weights, before)


def assert_equivalent(
    build: Build,
    data: Sequence[Any],
    mesh,
    constraints=(),
    *,
    plainly: Callable[[Build], Build] = op_by_op,
    rtol: float = 2e-3,
    loss_rtol: float = 1e-4,
    **arguments: Any,
) -> tuple[Trained, Trained]:
    """Train both ways and compare losses, history and the update of every weight.

    `plainly` tells how the plain run takes its steps: `traced` where Keras computes something else
    op by op. `rtol` bounds the rms of the difference over the rms of the weight's update, as far as
    it is not a few roundings of the weight itself. Returns (parallel, plain).
    """
    plain = train(plainly(build), data, **arguments)
    start = plain.start or None
    parallel = train(build, data, mesh=mesh, constraints=constraints, start=start, **arguments)
    assert_same(parallel, plain, rtol, loss_rtol)
    return parallel, plain


def assert_same(parallel: Trained, plain: Trained, rtol: float = 2e-3, loss_rtol: float = 1e-4):
    np.testing.assert_allclose(parallel.losses, plain.losses, rtol=loss_rtol)
    assert parallel.history.keys() == plain.history.keys()
    for key, values in plain.history.items():
        np.testing.assert_allclose(parallel.history[key], values, rtol=1e-3, atol=1e-6, err_msg=key)
    assert len(parallel.weights) == len(plain.weights)
    starts = plain.start or [np.zeros_like(w) for w in plain.weights]
    floor = 0.01 * max(
        (_rms(w - s) for w, s in zip(plain.weights, starts, strict=True) if _real(w)), default=0.0
    )
    for got, want, before, variable in zip(
        parallel.weights, plain.weights, starts, plain.model.weights, strict=True
    ):
        if not _real(want):
            np.testing.assert_array_equal(got, want, err_msg=variable.path)
            continue
        rounding = 4 * np.finfo(want.dtype).eps * np.abs(want)
        excess = np.maximum(np.abs(got - want) - rounding, 0)
        error = _rms(excess) / max(_rms(want - before), floor, 1e-12)
        assert error <= rtol, f"{variable.path}: update differs by {error:.1e}"


def _real(value: np.ndarray) -> bool:
    return value.dtype.kind == "f"


def _rms(value: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(value, dtype="float64")))) if value.size else 0.0
