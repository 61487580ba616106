"""The runs of `verify`: steps on the mesh, each again on one device, plainly and with noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfpar.ir.effects import find_updates_without
from tfpar.ir.traits import STATEFUL_DRAWS
from tfpar.observability.verification.noise import COARSE_ROUNDINGS, ROUNDINGS, rounding_noise
from tfpar.observability.verification.recording import HeldGradients, recording_step
from tfpar.observability.verification.report import Verification
from tfpar.observability.verification.steps import (
    StepOutcome,
    TakenStep,
    Values,
    build_verification,
    compare_step,
)
from tfpar.spec.arguments import argument_error, integer, optional
from tfpar.tf.capture.step import argument_specs
from tfpar.tf.keras.adapter import state_of
from tfpar.tf.keras.batches import batch_as_fit_feeds, check_training_batch
from tfpar.tf.keras.gradients import marked_gradients
from tfpar.tf.keras.model import ParallelModel
from tfpar.tf.steps import CompiledFunction

MORE_STEPS = 20
"""At most, in place of steps whose gradients are not finite: a loss scale is halved by each."""


def verify(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    steps: int = 3,
    batch_size: int | None = None,
) -> Verification:
    """Take `steps` training steps on the mesh, each again on one device, and compare everything.

    The model is left as it was. `tfpar.observability.verification` says what is compared, and how.

    Args:
        model: a compiled parallel model.
        x, y, sample_weight: what `fit` gets: arrays (or structures of arrays), or strings for a
            model with a preprocessor; the whole is one batch, used in every step, unless
            `batch_size` cuts it into consecutive ones. Or x gives batches: a `tf.data.Dataset`, a
            `PyDataset` or a generator, of which the first ones are taken.

    Returns:
        A report of every variable, worst first when printed; it is true if all was judged, and
        nothing differs by more than roundings do. It has more steps than were asked for where
        gradients are not finite, as while a loss scale is found.

    Raises:
        ArgumentError: no data, data of unequal lengths, or no step; labels or a batch size beside
            what gives batches.
        TfparError: the model is not parallel or not compiled.
        RuntimeMismatchError: ranks that should hold the same values do not.
    """
    state = state_of(model, compiled=True)
    steps, batch_size = integer("steps", steps, 1), optional(_size, "batch_size", batch_size)
    batches, length_is_known = batches_of(model, (x, y, sample_weight), steps, batch_size)
    on_mesh = _OnMesh(state, batches)
    variables = on_mesh.variables()
    start = _read(variables)
    try:
        taken = on_mesh.take_all(batches, variables)
        state.gather()
        on_device = _OneDevice(recording_step(model), variables)
        compared = [compare_step(on_device, t, state.session.options.compression) for t in taken]
    finally:
        _write(variables, start)
    # Compiled by XLA, or in loops of several steps, Keras runs nothing without data.
    op_by_op = not (model.jit_compile or model.run_eagerly) and model.steps_per_execution == 1
    extra = on_mesh.updated_without_data() if op_by_op and not length_is_known else []
    return build_verification(compared, steps, on_mesh.random_types(), extra)


def _size(name: str, value: Any) -> int:
    return integer(name, value, 1)


# --- on the mesh ------------------------------------------------------------------------


class _OnMesh:
    """Run of the model's steps as it trains on its mesh."""

    def __init__(self, state: ParallelModel, batches: Sequence[Any]) -> None:
        self._state = state
        self._held = HeldGradients()
        step = recording_step(state.model, self._held)

        def run(data: Any) -> Any:
            with marked_gradients():
                return step(data)

        self._step = CompiledFunction(
            state.program,
            run,
            names=state.variable_name,
            build=state.build_optimizer,
            matters=state.is_no_metric,
            part=True,
            name="verify",
            trains=True,
        )
        options = state.session.options
        searched = options.planner is not None and options.plan is None
        if searched and state.program.plan is None:
            # What is verified is what trains.
            state.step("train").find_plan(argument_specs((batches[0],)))
        for batch in batches:
            self._step.executable((batch,))

    def variables(self) -> dict[str, tf.Variable]:
        """Return every numeric variable of the model and of its steps, by name."""
        found = self._state.named_variables()
        known = {id(v) for v in found.values()}
        for executable in self._step.executables.values():
            captured = executable.captured
            named = zip(captured.graph.variables, captured.variables, strict=True)
            for name, variable in ((v.name, variable) for v, variable in named):
                if id(variable) not in known and not self._held.holds(variable):
                    known.add(id(variable))
                    found[name] = variable
        return found

    def take_all(
        self, batches: Sequence[Any], variables: Mapping[str, tf.Variable]
    ) -> list[TakenStep]:
        """Take a step with each batch, and more with the same where steps are skipped."""
        taken: list[TakenStep] = []
        for batch in batches:
            taken.append(self.take(batch, variables))
            while taken[-1].can_be_repeated and len(taken) < len(batches) + MORE_STEPS:
                taken.append(self.take(batch, variables))
        return taken

    def take(self, batch: Any, variables: Mapping[str, tf.Variable]) -> TakenStep:
        self._state.model.reset_metrics()
        before = _read(variables)
        logs, sparse = self._step(batch)
        gradients = {**self._held.read(), **_arrays(sparse)}
        return TakenStep(batch, before, StepOutcome(_arrays(logs), gradients, _read(variables)))

    def updated_without_data(self) -> list[str]:
        """The variables that a step may update before it has any data."""
        known, found = self.variables(), dict[str, None]()
        for step in self._step.executables.values():
            captured = step.captured
            updated = find_updates_without(captured.graph, captured.arguments)
            found |= {v.name: None for v in updated if v.name in known}
        return [*found]

    def random_types(self) -> list[str]:
        """List op types of the step that draw other numbers each time they run."""
        steps = self._step.executables.values()
        types = {op.type for step in steps for op in step.captured.graph.ops}
        return sorted(types & STATEFUL_DRAWS)


