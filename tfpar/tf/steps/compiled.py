"""A step that is compiled for each set of argument shapes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tfpar.cluster.description import Cluster
from tfpar.compile import (
    ActorLayout,
    CompileOptions,
    compile_step,
    fuse_attention_step,
    gather_step,
    offload_step,
    recompute_step,
    simplify_step,
)
from tfpar.compile.local.arrivals import mark_arrivals
from tfpar.compile.local.local_graph import StagePass
from tfpar.compile.local.microbatch_order import cut_by_microbatch
from tfpar.compile.local.packing import DEFAULT_BUCKET_BYTES
from tfpar.compile.local.rank_local_axis import NotRepeatableError
from tfpar.compile.local.scatter_gather import Slicing
from tfpar.compile.local.stage_split import PipelineLowering
from tfpar.compile.local.xla_regions import find_uncompiled_ops
from tfpar.compile.passes import Observer, dump_of, ignore_pass
from tfpar.cost.stage_transfers import ScatterGatherCost
from tfpar.ir.gathered_weights import gathered_tensors
from tfpar.ir.graph import Graph, Op, Tensor, Variable
from tfpar.ir.names import VariableName
from tfpar.ir.roles import BACKWARD, Roles
from tfpar.ir.step import ModelLayer, StepGraph
from tfpar.observability.report.announcement import announcement
from tfpar.observability.report.warnings import Warnings
from tfpar.observability.timeline.recorder import Recordable
from tfpar.pipeline.stage_partition import sent_whole
from tfpar.pipeline.statistics import BatchStatisticsOf
from tfpar.planning.meshes import input_spec
from tfpar.planning.problems import batched_inputs
from tfpar.plans import Plan
from tfpar.plans.shares import uneven_meshes, with_equal_shares
from tfpar.plans.stages import PipelinePlan
from tfpar.progress import Reporter, reporting
from tfpar.propagation.prepared_graph import PreparedGraph, prepare
from tfpar.propagation.uneven_batch import UnevenSplitError
from tfpar.spec import TfparError
from tfpar.tf.capture.step import (
    CapturedStep,
    argument_specs,
    batch_size_of,
    capture_step,
    global_specs,
    hashable,
)
from tfpar.tf.distributed.consistency import agree_on_model
from tfpar.tf.interop.xla import XlaKernels
from tfpar.tf.runtime.executable import Executable
from tfpar.tf.session import Session
from tfpar.tf.steps.shared_plan import SharedPlan
from tfpar.tf.steps.step_planner import StepPlanner, find_placed_variables
from tfpar.tf.variables.parallel_variable import ParallelVariable

VariableNames = Callable[[tf.Variable], VariableName]


class CompiledFunction:
    """A step that is compiled for each set of argument shapes, by one plan.

    Args:
        program: the session, and the plan shared with other steps.
        function: the step; called with the arguments while tracing.
        names: of each captured variable.
        part: the step is part of the planned one (an evaluation or a prediction).
        jit_compile: XLA compiles what is between collectives.
        trains: the step may run in chunks; by default if it is not part of another.
        several: the program has steps of other ops too (other traces, other fetches): the plan of
            one serves all that have its weights.
        build, matters: see `capture_step`.
        layers: those of the model, for messages.
    """

    def __init__(
        self,
        program: SharedPlan,
        function: Callable[..., Any],
        *,
        names: VariableNames | None = None,
        on_plan: Callable[[Plan, Executable], None] | None = None,
        build: Callable[[], None] | None = None,
        matters: Callable[[tf.Variable], bool] | None = None,
        part: bool = False,
        name: str = "step",
        trains: bool | None = None,
        jit_compile: bool = False,
        several: bool = False,
        layers: Callable[[], Sequence[ModelLayer]] = tuple,
    ) -> None:
        self.program = program
        self.planner = StepPlanner(program, name, several, jit_compile)
        self.warnings = Warnings(program.session.options.strict)
        self._build = build
        self._matters = matters
        self._layers = layers
        self._part = part
        self._trains = not part if trains is None else trains
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

        Raises:
            TfparError: this process does something for the other ranks, who take no step meanwhile.
        """
        world = self.session.ranks.world
        if world is not None:
            world.lead.check_together(self._name.replace("_", " "))
        specs = argument_specs(arguments)
        known = self.executables.get(self._key(specs, parts))
        if known is None:
            whole = specs if parts == 1 else global_specs(specs, parts)
            known = self.compile(whole, parts)
            key = self._key(specs, parts)  # a plan may have been found
            _, _, version = key
            self.executables = {k: e for k, e in self.executables.items() if k[2] == version}
            self.executables[key] = known
        return known

    def _key(self, specs: Sequence[Any], parts: int) -> tuple[Any, int, int]:
        return hashable(specs), parts, self.program.version

    def capture(self, specs: Sequence[Any]) -> CapturedStep:
        """Trace the step for `specs` (structures of TensorSpecs)."""
        with self.session.scope():
            captured = capture_step(
                self.function, specs, self._names, self._name, self._build, self._matters
            )
        captured.layers = self._layers()
        return captured

    def compile(self, specs: Sequence[Any], parts: int = 1) -> Executable:
        """Capture, plan and link the step for `specs`, of which ranks may be given parts."""
        session = self.session
        world = session.ranks.world
        observe = dump_of(self._name, None if world is None else world.rank)
        captured = self.prepared(specs, observe)
        if world is not None:
            weights = {v.name: _form(v) for v in captured.graph.variables}
            batch = [_form(tensor) for tensor in captured.arguments]
            trained = [gradient.variable for gradient in captured.gradients]
            agree_on_model(world, self._name.replace("_", " "), weights, batch, trained)
        plan = self.planner.plan(captured, batch_size_of(specs), self._part)
        try:
            with self._reporting("compiling") as report:
                passed = functools.partial(_passed, report, observe)
                plan, executable = self.link(captured, plan, specs, parts, passed)
        except NotRepeatableError as error:
            if not session.found_pipeline:
                raise self._repeated(error.op, self._microbatches(plan)) from None
            self.warnings.unpiped(error.op)
            session.drop_pipeline()
            self.program.use(None)
            self.planner.forget()
            return self.compile(specs, parts)
        self.warnings.replicated_regions(executable.partitioned)
        if self._trains:
            recordable = Recordable(
                executable.compiled,
                captured.gradient_tensors,
                plan.cluster or session.cluster,
                plan.num_ranks,
                world,
            )
            executable.around = functools.partial(session.recorder.step, recordable)
        if not self._part:
            self.program.moves = False
        if not self.program.told:
            self.program.told = True
            session.tell(announcement(plan, executable.partitioned, self.planner.search))
        if self._on_plan is not None:
            compiled = executable.compiled
            known = plan.with_partitioned(compiled.partitioned, *compiled.others)
            self._on_plan(known, executable)
        return executable

    def link(
        self,
        captured: CapturedStep,
        plan: Plan,
        specs: Sequence[Any],
        parts: int,
        observe: Observer = ignore_pass,
    ) -> tuple[Plan, Executable]:
        """The plan as it runs, and a prepared step, which is changed, compiled by it.

        Raises:
            CannotRepeat: an op has an effect that each microbatch would have.
        """
        batch_size = batch_size_of(specs)
        fuse_attention_step(captured, plan.attention, observe)
        if not self._part:
            recompute_step(captured, plan.recompute, observe)
            offload_step(captured, plan.offloaded, observe)
        gather_step(captured, plan.variables, observe)
        stages = self._staged(captured, plan)
        prepared = prepare_staged(captured.graph, stages)
        self.warnings.fallbacks(prepared)
        microbatches = self._microbatches(plan)
        chunks = 1 if microbatches > 1 else self._chunks(plan)
        plan = dataclasses.replace(
            with_equal_shares(plan) if parts > 1 else plan,  # ranks read equal parts themselves
            chunks=chunks,
            microbatches=microbatches,
            batch_statistics=self._batch_statistics(plan),
        )
        batched = batched_inputs(captured, batch_size)
        asked = self._compile_options(captured, plan, stages, batched, batch_size)
        while True:
            try:
                compiled = compile_step(captured, asked, prepared, observe)
                break
            except UnevenSplitError as error:
                self.warnings.unshared(error.name)
                plan = with_equal_shares(plan)
                equal = [dataclasses.replace(other, shares=()) for other in asked.others]
                asked = dataclasses.replace(asked, shares=(), others=equal)
            except NotRepeatableError as error:
                if plan.microbatches > 1 or self.session.found_pipeline:
                    raise
                self.warnings.unchunked(error.op, plan.chunks)
                plan = dataclasses.replace(plan, chunks=1)
                asked = dataclasses.replace(asked, chunks=1)
        if asked.xla is not None:
            graphs = [g for p in compiled.programs.programs.values() for g in p.graphs()]
            self.warnings.uncompiled(op for g in graphs for op in find_uncompiled_ops(g, asked.xla))
        name = self._name.replace("_", " ")
        ranks = self.session.ranks
        if asked.xla is not None:
            ranks = ranks.by_memory
        executable = Executable(captured, compiled, ranks, name, parts, specs)
        self.warnings.fallbacks(prepared)  # bodies are known now
        return plan, executable

    def find_plan(self, specs: Sequence[Any]) -> Plan:
        """The plan for this step at `specs`; nothing is compiled."""
        captured = self.prepared(specs)
        return self.planner.plan(captured, batch_size_of(specs), self._part)

    def prepared(self, specs: Sequence[Any], observe: Observer = ignore_pass) -> CapturedStep:
        """The step captured and simplified, and its variables laid by tfpar from now on."""
        with self._reporting("tracing"):
            captured = self.capture(specs)
        captured.variables = [ParallelVariable.adopt(v) for v in captured.variables]
        simplify_step(captured, observe)
        return captured

    def _reporting(self, doing: str) -> contextlib.AbstractContextManager[Reporter]:
        """A reporter of what is done before the step first runs."""
        return reporting(f"{doing} the {self._name.replace('_', ' ')}", wanted=self.session.tells)

    def _staged(self, captured: CapturedStep, plan: Plan) -> PipelineLowering | None:
        """Lower a captured step, in place, to the stages of its plan; None if it has no stages."""
        if plan.stages is None:
            return None
        machines = self._machines(plan)
        slicing = (
            None
            if machines is None
            else ScatterGatherCost(plan.meshes, plan.stages.placed(machines))
        )
        return lower_to_stages(captured, plan.stages, self._part, slicing)

    def _machines(self, plan: Plan) -> Cluster | None:
        """Return the cluster that a plan's program is made for: the planner's, or the user's.

        A plan of constraints may have prices on machines that were only detected: they are shown,
        and change nothing of the program.
        """
        named = self.session.cluster
        return plan.cluster or named if plan.planner else named

    def _compile_options(
        self,
        captured: CapturedStep,
        plan: Plan,
        stages: PipelineLowering | None,
        batched: Collection[Tensor],
        batch_size: int | None,
    ) -> CompileOptions:
        """Combine the plan and the session's options into the options of the compilation."""
        options = self.session.options
        early = options.early_collectives
        first, *others = self._layouts(captured, plan, batched, batch_size)
        cost = None if self._machines(plan) is None else plan.cost
        found = None if cost is None else cost.bucket_bytes
        return CompileOptions(
            first.mesh,
            first.anchors,
            batched,
            chunks=plan.chunks,
            microbatches=plan.microbatches,
            statistics=plan.batch_statistics,
            stages=stages,
            others=others,
            compression=options.compression,
            early_collectives=not self.session.ranks.share_cores if early is None else early,
            bucket_bytes=options.bucket_bytes or found or DEFAULT_BUCKET_BYTES,
            shares=first.shares,
            xla=XlaKernels(self.session.ranks.devices[0]) if self.planner.jit_compile else None,
            one_memory=self.session.ranks.one_memory,
        )

    def _layouts(
        self,
        captured: CapturedStep,
        plan: Plan,
        batched: Collection[Tensor],
        batch_size: int | None,
    ) -> list[ActorLayout]:
        """The layout of a plan, and those that it has besides."""
        found = []
        for one in plan.by_layout:
            mesh, anchors = one.mesh, one.anchors()
            axes = [mesh.axis(n) for n in one.batch_axes]
            laid = {} if self.program.moves else find_placed_variables(captured, mesh)
            inputs = [input_spec(t in batched, mesh, axes) for t in captured.graph.inputs]
            whole = gathered_tensors(captured.graph, one.variables)
            anchors = dataclasses.replace(
                anchors,
                variables={**laid, **anchors.variables},
                tensors={**anchors.tensors, **whole},
                inputs=inputs,
            )
            if len(plan.by_layout) > 1 and plan.microbatches > 1:
                sizes = {t.shape[0] for t in batched if t.shape}
                anchors = cut_by_microbatch(
                    anchors, captured.graph, mesh, max(sizes, default=0), plan.microbatches
                )
            found.append(ActorLayout(mesh, anchors, uneven_meshes(one, batch_size)))
        return found

    def _repeated(self, op: Op, microbatches: int) -> TfparError:
        """The error that an op cannot run once for each microbatch."""
        return TfparError(
            f"{op.type} {op.name!r} of the {self._name.replace('_', ' ')} has an effect, which "
            f"each of {microbatches} microbatches would have. Take it out of what runs on the "
            f"batch, or leave out pipeline=."
        )

    def _microbatches(self, plan: Plan) -> int:
        """Return the number of microbatches of the batch, whose gradients are added up."""
        if self._trains:
            pipeline = self.session.pipeline
            return plan.microbatches if pipeline is None else pipeline.order.num_microbatches
        return 1 if plan.stages is None else plan.microbatches

    def _batch_statistics(self, plan: Plan) -> BatchStatisticsOf:
        """Return the batch statistics of normalisations: exact, or those of a microbatch."""
        pipeline = self.session.pipeline
        return plan.batch_statistics if pipeline is None else pipeline.batch_statistics

    def _chunks(self, plan: Plan) -> int:
        """Return the number of chunks of the batch that the step computes one after another."""
        if not self._trains or plan.mesh.size == 1:
            return 1
        return self.session.options.chunks or plan.chunks


