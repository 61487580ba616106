"""A Keras model under a session: its train, test and predict functions."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfpar.capture.step import CapturedStep, capture_step
from tfpar.keras.gradients import marked_gradients
from tfpar.keras.loss_trackers import batch_is_unknown, equal_weights
from tfpar.plans import Plan
from tfpar.runtime.executable import Executable
from tfpar.runtime.variables import ParallelVariable
from tfpar.session import CompiledFunction, Program, Session

logger = logging.getLogger("tfpar")


class ParallelModel:
    """Gives a Keras model's `make_*_function`s the partitioned programs.

    Attributes:
        model: the user's model (held weakly: the model owns this object).
        program: the session, and the plan that all steps share.
        plan: the plan in force, once a step has been compiled.
        executables: the last executable by kind (`train`, `test`, `predict`).
    """

    def __init__(self, model: keras.Model, session: Session) -> None:
        self._model = weakref.ref(model)
        self.program = Program(session)
        self.plan: Plan | None = None
        self.executables: dict[str, Executable] = {}
        self._holders: dict[int, tuple[Any, bool]] = {}

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
                self.plan = plan
            self.executables[kind] = executable

        return CompiledFunction(
            self.program, run, names=self.variable_name, on_plan=remember,
            build=self.build_optimizer if kind == "train" else None, matters=self.is_no_metric,
            part=kind != "train", name=f"{kind}_step",
        )  # fmt: skip

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
            unknown, outputs = batch_is_unknown(iterator), None
            for _ in range(self.model.steps_per_execution):
                try:
                    data = drop_optionals(next(iterator))
                except (StopIteration, tf.errors.OutOfRangeError):
                    if outputs is None:
                        raise
                    break
                several = isinstance(data, tuple) and len(data) > 1 and tree.is_nested(data[1])
                outputs = steps[unknown and several](data)
            return outputs

        return function

    def make_predict_function(self) -> Any:
        step = self.step("predict")

        def function(batches: list[Any]) -> Any:
            outputs = [step(drop_optionals(data)) for data in batches]
            if len(outputs) == 1:
                return outputs[0]
            return tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

        return function

    # --- variables ---------------------------------------------------------------

    def keras_variables(self) -> list[Any]:
        """Every Keras variable of the model: weights, metrics, seeds, optimizer."""
        model = self.model
        found = [*model.variables, *getattr(model, "metrics_variables", [])]
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            found += list(optimizer.variables)
        for attribute in vars(model).values():
            if isinstance(attribute, keras.optimizers.Optimizer):
                found += list(attribute.variables)
        return list({id(v): v for v in found}.values())

    def variable_name(self, variable: tf.Variable) -> tuple[str, bool]:
        """A captured variable's Keras path, and whether it is a weight of the model."""
        holder, is_weight = self._holders.get(id(variable), (None, False))
        if holder is None or holder._value is not variable:
            # Looked up anew only now: Keras walks over all layers for it.
            weights = {id(w) for w in self.model.weights}
            self._holders = {
                id(h._value): (h, id(h) in weights) for h in reversed(self.keras_variables())
            }
            holder, is_weight = self._holders.get(id(variable), (None, False))
        if holder is None:
            return variable.name.partition(":")[0], bool(variable.trainable)
        return holder.path, is_weight and variable.dtype.is_floating

    def build_optimizer(self) -> None:
        """Make the slots that Keras's own `train_step` would make in its first trace."""
        model = self.model
        optimizer = model.optimizer
        own = type(model).train_step is keras.Model.train_step
        if own and model.built and model.trainable_variables and optimizer and not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(model.trainable_variables)
            optimizer.built = True

    def is_no_metric(self, variable: tf.Variable) -> bool:
        return all(v._value is not variable for v in self.model.metrics_variables)

    def gather(self) -> None:
        """Make every variable whole again (exporting, eager debugging)."""
        for holder in self.keras_variables():
            if isinstance(holder._value, ParallelVariable):
                holder._value.materialize()
                holder._value.gather()


def drop_optionals(data: Any) -> Any:
    """None for missing values, as Keras does with `tf.experimental.Optional`."""
    return tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )
