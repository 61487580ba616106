"""A compiled step, linked and run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfpar.compile import CompiledStep
from tfpar.rewrite.blocks import reduce_by_blocks
from tfpar.rewrite.programs import ProgramSet
from tfpar.runtime.agreement import agree_on_programs
from tfpar.runtime.backends.in_process import InProcessProgram
from tfpar.runtime.backends.process import ProcessProgram
from tfpar.runtime.backends.wire import MOVED
from tfpar.runtime.checks import check_placement
from tfpar.runtime.ranks import Ranks
from tfpar.spec import Mesh, Spec
from tfpar.variables.states import State

if TYPE_CHECKING:
    from tfpar.capture.step import CapturedStep


class Executable:
    """One step, compiled for one set of argument shapes and linked; it is called as the step is.

    Attributes:
        name: of the step, in messages.
        parts: of how many parts of a global batch this rank is given one; 1: it is given the whole.
        captured: the step as captured; its variables are all `ParallelVariable`s.
        partitioned: specs and reshards; of a rank's batch as a whole, where it runs in chunks.
        local: what every rank runs.
        packed_bytes: payload of each all-reduce once they are packed, in program order.
    """

    def __init__(
        self,
        captured: CapturedStep,
        compiled: CompiledStep,
        ranks: Ranks,
        name: str = "step",
        parts: int = 1,
    ) -> None:
        self.parts = parts
        self.name = name
        self.captured = captured
        self.partitioned = compiled.partitioned
        self.local = compiled.local
        self.ranks = ranks
        self.packed_bytes = [
            sum(t.num_bytes for t in op.inputs)
            for graph in self.local.graphs()
            for op in graph.ops
            if op.type == "AllReduce"
        ]
        self.program = link(ProgramSet.of(self.local), ranks, parts > 1)
        self._place_variables()
        self._handles: list[dict[int, tf.Tensor]] = []
        self._states: list[State] = []
        self._checked = False

    @property
    def mesh(self) -> Mesh:
        return self.partitioned.mesh

    def __call__(self, arguments: Any) -> Any:
        """Run one step on (structured) arguments; gives the step's structured result."""
        world, fed = self.ranks.world, self.captured.fed(arguments)
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
        current = [v.state for v in self.captured.variables]
        if len(current) == len(self._states) and all(
            a is b for a, b in zip(current, self._states, strict=True)
        ):
            return
        self._place_variables()
        self._states = [v.state for v in self.captured.variables]
        self._handles = [
            {rank: shard.handle for rank, shard in v.shards.items()}
            for v in self.captured.variables
        ]


def link(
    programs: ProgramSet, ranks: Ranks, fed_in_parts: bool
) -> InProcessProgram | ProcessProgram:
    """The programs of this process's ranks.

    Raises:
        RuntimeMismatchError: a rank has another program than the others of its group, or ranks
            differ in what they send each other.
    """
    world = ranks.world
    if world is None:
        return InProcessProgram(programs, ranks.devices)
    for program in programs.programs.values():
        for graph in program.graphs():
            reduce_by_blocks(graph, program.mesh, MOVED)
    connections = agree_on_programs(world, programs)
    return ProcessProgram(programs, ranks.devices, world.transport, connections, fed_in_parts)
