"""A Keras model under a session: its train, test and predict functions."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfpar.ir.names import VariableName
from tfpar.plans import Plan
from tfpar.spec import Mesh
from tfpar.tf.capture.step import CapturedStep, argument_specs, capture_step, global_specs
from tfpar.tf.distributed.world import World
from tfpar.tf.keras.batches import parts_of
from tfpar.tf.keras.generation import GenerateFunction
from tfpar.tf.keras.gradients import marked_gradients
from tfpar.tf.keras.layer_sources import layers_of
from tfpar.tf.keras.replay import Replay
from tfpar.tf.runtime.executable import Executable
from tfpar.tf.session import Session
from tfpar.tf.steps import CompiledFunction, SharedPlan
from tfpar.tf.steps.trials import try_plans
from tfpar.tf.variables.parallel_variable import ParallelVariable

_UNKNOWN = (None, False, "")


class ParallelModel:
    """Parallel state of a Keras model, whose `make_*_function`s it gives partitioned programs.

    Attributes:
        model: the user's model (held weakly: the model owns this object).
        program: the session, and the plan that all steps share.
        plan: the plan in force, once a step has been compiled.
        executables: the last executable by kind (`train`, `test`, `predict`).
        fitting: what callbacks hold while `fit` runs, and let go of when it ends.
        replay: brings the data of a resumed training to where it was.
        trained_last: whether the last call of the train function trained, or passed over data.
        ran: the steps that it took: what each of them ran.
        trained_by: the step that they are.
        read_s: how many seconds it waited for their data.
    """

    def __init__(self, model: keras.Model, session: Session) -> None:
        self._model = weakref.ref(model)
        self.program = SharedPlan(session)
        self.plan: Plan | None = None
        self.executables: dict[str, Executable] = {}
        self.replay: Replay | None = None
        self.fitting = contextlib.ExitStack()
        self.trained_last = True
        self.ran: list[Executable] = []
        self.trained_by: CompiledFunction | None = None
        self.read_s = 0.0
        self._holders: dict[int, tuple[Any, bool, str]] = {}
        self._key = 0 if self.world is None else self.world.lead.register(self)

    @property
    def world(self) -> World | None:
        """The processes, where each rank is one."""
        return self.session.ranks.world

    @property
    def mesh(self) -> Mesh:
        """Mesh of the plan in force; without one, that of the ranks that are planned for."""
        return self.plan.mesh if self.plan is not None else self.session.stage_mesh

    @property
    def session(self) -> Session:
        return self.program.session

    @property
    def model(self) -> keras.Model:
        model = self._model()
        assert model is not None
        return model

    # --- steps -------------------------------------------------------------------

    def step(self, kind: str, *, equal_batches: bool = False) -> CompiledFunction:
        """The compiled form of `train_step`, `test_step` or `predict_step`.

        Args:
            kind: `train`, `test` or `predict`.
            equal_batches: see `loss_trackers`.
        """

        def run(data):
            with contextlib.ExitStack() as stack:
                if kind == "train":
                    stack.enter_context(marked_gradients())
                if equal_batches:
                    stack.enter_context(equal_weights(self.model))
                return getattr(self.model, f"{kind}_step")(data)

        def remember(plan: Plan, executable: Executable) -> None:
            if kind == "train" or self.plan is None:
                self.plan = plan.of_model(layers_of(self.model))
            self.executables[kind] = executable

        return CompiledFunction(
            self.program,
            run,
            names=self.variable_name,
            on_plan=remember,
            build=self.build_optimizer if kind == "train" else None,
            matters=self.is_no_metric,
            part=kind != "train",
            jit_compile=self.model.jit_compile,
            name=f"{kind}_step",
            layers=lambda: layers_of(self.model),
        )

    def capture_gradients(self, specs: Sequence[Any]) -> CapturedStep:
        """The training step without its updates: forward, backward and metrics.

        No optimizer is built and nothing is computed, so a model may be larger than memory.
        What leads to the gradients stays only while `CapturedStep.rewrite` runs the passes.

        Args:
            specs: `argument_specs((batch,))`; a batch is `(x, y)` or `(x, y, sample_weight)`.

        Raises:
            CaptureError: as for `capture_step`.
        """

        def run(data):
            with marked_gradients(update=False):
                return self.model.train_step(data)

        with self.session.scope():
            return capture_step(
                run, specs, self.variable_name, "train_step", matters=self.is_no_metric
            )

    def make_train_function(self) -> Any:
        return self._iterating("train")

    def make_test_function(self) -> Any:
        return self._iterating("test")

    def _iterating(self, kind: str) -> Any:
        """Keras's function(iterator): `steps_per_execution` steps, the last one's logs."""
        steps = {equal: self.step(kind, equal_batches=equal) for equal in (False, True)}

        def function(iterator: Iterator[Any]) -> Any:
            unknown, outputs, parts = batch_is_unknown(iterator), None, parts_of(iterator)
            replay = self.replay if kind == "train" else None
            ran: list[Executable] = []
            read_s = 0.0
            for _ in range(self.model.steps_per_execution):
                began = time.perf_counter()
                try:
                    source = iterator if replay is None else replay.source(iterator)
                    data = drop_optionals(next(source))
                except (StopIteration, tf.errors.OutOfRangeError):
                    if outputs is None:
                        raise
                    break
                read_s += time.perf_counter() - began
                several = isinstance(data, tuple) and len(data) > 1 and tree.is_nested(data[1])
                step = steps[unknown and several]
                if self.session.options.objective == "latency" and self.session.base is None:
                    self._plan_prediction(data, parts)
                if kind == "train":
                    try_plans(step, (data,), parts)
                executable = step.executable((data,), parts)  # makes the metrics' variables
                if replay is not None and replay.passes_over():
                    self.trained_last, outputs = False, self.model.get_metrics_result()
                else:
                    self.trained_last, outputs = True, executable((data,))
                    ran.append(executable)
                if kind == "train":
                    self.trained_by, self.ran, self.read_s = step, ran, read_s
            return outputs

        return function

    def _plan_prediction(self, data: Any, parts: int) -> None:
        """Plan the prediction for a batch, which other steps then have their weights from."""
        specs = argument_specs((keras.utils.unpack_x_y_sample_weight(data)[:1],))
        whole = specs if parts == 1 else global_specs(specs, parts)
        self.step("predict").find_plan(whole)

    def make_predict_function(self) -> Any:
        step = self.step("predict")

        def function(batches: list[Any]) -> Any:
            outputs = [step(drop_optionals(data)) for data in batches]
            if len(outputs) == 1:
                return outputs[0]
            return tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

        return function

    def make_generate_function(self) -> Any:
        return GenerateFunction(self)

    # --- variables ---------------------------------------------------------------

    def keras_variables(self) -> list[Any]:
        """List every Keras variable of the model: weights, metrics, seeds, optimizer."""
        found = [*self.model.variables, *getattr(self.model, "metrics_variables", [])]
        for optimizer in self.optimizers:
            found += list(optimizer.variables)
        return list({id(v): v for v in found}.values())

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The optimizer that the model was compiled with, and those among its attributes."""
        model = self.model
        own = [a for a in vars(model).values() if isinstance(a, keras.optimizers.Optimizer)]
        found = [getattr(model, "optimizer", None), *own]
        return list({id(o): o for o in found if o is not None}.values())

    def variable_name(self, variable: tf.Variable) -> VariableName:
        """Return the name of a captured variable, and whether it is a weight of the model."""
        holder, is_weight, place = self._holders.get(id(variable), _UNKNOWN)
        if holder is None or holder._value is not variable:
            # Looked up anew only now: Keras walks over all layers for it.
            weights, places = {id(w) for w in self.model.weights}, variable_paths(self.model)
            self._holders = {
                id(h._value): (h, id(h) in weights, places.get(id(h), ""))
                for h in reversed(self.keras_variables())
            }
            holder, is_weight, place = self._holders.get(id(variable), _UNKNOWN)
        if holder is None:
            return VariableName(variable.name.partition(":")[0], bool(variable.trainable))
        return VariableName(holder.path, is_weight and variable.dtype.is_floating, place)

    def build_optimizer(self, force: bool = False) -> None:
        """Make the slots that Keras's own `train_step` would make in its first trace.

        Args:
            force: also where the model has a `train_step` of its own.
        """
        model = self.model
        optimizer = getattr(model, "optimizer", None)
        own = force or type(model).train_step is keras.Model.train_step
        if own and model.built and model.trainable_variables and optimizer and not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(model.trainable_variables)
            optimizer.built = True

    def is_no_metric(self, variable: tf.Variable) -> bool:
        return all(v._value is not variable for v in self.model.metrics_variables)

    def named_variables(self) -> dict[str, tf.Variable]:
        """The numeric variables of the model by path, in one order on every rank."""
        found: dict[str, tf.Variable] = {}
        for holder in self.keras_variables():
            variable = holder._value
            if not isinstance(variable, tf.Variable) or variable.dtype == tf.string:
                continue
            name, n = holder.path, 1
            while name in found:
                name, n = f"{holder.path}#{n}", n + 1
            found[name] = variable
        return found

    def gather(self) -> None:
        """Make every variable whole again (eager debugging)."""
        for holder in self.keras_variables():
            if isinstance(holder._value, ParallelVariable):
                holder._value.materialize()
                holder._value.gather()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Make every variable whole inside, for functions that read its handle."""
        with contextlib.ExitStack() as stack:
            for variable in self.named_variables().values():
                if isinstance(variable, ParallelVariable):
                    stack.enter_context(variable.whole())
            yield

    def load_weights(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Load a file of Keras's; each rank reads what it stores.

        Where the first rank leads, the others are asked to load it too.
        """
        model = self.model
        built = bool(getattr(getattr(model, "optimizer", None), "built", False))
        if self.world is not None:
            self.world.lead.ask(self._key, "load_weights_too", path, args, kwargs, built)
        type(model).load_weights(model, path, *args, **kwargs)

    def load_weights_too(
        self, path: str, args: Sequence[Any], kwargs: dict[str, Any], optimizer_built: bool
    ) -> None:
        """Load weights on this rank, as the first rank, leading, does."""
        if optimizer_built:
            self.build_optimizer(force=True)
        self.load_weights(path, *args, **kwargs)


