"""Lowering of a simplified step, under a plan, to the program of every rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tfpar.compile.effect_order import check_marks, check_programs, races
from tfpar.compile.local.arrivals import find_sliced_arrivals
from tfpar.compile.local.chunks import build_chunked_program, split_batch
from tfpar.compile.local.early_collectives import start_collectives_early
from tfpar.compile.local.local_graph import LocalProgram, build_local_program
from tfpar.compile.local.microbatches import build_microbatched_program
from tfpar.compile.local.packing import DEFAULT_BUCKET_BYTES, pack_collectives
from tfpar.compile.local.programs import ProgramSet
from tfpar.compile.local.rank_dependence import find_rank_dependent_axes
from tfpar.compile.local.stage_split import (
    PipelineLowering,
    WrittenStep,
    find_torn_arrivals,
    send_in_slices,
    split_stages,
    write_in_stages,
)
from tfpar.compile.local.uneven_program import build_uneven_program
from tfpar.compile.local.xla_regions import Compiles, compile_regions
from tfpar.compile.passes import Observer, Pass, ignore_pass
from tfpar.compile.simplify import prepare_step
from tfpar.ir.graph import Tensor
from tfpar.ir.roles import Roles, find_widened_tensors
from tfpar.ir.step import StepGraph
from tfpar.pipeline.statistics import BatchStatisticsOf
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import Anchors, OpPlan, PartitionedGraph
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.spec import Mesh, Placement, UnevenMesh, replicated_spec


@dataclasses.dataclass(frozen=True)
class ActorLayout:
    """Layout of the stages of an actor.

    Attributes:
        mesh: of its ranks.
        anchors: the specs that are fixed.
        shares: `mesh` with those that ranks have of the batch, where they are unequal: the first
            is taken in which the step splits.
    """

    mesh: Mesh
    anchors: Anchors
    shares: Sequence[UnevenMesh] = ()


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """Options of the compiler, set by a plan and a user.

    Attributes:
        mesh: the logical one; of one actor, where the step is in stages.
        anchors: the specs that are fixed; the step's outputs come whole, whatever this says of
            them.
        batched: the inputs of which chunks get a part.
        chunks: how many pieces a rank computes its part of a training batch in, one behind the
            other (ATP §4.1).
        microbatches: how many pieces it computes that part in whose activations are not kept at
            the same time; their gradients are added up.
        statistics: where normalisations take those of a batch in microbatches; see
            `pipeline.Pipeline`.
        stages: how the step runs in stages, if there are several.
        others: the layouts of actors beside `mesh`, `anchors` and `shares`, which are the first;
            `stages` says which each actor has.
        compression: the dtype in which gradients travel; None: their own.
        early_collectives: what could run before a collective that is waited for runs behind it
            (ATP §4.2).
        bucket_bytes: upper bound on packed collectives, in bytes.
        shares: as of an `ActorLayout`.
        xla: which ops XLA compiles, if it is to compile the ops between collectives.
        one_memory: all ranks compute in one memory, on one device.
    """

    mesh: Mesh
    anchors: Anchors
    batched: Collection[Tensor] = ()
    chunks: int = 1
    microbatches: int = 1
    statistics: BatchStatisticsOf = "exact"
    stages: PipelineLowering | None = None
    others: Sequence[ActorLayout] = ()
    compression: str | None = None
    early_collectives: bool = True
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    shares: Sequence[UnevenMesh] = ()
    xla: Compiles | None = None
    one_memory: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledStep:
    """Result of compiling a step.

    Attributes:
        partitioned: specs and reshards; of a rank's batch as a whole, where it runs in chunks, and
            in the first of several layouts.
        local: the program of every rank; of a step in stages all of it, in the first layout.
        programs: the program of each actor.
        others: what `partitioned` is, in each of the other layouts.
    """

    partitioned: PartitionedGraph
    local: LocalProgram
    programs: ProgramSet
    others: tuple[PartitionedGraph, ...] = ()


def compile_step(
    step: StepGraph,
    options: CompileOptions,
    prepared: PreparedGraph | None = None,
    observe: Observer = ignore_pass,
) -> CompiledStep:
    """Propagate the anchors and write the program.

    Args:
        step: simplified, if it comes with what was prepared of it.
        prepared: of the step's graph; by default the step is simplified and prepared first.

    Raises:
        NotRepeatableError: an op that must not run once for each chunk or microbatch.
        UnevenSplitError: ranks cannot have unequal shares of the batch.
        CompilerError: the order of two effects was lost.
    """
    prepared = prepared if prepared is not None else prepare_step(step)
    first_layout = ActorLayout(options.mesh, options.anchors, options.shares)
    layouts = [first_layout, *options.others]
    first, *others = _written_in_layouts(step, options, layouts, prepared, observe)
    partitioned, local = first.partitioned, first.step.program
    allowed = races(partitioned.graph)
    programs = ProgramSet.of(local)
    if options.stages is not None:
        written = [first.step, *(other.step for other in others)]
        numbers = options.stages.layouts or [0] * options.stages.schedule.num_actors
        of_actors = [written[number] for number in numbers]
        programs = split_stages(of_actors, options.stages.schedule, options.stages.ranks)
        observe("split stages", lambda: str(programs))
    check_programs("Writing the programs of ranks", programs, allowed)
    check_marks(programs, partitioned.graph, allowed)
    if options.xla is not None:
        for program in programs.programs.values():
            differing = find_rank_dependent_axes(program) if options.one_memory else {}
            for graph in program.graphs():
                compile_regions(graph, options.xla, program.shapes, differing)
        observe("XLA's regions", lambda: str(programs))
        check_programs("Cutting regions for XLA", programs, allowed)
    return CompiledStep(partitioned, local, programs, tuple(o.partitioned for o in others))


class _Written(NamedTuple):
    """A step that is written in one layout."""

    partitioned: PartitionedGraph
    step: WrittenStep


def _written_in_layouts(
    step: StepGraph,
    options: CompileOptions,
    layouts: Sequence[ActorLayout],
    prepared: PreparedGraph,
    observe: Observer,
) -> list[_Written]:
    """The program of every rank in each layout.

    Where one layout cuts a tensor in other microbatches than another, so that what one stage makes
    in a microbatch is not what another reads in it, all ranks get all of the tensor.
    """
    pinned: dict[str, Placement] = {}
    while True:
        written = []
        for number, layout in enumerate(layouts):
            fixed = {name: _whole(layout.mesh, along) for name, along in pinned.items()}
            laid_out = dataclasses.replace(
                options, mesh=layout.mesh, anchors=layout.anchors, shares=layout.shares
            )
            own = _with_ops(laid_out, fixed)
            written.append(_written_in_layout(step, own, number, prepared, observe))
        torn = find_torn_arrivals([each.step for each in written], options.stages)
        if torn.keys() <= pinned.keys():
            return written
        pinned.update(torn)


def _whole(mesh: Mesh, along: Placement) -> OpPlan:
    """The plan of an op that has all of its tensor on all ranks, in microbatches `along` a dim."""
    spec = (*replicated_spec(mesh.num_axes), along)
    return OpPlan((spec,), (spec,), (spec,))


def _with_ops(options: CompileOptions, ops: Mapping[str, OpPlan]) -> CompileOptions:
    """The same options, with what they fix of some ops, by name."""
    anchors = options.anchors
    anchors = dataclasses.replace(anchors, ops={**anchors.ops, **ops})
    return dataclasses.replace(options, anchors=anchors)


def _written_in_layout(
    step: StepGraph,
    options: CompileOptions,
    number: int,
    prepared: PreparedGraph,
    observe: Observer,
) -> _Written:
    """The program of every rank in the layout of the options, and all passes over it."""
    partitioned = _partitioned(step, options, prepared)
    laid = _in_parts(partitioned, options)
    sliced = _sliced_arrivals(laid, options, number)
    if sliced:
        options = _with_ops(options, sliced)
        partitioned = _partitioned(step, options, prepared)
        laid = _in_parts(partitioned, options)
    observe("propagate", lambda: str(partitioned))
    write = functools.partial(_written, step, options)
    meshes = [mesh.within(laid.mesh) for mesh in options.shares]
    local = build_uneven_program(laid, meshes, write) if meshes else write(laid)
    observe("rewrite", lambda: str(local))
    for each in _local_passes(options, local):
        for graph in local.graphs():
            each.run(graph)
        observe(each.name, lambda: str(local))
    return _Written(partitioned, WrittenStep(local, laid))


def _sliced_arrivals(
    laid: PartitionedGraph, options: CompileOptions, number: int
) -> dict[str, OpPlan]:
    """Find what arrives in slices at stages of the layout `number`; see `find_sliced_arrivals`."""
    stages = options.stages
    if stages is None or stages.slicing is None or stages.has_one_layout:
        return {}
    return find_sliced_arrivals(
        laid,
        options.mesh.num_axes,
        {op: place.stage for op, place in stages.places.items()},
        stages.schedule.actors,
        [actor for actor, layout in enumerate(stages.layouts) if layout == number],
        stages.slicing,
    )


def _in_parts(partitioned: PartitionedGraph, options: CompileOptions) -> PartitionedGraph:
    """The step with the axis of the pieces that a rank computes its batch in, if there are any."""
    parts = options.microbatches if options.microbatches > 1 else options.chunks
    if parts == 1 or (options.microbatches == 1 and options.mesh.size == 1):
        return partitioned
    return split_batch(partitioned, options.anchors, options.batched, parts)


def _written(step: StepGraph, options: CompileOptions, laid: PartitionedGraph) -> LocalProgram:
    """The program of every rank, its batch in one piece or in several."""
    stages, in_parts = options.stages, laid.mesh.num_axes > options.mesh.num_axes
    if in_parts and options.microbatches > 1:
        own = options.statistics == "microbatch"
        roles = Roles.of(laid.graph, step.gradient_tensors) if own else None
        return build_microbatched_program(laid, stages, roles)
    if in_parts:
        return build_chunked_program(laid)
    if stages is None:
        return build_local_program(laid)
    program = write_in_stages(laid, stages)
    send_in_slices(program, stages)
    return program


def _partitioned(
    step: StepGraph, options: CompileOptions, prepared: PreparedGraph
) -> PartitionedGraph:
    """Every tensor's spec, and the dtype in which it travels."""
    whole = replicated_spec(options.mesh.num_axes)
    anchors = dataclasses.replace(options.anchors, outputs=[whole] * len(step.graph.outputs))
    partitioned = propagate(prepared, options.mesh, anchors)
    partitioned.jit_compile = options.xla is not None
    if options.compression is None:
        partitioned.wire_dtypes = find_widened_tensors(step.graph)
    else:
        roles = Roles.of(step.graph, step.gradient_tensors, compression=options.compression)
        partitioned.wire_dtypes = roles.wire_dtypes
    return partitioned


def _local_passes(options: CompileOptions, local: LocalProgram) -> list[Pass]:
    """Return the passes over the program of every rank, which run in place and in this order."""
    passes = (
        [Pass("early collectives", start_collectives_early)] if options.early_collectives else []
    )
    pack = functools.partial(
        pack_collectives,
        bucket_bytes=options.bucket_bytes,
        places=local.places,
        shapes=local.shapes,
    )
    return [*passes, Pass("pack collectives", pack)]
