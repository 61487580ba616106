"""A session: one mesh, one set of constraints, and the steps compiled for them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import lift_to_graph
from tensorflow.python.framework.func_graph import FuncGraph

from tfpar.capture.step import CapturedStep, argument_specs, capture_step
from tfpar.constraints import Constraint, batch_axes
from tfpar.keras.initial_shapes import initial_shape
from tfpar.plan import Plan, plan_from_constraints
from tfpar.propagation.engine import PartitionedGraph
from tfpar.propagation.prepared import PreparedGraph
from tfpar.rules import has_rule
from tfpar.runtime.devices import rank_devices
from tfpar.runtime.executable import CompileOptions, Executable, compile_step, prepare_step
from tfpar.runtime.variables import ParallelVariable
from tfpar.spec import Mesh, Replicate, Shard, Spec, TfparError

logger = logging.getLogger("tfpar")

active: contextvars.ContextVar[tuple[Session, ...]] = contextvars.ContextVar("active", default=())
"""The stack of active `auto_parallel` contexts; the only global state."""

_NO_RULE = {
    False: "No op rule for {}",
    True: "No op rule for these uses (sizes that are not static, or rare attributes) of {}",
}

VariableNames = Callable[[tf.Variable], tuple[str, bool]]


@dataclasses.dataclass(eq=False)
class Session:
    """What `auto_parallel` sets up.

    Attributes:
        mesh: logical axes over the ranks.
        constraints: what the user fixed.
        plan: a given plan instead of constraints, or None.
        options: see `CompileOptions`.
    """

    mesh: Mesh
    constraints: tuple[Constraint, ...] = ()
    plan: Plan | None = None
    options: CompileOptions = dataclasses.field(default_factory=CompileOptions)

    @functools.cached_property
    def devices(self) -> list[str]:
        """The device of each rank; starts TensorFlow's runtime."""
        return rank_devices(self.mesh.size)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Session]:
        """Variables made inside are not materialised; models made inside are parallel."""
        token = active.set((*active.get(), self))
        try:
            with tf.variable_creator_scope(create_variable):
                yield self
        finally:
            active.reset(token)

    def input_specs(self, captured: CapturedStep, batch_size: int | None) -> list[Spec]:
        """Arguments with the batch in front are split over the batch axes; the rest is whole."""
        axes = self._batch_axes
        specs: list[Spec] = []
        for position, tensor in enumerate(captured.graph.inputs):
            batched = (
                position < captured.num_arguments
                and batch_size is not None
                and bool(tensor.shape)
                and tensor.shape[0] == batch_size
            )
            specs.append(
                tuple(
                    Shard(0) if batched and a in axes else Replicate()
                    for a in range(self.mesh.num_axes)
                )
            )
        return specs

    @functools.cached_property
    def _batch_axes(self) -> tuple[int, ...]:
        if self.plan is not None:
            return tuple(self.mesh.axis(n) for n in self.plan.batch_axes)
        return tuple(self.mesh.axis(n) for n in batch_axes(self.constraints, self.mesh))