def drop_optionals(data: Any) -> Any:
    """Replace missing values by None, as Keras does with `tf.experimental.Optional`."""
    return tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )


# --- Keras's loss trackers ---
#
# `fit` on arrays, generators and most datasets gives Keras batches of unknown size, whose losses it
# averages with equal weights. A captured step has static sizes; here it is told to do the same.


@contextlib.contextmanager
def equal_weights(model: keras.Model) -> Iterator[None]:
    """Run a block in which the loss trackers of `model` weigh all batches equally."""
    original = keras.metrics.Mean.update_state

    @functools.wraps(original)
    def update_state(self, values, sample_weight=None):
        trackers = getattr(model._compile_loss, "metrics", ())
        if any(self is tracker for tracker in trackers):
            sample_weight = None
        return original(self, values, sample_weight)

    keras.metrics.Mean.update_state = update_state
    try:
        yield
    finally:
        keras.metrics.Mean.update_state = original


def batch_is_unknown(iterator: Any) -> bool:
    """Whether Keras would see batches of unknown size in what `iterator` gives."""
    specs = tf.nest.flatten(getattr(iterator, "element_spec", ()), expand_composites=True)
    shapes = [s.shape for s in specs if isinstance(s, tf.TensorSpec) and s.shape.rank]
    return any(shape[0] is None for shape in shapes)


# --- Paths of a Keras model's variables by the layers that hold them ---


def variable_paths(model: keras.Model) -> dict[int, str]:
    """Map `id` of each weight and seed to its path in the model, `net/encoder/a/kernel`.

    What several layers share is where the first of them has it.
    """
    found: dict[int, str] = {}
    seen: set[int] = set()

    def visit(layer: keras.Layer, place: str) -> None:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        for variable in _own(layer):
            found.setdefault(id(variable), f"{place}/{variable.name}")
        for inner in layer._layers:
            visit(inner, f"{place}/{inner.name}")

    visit(model, model.name)
    return found


def _own(layer: keras.Layer) -> Iterator[keras.Variable]:
    """The variables of a layer that no layer in it holds."""
    yield from layer._trainable_variables
    yield from layer._non_trainable_variables
    for generator in layer._seed_generators:
        yield generator.state
