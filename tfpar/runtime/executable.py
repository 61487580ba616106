"""From a captured step to something that runs: plan, propagate, rewrite, link."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tfpar.capture.step import CapturedStep, feeds
from tfpar.ir.constants import Constants
from tfpar.ir.graph import Graph, Tensor
from tfpar.ir.passes.block_sums import split_block_sums
from tfpar.ir.passes.fold_constants import fold_constants
from tfpar.ir.passes.inline_calls import inline_calls
from tfpar.ir.passes.predicate_branches import predicate_branches
from tfpar.ir.passes.split_bundles import split_bundles
from tfpar.ir.passes.trim import trim
from tfpar.ir.roles import Roles, widened
from tfpar.propagation.engine import Anchors, PartitionedGraph, propagate
from tfpar.propagation.prepared import prepare
from tfpar.rewrite.blocks import reduce_by_blocks
from tfpar.rewrite.chunks import build_chunked_program
from tfpar.rewrite.early_collectives import start_collectives_early
from tfpar.rewrite.local_graph import LocalProgram, build_local_program
from tfpar.rewrite.packing import DEFAULT_BUCKET_BYTES, pack_collectives
from tfpar.runtime.backends.in_process import InProcessProgram
from tfpar.runtime.backends.process import ProcessProgram
from tfpar.runtime.backends.wire import MOVED
from tfpar.runtime.checks import agree_on_program, check_placement
from tfpar.runtime.ranks import Ranks
from tfpar.spec import Mesh, Spec, replicated


class Executable:
    """One step, compiled for one set of argument shapes.

    Attributes:
        name: of the step, in messages.
        parts: of how many parts of a global batch this rank is given one; 1: it is given the whole.
        captured: the step as captured; its variables are all `ParallelVariable`s.
        partitioned: specs and reshards; of a rank's batch as a whole, where it runs in chunks.
        packed_bytes: payload of each all-reduce once they are packed, in program order.
    """

    def __init__(
        self, captured: CapturedStep, partitioned: PartitionedGraph, local: LocalProgram,
        ranks: Ranks, name: str = "step", parts: int = 1,
    ) -> None:  # fmt: skip
        self.parts = parts
        self.name = name
        self.captured = captured
        self.partitioned = partitioned
        self.ranks = ranks
        self.packed_bytes = [
            sum(t.num_bytes for t in op.inputs) for op in local.graph.ops if op.type == "AllReduce"
        ]
        self.program = link(local, ranks, parts > 1)
        self._place_variables()
        self._handles: list[dict[int, tf.Tensor]] = []
        self._stored: list[Any] = []
        self._checked = False

    @property
    def mesh(self) -> Mesh:
        return self.partitioned.mesh

    def __call__(self, arguments: Any) -> Any:
        """Run one step on (structured) arguments; gives the step's structured result."""
        world, fed = self.ranks.world, feeds(arguments)
        if world is None:
            return self._run(fed)
        alike = fed if self.parts == 1 else []
        with world.lockstep.step(self.name, alike, first=not self._checked):
            return self._run(fed)

    def _run(self, fed: Sequence[tf.Tensor]) -> Any:
        self._refresh_handles()
        flat = self.program([*fed, *self.captured.closure], self._handles)
        if not self._checked:
            self._checked = True
            check_placement(self.captured.variables, self._specs(), self.mesh, self.ranks)
        return self.captured.pack_outputs(flat)

    def _specs(self) -> list[Spec]:
        return [self.partitioned.variable_specs[v] for v in self.partitioned.graph.variables]

    def _place_variables(self) -> None:
        placed = zip(self.captured.variables, self._specs(), self.program.holders, strict=True)
        for variable, spec, holders in placed:
            variable.shard(self.mesh, spec, self.ranks, holders)

    def _refresh_handles(self) -> None:
        """Variables may have been gathered or laid otherwise since the last call."""
        current = [v._stored for v in self.captured.variables]
        if len(current) == len(self._stored) and all(
            a is b for a, b in zip(current, self._stored, strict=True)
        ):
            return
        self._place_variables()
        self._stored = [v._stored for v in self.captured.variables]
        self._handles = [
            {rank: shard.handle for rank, shard in v.shards.items()}
            for v in self.captured.variables
        ]


def link(
    program: LocalProgram, ranks: Ranks, fed_in_parts: bool
) -> InProcessProgram | ProcessProgram:
    """The program of this process's ranks.

    Raises:
        RuntimeMismatchError: another process has another program.
    """
    world = ranks.world
    if world is None:
        return InProcessProgram(program, ranks.devices)
    reduce_by_blocks(program.graph, program.mesh, MOVED)
    agree_on_program(world, program)
    return ProcessProgram(program, ranks.devices, world.transport, fed_in_parts)


def simplify_step(captured: CapturedStep) -> None:
    """Inline calls, trim, predicate branches, fold constants and split sums of a captured step.

    All in place, before the step is cut for planning: the cut shares its ops, and what `prepare`
    would put in the place of some in one of the two graphs would not be in the other.
    """

    def simplify(graph: Graph) -> Graph:
        graph = predicate_branches(trim(split_bundles(inline_calls(graph))).graph)
        constants = Constants(graph)
        fold_constants(graph, constants)
        split_block_sums(graph, constants)
        return graph

    captured.rewrite(simplify)


def prepare_step(captured: CapturedStep):
    """Simplify a captured step, and look up the rules of its ops."""
    simplify_step(captured)
    return prepare(captured.graph)


def compile_step(
    captured: CapturedStep, anchors: Anchors, mesh: Mesh, ranks: Ranks,
    bucket_bytes: int | None = None, prepared=None, name: str = "step",
    parts: int = 1, compression: str | None = None, chunks: int = 1,
    batched: Collection[Tensor] = (), early_collectives: bool = True,
) -> Executable:  # fmt: skip
    """Propagate the anchors and link the program.

    Args:
        compression: the dtype in which gradients travel; None: their own.
        chunks: how many pieces a rank computes its part of a training batch in, one behind the
            other (ATP §4.1).
        early_collectives: what could run before a collective that is waited for runs behind it
            (ATP §4.2).
        batched: the inputs of which chunks get a part.

    Raises:
        CannotChunk: an op that must not run once for each chunk.
    """
    prepared = prepared if prepared is not None else prepare_step(captured)
    whole = replicated(mesh.num_axes)
    anchors = dataclasses.replace(anchors, outputs=[whole] * len(captured.graph.outputs))
    partitioned = propagate(prepared, mesh, anchors)
    if compression is None:
        partitioned.carried = widened(captured.graph)
    else:
        gradients = [t for gradient in captured.gradients for t in gradient.tensors]
        roles = Roles.of(captured.graph, gradients, compression=compression)
        partitioned.carried = roles.carried
    if chunks > 1 and mesh.size > 1:
        local = build_chunked_program(partitioned, anchors, batched, chunks)
    else:
        local = build_local_program(partitioned)
    if early_collectives:
        start_collectives_early(local.graph)
    pack_collectives(local.graph, bucket_bytes or DEFAULT_BUCKET_BYTES)
    return Executable(captured, partitioned, local, ranks, name, parts)