class CompiledFunction:
    """A step compiled anew for each set of argument shapes; one plan for all.

    Args:
        session: the mesh and the constraints.
        function: the step; called with the arguments while tracing.
        names: (unique name, whether a weight) of each captured variable.
        part: the step is part of the planned one (an evaluation or a prediction).
        build, matters: see `capture_step`.
    """

    def __init__(
        self, session: Session, function: Callable[..., Any], *,
        names: VariableNames | None = None,
        on_plan: Callable[[Plan, Executable], None] | None = None,
        build: Callable[[], None] | None = None,
        matters: Callable[[tf.Variable], bool] | None = None,
        part: bool = False, name: str = "step",
    ) -> None:  # fmt: skip
        self.session = session
        self._build = build
        self._matters = matters
        self._part = part
        self._reported: set[str] = set()
        self.function = function
        self.executables: dict[Any, Executable] = {}
        self._names = names
        self._on_plan = on_plan
        self._name = name

    def __call__(self, *arguments: Any) -> Any:
        specs = argument_specs(arguments)
        key = _hashable(specs)
        executable = self.executables.get(key)
        if executable is None:
            executable = self.compile(specs)
            self.executables[key] = executable
        return executable(arguments)

    def capture(self, specs: Sequence[Any]) -> CapturedStep:
        """Trace the step for `specs` (structures of TensorSpecs)."""
        with self.session.scope():
            return capture_step(
                self.function, specs, self._names, self._name, self._build, self._matters
            )

    def compile(self, specs: Sequence[Any]) -> Executable:
        """Capture, plan and link the step for `specs`."""
        session = self.session
        devices = session.devices
        captured = self.capture(specs)
        captured.variables = [ParallelVariable.adopt(v) for v in captured.variables]
        prepared = prepare_step(captured)
        self._report_fallbacks(prepared)
        plan = self._plan(captured)
        laid = {
            v.name: variable.layout[1]
            for v, variable in zip(captured.graph.variables, captured.variables, strict=True)
            if variable.layout is not None and variable.layout[0] == session.mesh
        }
        anchors = plan.anchors()
        anchors = dataclasses.replace(
            anchors,
            variables={**laid, **anchors.variables},
            inputs=session.input_specs(captured, batch_size_of(specs)),
        )
        executable = compile_step(
            captured, anchors, session.mesh, devices, session.options, prepared
        )
        self._report_fallbacks(prepared)  # bodies are known now
        self._report_held(executable.partitioned)
        if self._on_plan is not None:
            self._on_plan(plan.with_partitioned(executable.partitioned), executable)
        return executable

    def _plan(self, captured: CapturedStep) -> Plan:
        """The plan for this step; a given one is checked against the graph."""
        session = self.session
        if session.plan is None:
            return plan_from_constraints(
                captured.graph, session.mesh, session.constraints, part=self._part
            )
        session.plan.check(captured.graph, session.mesh, part=self._part)
        return session.plan

    def _report_fallbacks(self, prepared: PreparedGraph) -> None:
        fallbacks = prepared.all_fallbacks()
        types = sorted({op.type for op in fallbacks} - self._reported)
        if not types:
            return
        self._reported.update(types)
        for known in (False, True):
            told = [t for t in types if has_rule(t) == known]
            if not told:
                continue
            first = next(op.name for op in fallbacks if op.type in told)
            if self.session.options.strict:
                raise TfparError(
                    f"{_NO_RULE[known].format(', '.join(told))} (first: {first!r}), and "
                    f"strict=True. Register a rule with tap.register_rule, or drop strict to run "
                    f"them replicated."
                )
            logger.warning(
                "%s; they run replicated (inputs gathered, every rank computes); first: %s. "
                "tap.coverage(model) lists them.",
                _NO_RULE[known].format(", ".join(told)), first,
            )  # fmt: skip

    def _report_held(self, partitioned: PartitionedGraph) -> None:
        held = [(op, axis) for op, axis in partitioned.held if op.name not in self._reported]
        if not held:
            return
        op, axis = held[0]
        logger.warning(
            "Loops, branches and calls whose bodies would need collectives run whole (inputs "
            "gathered, every rank computes): %s along mesh axis %r%s.",
            op.name, partitioned.mesh.axis_names[axis],
            f", and {len(held) - 1} more" if len(held) > 1 else "",
        )  # fmt: skip
        self._reported.update(op.name for op, _ in held)


def create_variable(next_creator, **kwargs):
    """Variable creator of the scope: only a shape and an initializer, no value yet."""
    initial = kwargs.get("initial_value")
    dtype = kwargs.get("dtype")
    if initial is None:
        return next_creator(**kwargs)
    if callable(initial):
        shape, inferred = _shape_of(initial)
    else:
        tensor = _outside(initial, dtype)
        shape, inferred = tensor.shape, tensor.dtype
        initial = functools.partial(tf.identity, tensor)
    dtype = tf.as_dtype(dtype) if dtype is not None else inferred
    numeric = dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool
    if shape.rank is None or not shape.is_fully_defined() or not numeric:
        return next_creator(**kwargs)
    trainable = kwargs.get("trainable")
    return ParallelVariable(
        shape=shape, dtype=dtype, initial_value=initial, name=kwargs.get("name"),
        trainable=True if trainable is None else trainable,
    )  # fmt: skip


def _shape_of(initial: Callable[[], Any]) -> tuple[tf.TensorShape, tf.DType]:
    """Shape and dtype of what `initial` makes, if need be by tracing it in a scratch graph."""
    known = initial_shape(initial)
    if known is not None:
        return known
    with FuncGraph("shape").as_default():  # which, unlike a plain Graph, takes eager tensors
        tensor = tf.convert_to_tensor(initial())
        return tensor.shape, tensor.dtype.base_dtype


def _outside(initial: Any, dtype: Any) -> tf.Tensor:
    """The value that an initial value has outside of the step that is being traced."""
    with tf.init_scope():
        if not tf.is_symbolic_tensor(initial):
            return tf.convert_to_tensor(initial, dtype=dtype)

        def compute():
            graph = tf.compat.v1.get_default_graph()
            return lift_to_graph.lift_to_graph([initial], graph)[initial]

        return tf.cast(tf.function(compute, autograph=False)(), dtype or initial.dtype)


_SPECS = (tf.TensorSpec, tf.SparseTensorSpec)


def batch_size_of(arguments: Any) -> int | None:
    """The leading dim of the first argument that has one."""
    for leaf in tf.nest.flatten(arguments):
        if isinstance(leaf, _SPECS) and leaf.shape.rank:
            return leaf.shape[0]
    return None


def _hashable(specs: Any) -> Any:
    flat = tf.nest.flatten(specs)
    structure = str(tf.nest.map_structure(lambda _: 0, specs))
    return structure, tuple(
        (type(s), tuple(s.shape.as_list()), s.dtype) if isinstance(s, _SPECS) else s for s in flat
    )
