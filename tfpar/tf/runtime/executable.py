"""A compiled step, linked and run."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfpar.compile import CompiledStep
from tfpar.compile.local.block_all_reduce import decompose_all_reduces
from tfpar.compile.local.local_graph import LocalProgram
from tfpar.compile.local.programs import Group, ProgramSet
from tfpar.spec import Mesh, Replicate, RuntimeMismatchError, Shard, format_spec
from tfpar.tf.runtime.agreement import agree_on_programs
from tfpar.tf.runtime.backends.in_process import InProcessProgram
from tfpar.tf.runtime.backends.process import ProcessProgram
from tfpar.tf.runtime.backends.wire import MOVED
from tfpar.tf.runtime.copies import Copies, PlacedVariable
from tfpar.tf.runtime.ranks import Ranks
from tfpar.tf.runtime.shared_state import SharedState
from tfpar.tf.variables.parallel_variable import ParallelVariable
from tfpar.tf.variables.states import State

if TYPE_CHECKING:
    from tfpar.propagation.partitioned_graph import PartitionedGraph
    from tfpar.tf.capture.step import CapturedStep


class Executable:
    """One step, compiled for one set of argument shapes and linked; it is called as the step is.

    Attributes:
        name: of the step, in messages.
        parts: of how many parts of a global batch this rank is given one; 1: it is given the whole.
        captured: the step as captured; its variables are all `ParallelVariable`s.
        compiled: what the compiler has made of it.
        packed_bytes: payload of each all-reduce once they are packed, in program order.
        around: makes the context that each run is in.
        specs: of the arguments that it was compiled for, of the whole batch.
    """

    def __init__(
        self,
        captured: CapturedStep,
        compiled: CompiledStep,
        ranks: Ranks,
        name: str = "step",
        parts: int = 1,
        specs: Any = (),
    ) -> None:
        self.parts = parts
        self.specs = specs
        self.name = name
        self.captured = captured
        self.compiled = compiled
        self.ranks = ranks
        self.packed_bytes = [
            sum(t.num_bytes for t in op.inputs)
            for graph in self.local.graphs()
            for op in graph.ops
            if op.type == "AllReduce"
        ]
        self.around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.program = link(compiled.programs, ranks, parts > 1)
        self._owned = self._variables_by_group()
        self._place_variables()
        self._handles: list[dict[int, tf.Tensor]] = []
        self._states: list[State] = []
        self._shared: SharedState | None = None
        self._checked = False

    @property
    def partitioned(self) -> PartitionedGraph:
        """Specs and reshards; of a rank's batch as a whole, where it runs in chunks."""
        return self.compiled.partitioned

    @property
    def local(self) -> LocalProgram:
        """Local program that every rank runs; of a staged step, the program with all stages."""
        return self.compiled.local

    @property
    def mesh(self) -> Mesh:
        return self.partitioned.mesh

    def __call__(self, arguments: Any) -> Any:
        """Run one step on (structured) arguments; gives the step's structured result."""
        world, fed = self.ranks.world, self.captured.fed(arguments)
        if world is None:
            return self._run(fed)
        world.beacon.runs(self.compiled.programs.stages_of(world.rank))
        within = self.program.reached if isinstance(self.program, ProcessProgram) else None
        with world.lockstep.step(
            self.name,
            fed,
            part=self._part,
            shared=self._held_in_common,
            first=not self._checked,
            within=within,
        ):
            return self._run(fed)

    def _run(self, fed: Sequence[tf.Tensor]) -> Any:
        self._refresh_handles()
        inputs = [*fed, *self.captured.closure] * len(self._linked)
        with self.around():
            flat = self.program(inputs, self._handles)[: len(self.local.graph.outputs)]
        if not self._checked:
            self._checked = True
            placed = [*self._placed().values()]
            check_placement(placed)
            if self.ranks.world is None:
                check_copies(placed)
        return self.captured.pack_outputs(flat)

    def check(self) -> None:
        """Check that variables are where the step placed them, and that ranks agree on what they
        hold in common; where ranks are processes, all call it together, after the same step.

        Raises:
            RuntimeMismatchError: names the first variable and ranks that differ.
        """
        placed = [*self._placed().values()]
        check_placement(placed)
        world = self.ranks.world
        if world is None:
            check_copies(placed)
            return
        with world.at("comparing variables"):
            self._held_in_common().compare(f"up to the last {self.name}")

    def _held_in_common(self) -> SharedState:
        """Return the state that the ranks, which are processes, share of the step's variables."""
        if self._shared is None:
            assert self.ranks.world is not None
            self._shared = SharedState([*self._placed().values()], self.ranks.world)
        return self._shared

    @functools.cached_property
    def _part(self) -> str:
        """Name of the part of a batch that this rank is given, `data=1 of data=2 x model=2`; `""`
        if it is given all. Ranks that have one name are given the same."""
        world, specs = self.ranks.world, self.partitioned.specs
        if self.parts == 1 or world is None:
            return ""
        split = {
            axis
            for tensor in self.captured.arguments
            for axis, placement in enumerate(specs.get(tensor, ()))
            if isinstance(placement, Shard)
        }
        at = self.mesh.coordinates(self.compiled.programs.group_of(world.rank).index(world.rank))
        names = self.mesh.axis_names
        return f"{', '.join(f'{names[a]}={at[a]}' for a in sorted(split))} of {self.mesh}"

    @property
    def _linked(self) -> list[Group]:
        """The groups of ranks whose programs this process runs, in their order."""
        world, groups = self.ranks.world, self.compiled.programs.programs
        return [group for group in groups if world is None or world.rank in group]

    def _variables_by_group(self) -> dict[Group, list[int]]:
        """The variables of each group's program, by their place among the step's."""
        place = {v.name: i for i, v in enumerate(self.partitioned.graph.variables)}
        return {
            group: [place[v.name] for v in program.graph.variables]
            for group, program in self.compiled.programs.programs.items()
        }

    def _placed(self) -> dict[int, PlacedVariable]:
        """Find the placement of each variable of the step, by its index among them.

        What several groups have is a scalar, which each rank has a copy of.
        """
        programs, logical = self.compiled.programs.programs, self.partitioned.graph.variables
        having: dict[int, list[Group]] = {}
        for group, owned in self._owned.items():
            for i in owned:
                having.setdefault(i, []).append(group)
        found = {}
        for i, groups in having.items():
            ranks = self.ranks.part(tuple(sorted(itertools.chain.from_iterable(groups))))
            if logical[i].on_host:
                ranks = ranks.on_hosts
            program = programs[groups[0]]
            laid = program.variable_specs[logical[i].name], program.mesh
            if len(groups) > 1:
                laid = (Replicate(),), Mesh.of([len(ranks.members)])
            found[i] = PlacedVariable(self.captured.variables[i], *laid, ranks)
        return found

    def _place_variables(self) -> None:
        placed, holders = self._placed(), iter(self.program.holders)
        holding: dict[int, list[int]] = {
            i: [*range(len(one.ranks.members))] for i, one in placed.items()
        }
        for group in self._linked:
            for i in self._owned[group]:
                members = placed[i].ranks.members
                for rank, holder in zip(group, next(holders), strict=True):
                    holding[i][members.index(rank)] = members.index(group[holder])
        for i, (variable, spec, mesh, ranks) in placed.items():
            variable.shard(mesh, spec, ranks, holding[i])

    def _refresh_handles(self) -> None:
        """Refresh the handles: variables may have been gathered or moved since the last call."""
        current = [v.state for v in self.captured.variables]
        if len(current) == len(self._states) and all(
            a is b for a, b in zip(current, self._states, strict=True)
        ):
            return
        self._place_variables()
        self._shared = None
        self._states = [v.state for v in self.captured.variables]
        self._handles = [
            _handles(self.captured.variables[i], group)
            for group in self._linked
            for i in self._owned[group]
        ]


