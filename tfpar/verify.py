"""`verify`: the model on the mesh against the same model on one device.

Both train from the same state on the same batches: losses, gradients and updated weights
are compared variable by variable. A second plain run, from weights moved by a
few roundings, tells what difference floating-point reordering alone can make.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfpar.keras.adapter import state_of
from tfpar.keras.batches import check_training_batch
from tfpar.keras.model import ParallelModel
from tfpar.keras.preprocessing import batch_as_fit_feeds
from tfpar.report.tables import render_table
from tfpar.session import CompiledFunction
from tfpar.spec.arguments import integer, optional

NOISE_FACTOR = 10.0
"""How many times the measured rounding noise still counts as reordering (empirical)."""

_ROUNDINGS = 4  # of the weights, for the noise run
_FLOOR = {"float64": 1e-10, "float32": 2e-4, "float16": 5e-2, "bfloat16": 5e-2}


@dataclasses.dataclass(frozen=True)
class VariableReport:
    """Differences of one variable, relative to the size of what is compared."""

    name: str
    gradient_error: float | None
    update_error: float
    noise: float
    verdict: str


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`; true when everything agrees.

    Attributes:
        losses: per step (one device, mesh).
        variables: one report per variable.
        reasons: what explains the differences that there are.
    """

    losses: list[tuple[float, float]]
    variables: list[VariableReport]
    reasons: list[str]

    @property
    def ok(self) -> bool:
        return all(v.verdict != "DIFFERS" for v in self.variables) and all(
            np.isclose(a, b, rtol=1e-3, equal_nan=True) for a, b in self.losses
        )

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows = [
            [
                v.name,
                _number(v.gradient_error),
                _number(v.update_error),
                _number(v.noise),
                v.verdict,
            ]
            for v in self.variables
        ]
        losses = "\n".join(
            f"  step {i}: one device {a:.7g}, mesh {b:.7g}" for i, (a, b) in enumerate(self.losses)
        )
        columns = ["variable", "gradient", "update", "rounding noise", "verdict"]
        table = render_table("largest differences", columns, rows, numeric=(1, 2, 3))
        return "\n".join(["losses", losses, table, *self.reasons])


def verify(
    model: keras.Model, x: Any, y: Any = None, *, sample_weight: Any = None, steps: int = 3,
    batch_size: int | None = None,
) -> Verification:  # fmt: skip
    """Train `steps` steps on the mesh and on one device, compare, and restore the model.

    Args:
        model: a compiled parallel model.
        x, y, sample_weight: what `fit` gets: arrays (or structures of arrays), or strings for a
            model with a preprocessor; the whole is one batch, used in every step, unless
            `batch_size` cuts it into consecutive ones.

    Raises:
        ArgumentError: no data, data of unequal lengths, or no step.
        TfparError: the model is not parallel or not compiled.
    """
    state = state_of(model, compiled=True)
    steps, batch_size = integer("steps", steps, 1), optional(_size, "batch_size", batch_size)
    batch = batch_as_fit_feeds(model, (x, y, sample_weight))
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    check_training_batch("(x, y, sample_weight)", (x, y, sample_weight), model)
    batches = _batches((x, y, sample_weight), steps, batch_size)
    step = _recording_step(model)
    on_mesh = CompiledFunction(
        state.program, step, names=state.variable_name, build=state.build_optimizer,
        matters=state.is_no_metric, part=True, name="verify", trains=True,
    )  # fmt: skip
    searched = state.session.options.planner is not None and state.session.options.plan is None
    if searched and state.program.plan is None:
        state.step("train").find_plan(_specs(batches[0]))  # what is verified is what trains
    on_mesh.compile(_specs(batches[0]))  # builds what the first step builds
    start = _snapshot(state)
    parallel = _train(state, on_mesh, batches, start)
    plain_step = tf.function(step, autograph=False)
    plain = _train(state, _on_one_device(state, plain_step), batches, start)
    noisy = _train(state, _on_one_device(state, plain_step), batches, _moved(start))
    _restore(state, start)
    return _compare(state, start, plain, parallel, noisy, on_mesh)


def _size(name: str, value: Any) -> int:
    return integer(name, value, 1)


@dataclasses.dataclass
class _Training:
    losses: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def _batches(data: tuple, steps: int, batch_size: int | None) -> list[tuple]:
    total = len(tree.flatten(data[0])[0])
    size = batch_size or total
    out = []
    for i in range(steps):
        begin = i * size % total
        out.append(
            tuple(
                None if part is None
                else tree.map_structure(
                    lambda a, b=begin: tf.convert_to_tensor(a[b : b + size]), part
                )
                for part in data
            )
        )  # fmt: skip
    return out


def _specs(batch: tuple) -> tuple:
    from tfpar.capture.step import argument_specs

    return argument_specs((batch,))


