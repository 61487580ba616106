"""Existing graphs on a mesh: `GraphProgram` takes the place of a `tf.compat.v1.Session`."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef

from tfpar.observability.verification import Verification
from tfpar.observability.verification.sessions import SessionDevice
from tfpar.observability.verification.steps import (
    StepOutcome,
    TakenStep,
    Values,
    build_verification,
    compare_step,
)
from tfpar.options import Keywords, Options, PathLike, settings_of, takes
from tfpar.plans import Plan
from tfpar.settings import ConstraintsLike, MeshLike
from tfpar.spec import TfparError
from tfpar.spec.arguments import argument_error, integer
from tfpar.tf.capture.graph_sources import from_graph, from_meta_graph, from_saved_model
from tfpar.tf.capture.step import CapturedStep, argument_specs
from tfpar.tf.capture.v1 import GraphSource
from tfpar.tf.session import Session
from tfpar.tf.steps import CompiledFunction, SharedPlan
from tfpar.tf.variables.parallel_variable import ParallelVariable

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _eagerly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the graph (and the Session) that may be active where the method is called."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with tf.__internal__.eager_context.eager_mode():
            return method(*args, **kwargs)

    return call


class GraphProgram:
    """A graph that runs partitioned, and its variables.

        program = tap.GraphProgram(graph, tap.split([2, 2]))
        _, loss_value = program.run([train_op, loss], {x: images, y: labels})
        program.save("model.ckpt")          # as tf.compat.v1.train.Saver would

    Each new set of fetches and feed shapes is compiled once. The first that updates weights is
    planned, as the training step of a Keras model is, and the others run under its plan. Variables
    are initialised by the graph's own initialisers, or restored.

    Args:
        source: a `tf.Graph` of `tf.compat.v1`; a MetaGraph, or the path of a `.meta` file; the
            folder of a SavedModel; or a `GraphSource` of `tfpar.tf.capture.v1`.
        mesh, constraints: as for `auto_parallel`; constraints name variables.
        options, keywords: as for `auto_parallel`.

    Raises:
        TfparError: as for `auto_parallel`, or a `source` that is none of these.
    """

    @takes(Keywords)
    def __init__(
        self,
        source: GraphSource | tf.Graph | MetaGraphDef | PathLike,
        mesh: MeshLike | None = None,
        constraints: ConstraintsLike = (),
        *,
        options: Options | None = None,
        **keywords: Unpack[Keywords],
    ) -> None:
        self.source = _source(source)
        self.program = SharedPlan(Session.of(settings_of(mesh, constraints, options, keywords)))
        world = self.program.session.ranks.world
        if world is not None:  # initialisers without a seed draw alike on all ranks
            self.source.seed = world.first("drawing a seed", lambda: random.randrange(1, 2**31))
        self._steps: dict[Any, _FetchStep] = {}
        self._plan: Plan | None = None
        self._trains = False

    @property
    def plan(self) -> Plan:
        """The plan that the graph runs with.

        Raises:
            TfparError: it has not run yet.
        """
        if self._plan is None:
            raise TfparError(
                "The graph has no plan yet: it is made for the shapes of feeds, at the first run."
            )
        return self._plan

    def _remember(self, plan: Plan, trains: bool) -> None:
        if trains or not self._trains:
            self._plan, self._trains = plan, self._trains or trains

    @property
    def variables(self) -> dict[str, ParallelVariable]:
        """Whole values from outside, by name."""
        return self.source.variables

    @_eagerly
    def run(self, fetches: Any = None, feeds: Mapping[Any, Any] | None = None) -> Any:
        """Run one step; as `Session.run`.

        Args:
            fetches: tensors, operations, variables or names, in any structure; the
                signature's results if None.
            feeds: by tensor or name, the whole value.

        Returns:
            numpy values in the structure of `fetches`, None for operations.
        """
        if fetches is None:
            fetches = self.source.results
        fed = [self.source.feed(what) for what in feeds or ()]
        names = tuple(t.name for t in fed)
        key = (str(tf.nest.map_structure(lambda f: self.source.fetch(f).name, fetches)), names)
        values = [
            tf.convert_to_tensor(value, tensor.dtype)
            for tensor, value in zip(fed, (feeds or {}).values(), strict=True)
        ]
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _FetchStep(
                self.program, self.source, fetches, names, values, self._remember
            )
        result = step(*values)
        return tf.nest.map_structure(lambda t: None if t is None else t.numpy(), result)

    @_eagerly
    def verify(
        self, fetches: Any, feeds: Mapping[Any, Any] | None = None, *, steps: int = 3
    ) -> Verification:
        """Run `steps` steps on the mesh, each again in a Session, compare, and go back.

        Args:
            fetches, feeds: as for `run`; with a train op among the fetches every weight is
                compared after its updates.

        Returns:
            a report as of `tap.verify`, true if all was judged and agrees: the largest difference
            of each variable and each fetch.

        Raises:
            TfparError: no steps.
        """
        steps = integer("steps", steps, 1)
        fetches = self.source.results if fetches is None else fetches
        taken: list[TakenStep] = []
        start = before = self.values()
        try:
            for _ in range(steps):
                results = _by_name(fetches, self.run(fetches, feeds))
                taken.append(TakenStep(feeds, before, StepOutcome(results, {}, self.values())))
                before = taken[-1].mesh.after
        finally:
            for name, value in start.items():
                self.variables[name].assign(value)
        device = SessionDevice(taken, functools.partial(self._in_session, fetches, feeds))
        compared = [compare_step(device, step, None) for step in taken]
        return build_verification(compared, steps, [], [])

    def _in_session(
        self, fetches: Any, feeds: Mapping[Any, Any] | None, before: Sequence[Values]
    ) -> list[StepOutcome]:
        """A step from each of the given values, in one Session."""
        outcomes = []
        with self.source.session() as (session, load, variables):
            fed = {self.source.in_session(self.source.feed(k)): v for k, v in (feeds or {}).items()}
            wanted = tf.nest.map_structure(
                lambda f: self.source.in_session(self.source.fetch(f)), fetches
            )
            for values in before:
                load(values)
                results = _by_name(fetches, session.run(wanted, fed))
                after = {n: np.asarray(v) for n, v in session.run(variables).items()}
                outcomes.append(StepOutcome(results, {}, after))
        return outcomes

    # --- checkpoints -------------------------------------------------------------

    @_eagerly
    def save(self, path: str) -> str:
        """Write a checkpoint that the graph's Saver can restore; returns `path`.

        Where ranks are processes, all call it, and the first one writes; ranks that name paths of
        their own each write theirs.
        """
        world = self.program.session.ranks.world
        if world is None:
            self._write(path)
        else:
            world.lead.write(path, f"save({path!r})", lambda: self._write(path))
        return path

    def _write(self, path: str) -> None:
        saved, folder = self.source.saved, os.path.dirname(os.path.abspath(path))
        tf.io.gfile.makedirs(folder)
        tf.raw_ops.SaveV2(
            prefix=path,
            tensor_names=[s.name for s in saved],
            shape_and_slices=[s.slice for s in saved],
            tensors=[self.variables[s.variable].read_value() for s in saved],
        )
        tf.compat.v1.train.update_checkpoint_state(folder, path)

    @_eagerly
    def restore(self, path: str) -> None:
        """Read a checkpoint that the graph's Saver (or `save`) wrote.

        Raises:
            TfparError: the checkpoint lacks a variable.
        """
        saved = self.source.saved
        reader = tf.train.load_checkpoint(path)
        missing = [s.name for s in saved if not reader.has_tensor(s.name)]
        if missing:
            raise TfparError(
                f"The checkpoint {path!r} has no {', '.join(map(repr, missing[:5]))}"
                f"{' ...' if len(missing) > 5 else ''}. Was it written by this graph's Saver?"
            )
        values = tf.raw_ops.RestoreV2(
            prefix=path,
            tensor_names=[s.name for s in saved],
            shape_and_slices=[s.slice for s in saved],
            dtypes=[self.variables[s.variable].dtype for s in saved],
        )
        for entry, value in zip(saved, values, strict=True):
            self.variables[entry.variable].assign(value)

    @_eagerly
    def values(self) -> dict[str, np.ndarray]:
        """The whole value of every variable, by name."""
        return {name: v.read_value().numpy() for name, v in self.variables.items()}


class _FetchStep(CompiledFunction):
    """The step of one set of fetches and feeds.

    Args:
        fed: the names of the tensors that are fed.
        values: for each, the first one: whether the step trains is seen from its graph.
        on_plan: is given a plan, and whether it is that of a step that trains.
    """

    def __init__(
        self,
        program: SharedPlan,
        source: GraphSource,
        fetches: Any,
        fed: Sequence[str],
        values: Sequence[tf.Tensor],
        on_plan: Callable[[Plan, bool], None],
    ) -> None:
        self._source = source
        self._fetches = fetches
        self._fed = fed
        self._first: CapturedStep | None = None
        first = self._first = self.capture(argument_specs(tuple(values)))
        trains = bool(first.gradients)
        super().__init__(
            program,
            source.capture,
            trains=trains,
            name="train_step" if trains else "step",
            # A plan that is given knows the weights; what else is fetched is not its matter.
            part=not trains or program.session.options.plan is not None,
            several=True,
            on_plan=lambda plan, _: on_plan(plan, trains),
        )

    def capture(self, specs: Sequence[Any]) -> CapturedStep:
        captured, self._first = self._first, None
        if captured is None:  # the first one is for the first values, and there is no other yet
            shapes = [tuple(spec.shape.as_list()) for spec in specs]
            captured = self._source.capture(
                self._fetches, dict(zip(self._fed, shapes, strict=True))
            )
        return captured


def _by_name(fetches: Any, results: Any) -> dict[str, np.ndarray]:
    """The results that are values, by what was fetched."""
    found = tf.__internal__.nest.flatten_up_to(fetches, results)
    return {
        what if isinstance(what, str) else what.name: np.asarray(result)
        for what, result in zip(tf.nest.flatten(fetches), found, strict=True)
        if result is not None and not isinstance(result, tuple)
    }


def _source(given: Any) -> GraphSource:
    """The graph that a user gives, in any of its forms."""
    if isinstance(given, GraphSource):
        return given
    if isinstance(given, tf.Graph):
        return from_graph(given)
    if isinstance(given, MetaGraphDef):
        return from_meta_graph(given)
    if isinstance(given, (str, os.PathLike)):
        path = os.fspath(given)
        return from_meta_graph(path) if path.endswith(".meta") else from_saved_model(path)
    raise argument_error(
        "source",
        given,
        "a tf.Graph, a MetaGraphDef, the path of a .meta file or of a SavedModel, or a GraphSource",
    )