def _passed(report: Reporter, observe: Observer, name: str, text: Callable[[], str]) -> None:
    """An observer of passes that also tells how far they are."""
    report.tell(f"past {name!r}")
    observe(name, text)


def _form(value: Variable | Tensor) -> str:
    """Dtype and shape."""
    return f"{value.dtype}{value.shape if value.shape is None else list(value.shape)}"


# --- Lowering of a captured step to the stages of its plan ---


def lower_to_stages(
    step: StepGraph, planned: PipelinePlan, part: bool = False, slicing: Slicing | None = None
) -> PipelineLowering:
    """Cut a simplified step into the stages of a plan, in place.

    Args:
        part: the step is part of the planned one, such as an evaluation.
        slicing: what is sent in slices; None: nothing.

    Raises:
        PlanError: the plan gives an op no stage, or a variable two.
    """
    stage = planned.cut(step, part)
    roles = Roles.of(step.graph, step.gradient_tensors)
    places = {op: StagePass(stage[op], roles.phase[op] == BACKWARD) for op in step.graph.ops}
    if planned.layouts:
        places = mark_arrivals(step.graph, places, planned.schedule.actors)
    return PipelineLowering(
        places, planned.schedule, planned.recompute, slicing, planned.ranks, planned.layout_of
    )


def prepare_staged(graph: Graph, staged: PipelineLowering | None) -> PreparedGraph:
    """Look up the rules of a step's ops; what is sent from stage to stage is reduced before."""
    if staged is None:
        return prepare(graph)
    stage = {op: place.stage for op, place in staged.places.items()}
    return prepare(graph, whole=sent_whole(graph, stage))
