"""A session: one mesh, one set of constraints, and the steps compiled for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras.src.utils.io_utils import print_msg
from tensorflow.python.eager import lift_to_graph
from tensorflow.python.framework.func_graph import FuncGraph

from tfpar.capture.step import CapturedStep, argument_specs, capture_step
from tfpar.cluster.description import Cluster
from tfpar.constraints import Constraint, batch_axes, laid_by_layers
from tfpar.distributed.seeds import share_seeds
from tfpar.distributed.world import this_world
from tfpar.ir.graph import Op
from tfpar.ir.names import VariableName
from tfpar.keras.initial_shapes import initial_shape
from tfpar.options import Options
from tfpar.planning import (
    Interrupted,
    Request,
    batched_inputs,
    cost_on_one_device,
    search_plan,
)
from tfpar.plans import Plan, plan_from_constraints
from tfpar.propagation.engine import PartitionedGraph
from tfpar.propagation.prepared import PreparedGraph, prepare
from tfpar.report.announcement import Search, announcement
from tfpar.rewrite.chunk_writer import CannotChunk
from tfpar.rules import has_rule
from tfpar.runtime.detect import detect_cluster, every_rank, machines_for
from tfpar.runtime.executable import Executable, compile_step, simplify_step
from tfpar.runtime.ranks import Ranks
from tfpar.runtime.variables import ParallelVariable
from tfpar.scopes import active
from tfpar.search.problem import Problem, input_spec
from tfpar.search.recompute import Blocks, recomputed
from tfpar.spec import Mesh, OtherModelError, PlanError, Spec, TfparError, TimeLimitError

logger = logging.getLogger("tfpar")

_NO_RULE = {
    False: "No op rule for {}",
    True: "No op rule for these uses (sizes that are not static, or rare attributes) of {}",
}

VariableNames = Callable[[tf.Variable], VariableName]


@dataclasses.dataclass(eq=False)
class Session:
    """What `auto_parallel` sets up.

    Attributes:
        mesh: the ranks; what axes are laid over them is the planner's choice where there is one.
        options: what the user asked for.
        cluster: what plans are made for; the machine as detected if None.
        interrupted: searches that Ctrl-C ended: what they had found is used if a plan for the same
            problem is asked for again.
        first: the first plan found for a training step: models of one session that share
            variables share its mesh.
        entered: the scope that `auto_parallel` has entered; it ends when it is let go of.
    """

    mesh: Mesh
    options: Options = dataclasses.field(default_factory=functools.partial(Options, planner=None))
    cluster: Cluster | None = None
    interrupted: Interrupted = dataclasses.field(default_factory=dict)
    first: Plan | None = None
    entered: contextlib.AbstractContextManager[Session] | None = None
    _warned: bool = False
    _unreached: bool = False

    @classmethod
    def of(cls, options: Options) -> Session:
        """The session that `options` ask for, on the ranks that there are.

        Raises:
            TfparError: a mesh, plan, cluster or constraint that does not fit the others, or fewer
                devices than ranks.
        """
        plan, mesh = options.plan, options.mesh
        if mesh is None:
            mesh = every_rank() if plan is None else plan.mesh
        batch_axes(options.constraints, mesh)  # refuses unknown axes before anything is built
        cluster = None
        if options.cluster is not None:
            cluster = machines_for(mesh, options.cluster)
        if plan is not None:
            plan.check_ranks(mesh, cluster)
        session = cls(mesh, options, cluster)
        world = session.ranks.world  # devices can only be configured before TensorFlow has started
        if world is not None:
            share_seeds(world)
        return session

    @functools.cached_property
    def ranks(self) -> Ranks:
        """Where the ranks live; starts TensorFlow's runtime."""
        return Ranks.of(self.mesh.size, this_world())

    def tell(self, text: str) -> None:
        """Show a line: in the log where that shows such lines, else as Keras shows its own."""
        world = self.ranks.world
        if not self.options.verbose or (world is not None and world.rank):
            return
        if logger.isEnabledFor(logging.INFO):
            logger.info(text)
        else:
            print_msg(f"tfpar: {text}")

    def warn_outside(self, reader: str, weight: str) -> None:
        """Say, once, that weights are read by what does not run on the mesh."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s reads %r, a weight of a model on the mesh %s: it computes with whole weights, "
                "on one device. Decorate the step with tap.function inside of the auto_parallel "
                "block, or train with fit.",
                reader, weight, self.mesh,
            )  # fmt: skip

    def warn_unreached(self, model: str) -> None:
        """Say, once, that a model is compiled where no block reaches it."""
        if not self._unreached:
            self._unreached = True
            logger.warning(
                "Model %r is compiled in thread %r, which the open auto_parallel block does not "
                "reach, as it was started before: it runs on one device. Open a block in that "
                "thread, or give the model to tap.parallelize.",
                model, threading.current_thread().name,
            )  # fmt: skip

    def create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """As the creator scope of a block does: see the function of this name."""
        variable = create_variable(next_creator, **kwargs)
        if isinstance(variable, ParallelVariable):
            variable.on_outside_read = self.warn_outside
        return variable

    @contextlib.contextmanager
    def scope(self) -> Iterator[Session]:
        """Variables made inside are not materialised; models made inside are parallel."""
        token = active.set((*active.get(), self))
        try:
            with tf.variable_creator_scope(self.create_variable):
                yield self
        finally:
            active.reset(token)


@dataclasses.dataclass(eq=False)
class Program:
    """The steps of one model (or one function) and the plan that they share.

    Attributes:
        plan: found for its training step; None before that, or where none is searched.
        version: is another one once `plan` is.
        told: whether the user has been told of the plan in force.
    """

    session: Session
    plan: Plan | None = None
    version: int = 0
    told: bool = False

    def use(self, plan: Plan | None) -> None:
        """Take another plan, or none."""
        self.plan, self.told = plan, False
        self.version += 1


class CompiledFunction:
    """A step compiled anew for each set of argument shapes; one plan for all.

    Args:
        program: the session, and the plan shared with other steps.
        function: the step; called with the arguments while tracing.
        names: of each captured variable.
        part: the step is part of the planned one (an evaluation or a prediction).
        trains: the step may run in chunks; by default if it is not part of another.
        several: the program has steps of other ops too (other traces, other fetches): the plan of
            one serves all that have its weights.
        build, matters: see `capture_step`.
    """

    def __init__(
        self, program: Program, function: Callable[..., Any], *,
        names: VariableNames | None = None,
        on_plan: Callable[[Plan, Executable], None] | None = None,
        build: Callable[[], None] | None = None,
        matters: Callable[[tf.Variable], bool] | None = None,
        part: bool = False, name: str = "step", trains: bool | None = None, several: bool = False,
    ) -> None:  # fmt: skip
        self.program = program
        self._inherited = None if several else program.plan
        self._found: Plan | None = None
        self._search_done: Search | None = None
        self._build = build
        self._matters = matters
        self._part = part
        self._trains = not part if trains is None else trains
        self._reported: set[str] = set()
        self.function = function
        self.executables: dict[Any, Executable] = {}
        self._names = names
        self._on_plan = on_plan
        self._name = name

    @property
    def session(self) -> Session:
        return self.program.session

    def __call__(self, *arguments: Any) -> Any:
        return self.executable(arguments)(arguments)

    def executable(self, arguments: Sequence[Any], parts: int = 1) -> Executable:
        """The step compiled for arguments of these shapes.

        Args:
            parts: of how many parts of a global batch each rank gets one.
        """
        specs = argument_specs(arguments)
        known = self.executables.get(self._key(specs, parts))
        if known is None:
            whole = specs if parts == 1 else _of_the_whole(specs, parts)
            known = self.compile(whole, parts)
            self.executables[self._key(specs, parts)] = known  # a plan may have been found
        return known

    def _key(self, specs: Sequence[Any], parts: int) -> tuple:
        return _hashable(specs), parts, self.program.version

    def capture(self, specs: Sequence[Any]) -> CapturedStep:
        """Trace the step for `specs` (structures of TensorSpecs)."""
        with self.session.scope():
            return capture_step(
                self.function, specs, self._names, self._name, self._build, self._matters
            )

    def compile(self, specs: Sequence[Any], parts: int = 1) -> Executable:
        """Capture, plan and link the step for `specs`, of which ranks may be given parts."""
        session = self.session
        ranks = session.ranks
        captured = self.capture(specs)
        captured.variables = [ParallelVariable.adopt(v) for v in captured.variables]
        simplify_step(captured)
        batch_size = batch_size_of(specs)
        plan = self._plan(captured, batch_size)
        if plan.recompute and not self._part:
            captured.rewrite(lambda g: recomputed(g, plan.recompute, captured.gradients))
        prepared = prepare(captured.graph)
        self._report_fallbacks(prepared)
        mesh, batched = plan.mesh, batched_inputs(captured, batch_size)
        axes = [mesh.axis(n) for n in plan.batch_axes]
        anchors = plan.anchors()
        anchors = dataclasses.replace(
            anchors,
            variables={**self._laid(captured, mesh), **anchors.variables},
            inputs=[input_spec(t in batched, mesh, axes) for t in captured.graph.inputs],
        )
        bucket_bytes = session.options.bucket_bytes
        if bucket_bytes is None and plan.cost is not None:
            bucket_bytes = plan.cost.bucket_bytes
        link = functools.partial(
            compile_step, captured, anchors, mesh, ranks, bucket_bytes, prepared,
            self._name.replace("_", " "), parts, session.options.compression, batched=batched,
            early_collectives=session.options.early_collectives,
        )  # fmt: skip
        plan = dataclasses.replace(plan, chunks=self._chunks(plan))
        try:
            executable = link(chunks=plan.chunks)
        except CannotChunk as error:
            self._report_unchunked(error.op, plan.chunks)
            plan = dataclasses.replace(plan, chunks=1)
            executable = link()
        self._report_fallbacks(prepared)  # bodies are known now
        self._report_held(executable.partitioned)
        if not self.program.told:
            self.program.told = True
            self.session.tell(announcement(plan, executable.partitioned, self._search_done))
        if self._on_plan is not None:
            self._on_plan(plan.with_partitioned(executable.partitioned), executable)
        return executable

    def find_plan(self, specs: Sequence[Any]) -> Plan:
        """The plan for this step at `specs`; nothing is compiled."""
        captured = self.capture(specs)
        captured.variables = [ParallelVariable.adopt(v) for v in captured.variables]
        simplify_step(captured)
        return self._plan(captured, batch_size_of(specs))

    def _chunks(self, plan: Plan) -> int:
        """How many chunks of the batch the step computes one behind the other."""
        if not self._trains or plan.mesh.size == 1:
            return 1
        return self.session.options.chunks or plan.chunks

    def _report_unchunked(self, op: Op, chunks: int) -> None:
        what = f"{op.type} {op.name!r} has an effect, which {chunks} chunks would each have"
        if self.session.options.strict:
            raise TfparError(f"{what}, and strict=True. Leave out chunks=, or drop strict.")
        if op.name not in self._reported:
            logger.warning("%s; the batch is computed in one.", what)
        self._reported.add(op.name)

    def _laid(self, captured: CapturedStep, mesh: Mesh) -> dict[str, Spec]:
        """The variables that lie on `mesh` already, by name."""
        return {
            v.name: variable.layout[1]
            for v, variable in zip(captured.graph.variables, captured.variables, strict=True)
            if variable.layout is not None and variable.layout[0] == mesh
        }

    def _plan(self, captured: CapturedStep, batch_size: int | None) -> Plan:
        """The plan for this step: given, found for the program, or found now."""
        session, program = self.session, self.program
        given = session.options.plan
        if given is not None:
            return given.fitted(captured.graph, gradients=captured.gradients, part=self._part)
        if session.options.planner is None:
            plan = plan_from_constraints(
                captured.graph, session.mesh, constraints_on(captured, session),
                gradients=captured.gradients, part=self._part,
            )  # fmt: skip
            return dataclasses.replace(plan, recompute=self._recomputed(captured))
        found = self._known(captured)
        if found is not None:
            return found
        plan = self._search(captured, batch_size)
        self._found = plan
        if self._part:
            program.told = False
        else:
            program.use(plan)
            session.first = session.first or plan
        return plan

    def _known(self, captured: CapturedStep) -> Plan | None:
        """The plan found before, for another batch or for training; None if it does not fit.

        It serves what was compiled before: the model may have other weights by now, or if it was
        compiled again, other ops.
        """
        program = self.program
        found = program.plan or self._found
        if found is None:
            return None
        part = self._part or found is not self._inherited
        try:
            return found.fitted(captured.graph, gradients=captured.gradients, part=part)
        except OtherModelError as error:
            self.session.tell(
                f"the model has changed since it was planned ({error.difference}), and is planned "
                f"anew; what is split stays so where it can"
            )
        self._found = None
        program.use(None)
        return None

    def _recomputed(self, captured: CapturedStep) -> tuple[str, ...]:
        """What the user asks to compute again in the backward pass."""
        asked = self.session.options.recompute
        if not asked or self._part:
            return ()
        return Blocks.of(captured.graph, captured.gradients).chosen(asked)

    def _search(self, captured: CapturedStep, batch_size: int | None) -> Plan:
        """The planner's plan; of several processes the first one's."""
        world = self.session.ranks.world
        if world is None:
            return self._solve(captured, batch_size)
        text = world.first(
            f"planning {self._name}", lambda: self._solve(captured, batch_size).to_json()
        )
        return Plan.from_json(text)

    def _solve(self, captured: CapturedStep, batch_size: int | None) -> Plan:
        session, options, planner = self.session, self.session.options, self.session.options.planner
        assert planner is not None
        laid = {}
        if session.first is not None:
            laid = self._laid(captured, session.first.mesh)
        cluster = session.cluster or detect_cluster(session.mesh)
        cluster = cluster.with_memory(options.memory_limit)
        request = Request(
            session.mesh, cluster, constraints_on(captured, session), session.first,
            options.compression, options.recompute,
        )  # fmt: skip

        def search(request: Request, laid: dict[str, Spec]) -> tuple[Plan, Problem]:
            return search_plan(
                captured,
                request,
                batch_size,
                planner,
                options.plan_cache,
                laid,
                part=self._part,
                interrupted=session.interrupted,
            )

        started = time.monotonic()
        try:
            plan, problem = search(request, laid)
        except PlanError as error:
            if request.base is None or isinstance(error, TimeLimitError):
                raise  # what lies already stays where it can
            plan, problem = search(dataclasses.replace(request, base=None), {})
        if options.verbose:
            taken = time.monotonic() - started
            device = session.cluster or detect_cluster(Mesh.of([1]))
            self._search_done = Search(taken, cost_on_one_device(problem, device))
        return plan

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


def constraints_on(captured: CapturedStep, session: Session) -> tuple[Constraint, ...]:
    """The session's constraints, and what layers say of their own weights."""
    names = (v.name for v in captured.graph.variables)
    pairs = zip(names, captured.variables, strict=True)
    return (*session.options.constraints, *laid_by_layers(pairs, session.mesh))


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
    with FuncGraph(
        "scratch_graph_of_shape"
    ).as_default():  # which, unlike a plain Graph, takes eager tensors
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


def _of_the_whole(specs: Any, parts: int) -> Any:
    """Specs of a global batch, from those of one of its parts."""
    size = batch_size_of(specs)

    def whole(spec: Any) -> Any:
        batched = isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] == size
        if not batched or size is None:
            return spec
        return tf.TensorSpec([size * parts, *spec.shape[1:]], spec.dtype)

    return tf.nest.map_structure(whole, specs)


def _hashable(specs: Any) -> Any:
    flat = tf.nest.flatten(specs)
    structure = str(tf.nest.map_structure(lambda _: 0, specs))
    return structure, tuple(
        (type(s), tuple(s.shape.as_list()), s.dtype) if isinstance(s, _SPECS) else s for s in flat
    )