def _recording_step(model: keras.Model) -> Callable[[Any], Any]:
    """The train step, also returning the gradients that reach the optimizer."""

    def step(data):
        found: dict[str, Any] = {}
        with _recorded_gradients(model, found):
            logs = model.train_step(data)
        loss = logs["loss"] if isinstance(logs, dict) and "loss" in logs else tree.flatten(logs)[0]
        return loss, found

    return step


@contextlib.contextmanager
def _recorded_gradients(model: keras.Model, found: dict[str, Any]) -> Iterator[None]:
    optimizers = [o for o in vars(model).values() if isinstance(o, keras.optimizers.Optimizer)]
    originals = [
        (o, o.apply) for o in {id(o): o for o in [model.optimizer, *optimizers] if o}.values()
    ]

    def recording(original):
        def apply(grads, trainable_variables=None):
            grads = list(grads)
            targets = trainable_variables
            if targets is None:
                targets = original.__self__._trainable_variables
            for gradient, variable in zip(grads, targets, strict=False):
                if gradient is not None:
                    found[variable.path] = tf.convert_to_tensor(gradient)
            return original(grads, trainable_variables)

        return apply

    for optimizer, original in originals:
        object.__setattr__(optimizer, "apply", recording(original))
    try:
        yield
    finally:
        for optimizer, _ in originals:
            object.__delattr__(optimizer, "apply")


def _on_one_device(state: ParallelModel, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(batch):
        state.gather()
        return step(batch)

    return call


def _train(state, step, batches, start) -> _Training:
    _restore(state, start)
    losses, gradients = [], {}
    state.model.reset_metrics()
    for i, batch in enumerate(batches):
        state.model.reset_metrics()
        loss, found = step(batch)
        losses.append(float(loss))
        if i == 0:
            gradients = {k: np.asarray(v) for k, v in found.items()}
    return _Training(losses, gradients, _snapshot(state))


def _snapshot(state: ParallelModel) -> dict[str, np.ndarray]:
    return {v.path: np.array(v.numpy()) for v in state.keras_variables()}


def _restore(state: ParallelModel, values: dict[str, np.ndarray]) -> None:
    for variable in state.keras_variables():
        if variable.path in values:
            variable.assign(values[variable.path])


def _moved(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values, each float moved by a few roundings."""
    rng = np.random.default_rng(0)
    out = {}
    for name, value in values.items():
        if value.dtype.kind == "f" and value.ndim:
            noise = rng.standard_normal(value.shape) * np.finfo(value.dtype).eps * _ROUNDINGS
            value = (value * (1 + noise)).astype(value.dtype)
        out[name] = value
    return out


def _compare(state, start, plain, parallel, noisy, on_mesh) -> Verification:
    reports = []
    for variable in state.model.trainable_variables:
        name = variable.path
        update = plain.weights[name] - start[name]
        error = _relative(parallel.weights[name] - plain.weights[name], update)
        noise = _relative(noisy.weights[name] - plain.weights[name], update)
        gradient = None
        if name in plain.gradients:
            gradient = _relative(
                parallel.gradients[name] - plain.gradients[name], plain.gradients[name]
            )
        floor = _FLOOR.get(str(variable.dtype), 2e-4)
        if not error > floor:
            verdict = "equal"
        elif error <= NOISE_FACTOR * noise:
            verdict = "rounding"
        else:
            verdict = "DIFFERS"
        reports.append(VariableReport(name, gradient, error, noise, verdict))
    losses = list(zip(plain.losses, parallel.losses, strict=True))
    return Verification(losses, reports, _reasons(reports, on_mesh))


def _relative(difference: np.ndarray, reference: np.ndarray) -> float:
    """rms of the difference over rms of the reference."""
    scale = (
        float(np.sqrt(np.mean(np.square(reference.astype("float64"))))) if reference.size else 0.0
    )
    size = (
        float(np.sqrt(np.mean(np.square(difference.astype("float64"))))) if difference.size else 0.0
    )
    return size / scale if scale else (0.0 if size == 0.0 else float("inf"))


def _reasons(reports: list[VariableReport], on_mesh: CompiledFunction) -> list[str]:
    reasons = []
    verdicts = {r.verdict for r in reports}
    if "rounding" in verdicts:
        reasons.append(
            "rounding: sums over the batch and over split dims run in another order; the model "
            f"amplifies roundings that much by itself (within {NOISE_FACTOR:g}x of a plain run "
            "from weights moved by a few roundings)."
        )
    if "DIFFERS" in verdicts:
        stateful = sorted(
            {
                op.type
                for executable in on_mesh.executables.values()
                for op in executable.captured.graph.ops
                if op.stateful and op.type.startswith(("Random", "Truncated", "Multinomial"))
            }
        )
        if stateful:
            reasons.append(
                f"{', '.join(stateful)} draw new numbers in every run, on one device too: use "
                "keras.random with a SeedGenerator to compare."
            )
        worst = max((r for r in reports if r.verdict == "DIFFERS"), key=lambda r: r.update_error)
        reasons.append(
            f"Unexplained difference, largest at {worst.name}: please report it with the model."
        )
    return reasons


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