def _handles(variable: ParallelVariable, group: Group) -> dict[int, tf.Tensor]:
    """Return the handles of a group's shards in this process, by rank of the group."""
    assert variable.ranks is not None
    members = variable.ranks.members
    return {
        group.index(members[rank]): shard.handle
        for rank, shard in variable.shards.items()
        if members[rank] in group
    }


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
            decompose_all_reduces(graph, program.mesh, MOVED)
    connections = agree_on_programs(world, programs)
    return ProcessProgram(programs, ranks.devices, world.transport, connections, fed_in_parts)


# --- Checks after a program's first step ---


def check_placement(placed: Sequence[PlacedVariable]) -> None:
    """Check that every variable is placed where the plan says.

    Raises:
        RuntimeMismatchError: names the first variable and rank that differ.
    """
    for variable, spec, mesh, ranks in placed:
        lain_on = None if variable.ranks is None else variable.ranks.members
        if variable.layout != (mesh, spec) or lain_on != ranks.members:
            raise RuntimeMismatchError(
                f"Variable {variable.name!r} is laid as {variable.layout} on the ranks {lain_on}, "
                f"not as the plan's {format_spec(spec)} on {mesh}, the ranks {ranks.members}."
            )
        for rank, shard in variable.shards.items():
            device = ranks.devices[variable.holders[rank]]
            if not shard.device.endswith(device.rpartition("/")[2]):
                raise RuntimeMismatchError(
                    f"The shard of variable {variable.name!r} for rank {ranks.members[rank]} lies "
                    f"on {shard.device}, not on {device}."
                )


def check_copies(placed: Sequence[PlacedVariable]) -> None:
    """Check that ranks of this process agree on what they hold copies of.

    Raises:
        RuntimeMismatchError: names the first variable and two ranks that differ.
    """
    copies = [Copies(one) for one in placed]
    weights = [next(iter(copy.shards.values())) for copy in copies if copy.is_weight]
    largest: float | None = None  # takes long for a large model, and copies mostly are the same
    for copy in copies:
        shards = copy.shards
        for ranks in copy.pairs():
            first, other = (np.asarray(shards[rank].read_value()) for rank in ranks)
            if np.array_equal(first, other, equal_nan=first.dtype.kind in "fc"):
                continue
            if largest is None:
                values = (np.asarray(weight.read_value()) for weight in weights)
                largest = max(map(_largest, values), default=0.0)
            apart = _largest(first.astype("float64") - other.astype("float64"))
            advice = "Please report it with the model."
            if not copy.judge(ranks, apart, _largest(first), largest, advice):
                break


def _largest(value: np.ndarray) -> float:
    return float(np.max(np.abs(value.astype("float64")), initial=0.0))