# --- on one device ----------------------------------------------------------------------


class _OneDevice:
    """Run of steps again on one device: plainly, with noise, and with much more of it."""

    tolerance = 0.0

    def __init__(self, step: Callable[..., Any], variables: Mapping[str, tf.Variable]) -> None:
        def with_noise(roundings: float) -> Callable[..., Any]:
            def noisy(data: Any, given: Any) -> Any:
                with rounding_noise(roundings):
                    return step(data, given)

            return tf.function(noisy, autograph=False)

        self._variables = variables
        self._plain = tf.function(step, autograph=False)
        self._noisy, self._coarse = map(with_noise, (ROUNDINGS, COARSE_ROUNDINGS))

    def plain(self, taken: TakenStep) -> StepOutcome:
        return self._again(self._plain, taken)

    def noisy(self, taken: TakenStep, runs: int) -> list[StepOutcome]:
        return [self._again(self._noisy, taken) for _ in range(runs)]

    def coarse(self, taken: TakenStep, runs: int) -> list[StepOutcome]:
        return [self._again(self._coarse, taken) for _ in range(runs)]

    def _again(self, function: Callable[..., Any], taken: TakenStep) -> StepOutcome:
        """Run the step from the same state, with the mesh's gradients in the optimizers."""
        _write(self._variables, taken.before)
        logs, gradients = function(taken.batch, _tensors(taken.mesh.gradients))
        return StepOutcome(_arrays(logs), _arrays(gradients), _read(self._variables))


def _read(variables: Mapping[str, tf.Variable]) -> Values:
    return {name: np.array(v.read_value().numpy()) for name, v in variables.items()}


def _write(variables: Mapping[str, tf.Variable], values: Values) -> None:
    for name, variable in variables.items():
        variable.assign(values[name])


def _arrays(tensors: Mapping[str, Any]) -> Values:
    return {name: np.array(t.numpy()) for name, t in tensors.items()}


def _tensors(arrays: Values) -> dict[str, tf.Tensor]:
    return {name: tf.constant(a) for name, a in arrays.items()}


# --- The batches of the steps that verify takes ---

Data = tuple[Any, Any, Any]
"""x, y and sample weights, as `fit` takes them."""


class Batches(NamedTuple):
    """Batches, as steps are fed with them.

    Attributes:
        length_is_known: whether `fit` knows how many there are before it has seen the last.
    """

    batches: list[Any]
    length_is_known: bool


def batches_of(model: keras.Model, data: Data, steps: int, batch_size: int | None) -> Batches:
    """The batches of `steps` steps, from the beginning again where there are fewer.

    Args:
        data: arrays, or x gives batches: a `tf.data.Dataset`, a `PyDataset` or a generator.

    Raises:
        ArgumentError: no data, data of unequal lengths, or labels beside what gives batches.
    """
    x, y, sample_weight = data
    if not isinstance(x, tf.data.Dataset | keras.utils.PyDataset | Iterator):
        batch = _checked(model, data)
        return Batches(_cut(keras.utils.unpack_x_y_sample_weight(batch), steps, batch_size), True)
    for name, value in (("y", y), ("sample_weight", sample_weight), ("batch_size", batch_size)):
        if value is not None:
            raise argument_error(name, value, "None beside data that give batches of their own")
    some = [_checked(model, batch) for batch in itertools.islice(_each(x), steps)]
    if not some:
        raise argument_error("x", x, "data that give a batch or more")
    as_tensors = [tree.map_structure(tf.convert_to_tensor, batch) for batch in some]
    return Batches([*itertools.islice(itertools.cycle(as_tensors), steps)], _length_is_known(x))


def _checked(model: keras.Model, batch: Any) -> Any:
    """A batch as the model's `train_step` gets it."""
    batch = batch_as_fit_feeds(model, batch)
    unpacked = keras.utils.unpack_x_y_sample_weight(batch)
    check_training_batch("(x, y, sample_weight)", unpacked, model)
    return keras.utils.pack_x_y_sample_weight(*unpacked)


def _each(data: tf.data.Dataset | keras.utils.PyDataset | Iterator[Any]) -> Iterable[Any]:
    if not isinstance(data, keras.utils.PyDataset):
        return data
    known = data.num_batches
    return map(data.__getitem__, itertools.count() if known is None else range(known))


def _length_is_known(data: tf.data.Dataset | keras.utils.PyDataset | Iterator[Any]) -> bool:
    if isinstance(data, tf.data.Dataset):
        return int(data.cardinality()) != tf.data.UNKNOWN_CARDINALITY
    return isinstance(data, keras.utils.PyDataset) and data.num_batches is not None


def _cut(data: Data, steps: int, batch_size: int | None) -> list[Any]:
    """Consecutive batches of arrays, which are begun anew at their end."""
    total = len(tree.flatten(data[0])[0])
    size = batch_size or total

    def cut(part: Any, begin: int) -> Any:
        return tree.map_structure(lambda a: tf.convert_to_tensor(a[begin : begin + size]), part)

    begins = [i * size % total for i in range(steps)]
    return [
        keras.utils.pack_x_y_sample_weight(
            *(None if part is None else cut(part, begin) for part in data)
        )
        for begin in begins
    ]
