"""Memory of a rank of a stage: all the time, from a forward to a backward pass, during a task."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from tfpar.cost.liveness import Buffer, BufferLiveness
from tfpar.cost.memory import operands_of_collectives, temporaries_of_expansions
from tfpar.cost.op_compute import temporaries
from tfpar.cost.pricer import VariableBytes
from tfpar.cost.stage_transfers import ORDER, StageTransfers
from tfpar.cost.sub_batch_cost import OneMicrobatch
from tfpar.ir.graph import Op, Tensor
from tfpar.ir.roles import FORWARD, UPDATE
from tfpar.ir.traits import WHOLE_UPDATES
from tfpar.pipeline.graph import Carries
from tfpar.pipeline.tasks import Kind
from tfpar.spec import Replicate, Spec


class StageResidency(NamedTuple):
    """Bytes of one stage beside its variables.

    Attributes:
        sums: of gradients of weights that lie in other stages.
        others: of what else is held all the time.
        kept, for_weights: see `StageMemory.kept`.
        working: see `StageMemory.working`.
    """

    sums: float
    others: float
    kept: float
    for_weights: float
    working: Mapping[str, float]


class StageMemory:
    """Memory of one stage.

    Args:
        transfers: of its step.
        pricer: for the machines of its actor.
        recompute: its backward pass runs its forward pass again.
    """

    def __init__(
        self,
        transfers: StageTransfers,
        stage: int,
        pricer: OneMicrobatch,
        recompute: bool,
    ) -> None:
        self.transfers, self.stage, self.pricer = transfers, stage, pricer
        self.step, self.actors = transfers.step, transfers.actors
        self.recompute = recompute

    def held(self) -> StageResidency:
        """Find what its ranks hold beside its variables; once for links that have the same sent.

        What links decide of memory is which tensors go in slices.
        """
        one_memory = self.pricer.cluster.one_memory
        sent = self.transfers.sent_as
        key = self.stage, tuple(self.actors), self.recompute, one_memory, sent
        if key not in self.step.held:
            kept, for_weights = self.kept()
            others = self.copies() + self.inputs() + self.made_once()
            working = self.working(kept, for_weights)
            self.step.held[key] = StageResidency(self.sums(), others, kept, for_weights, working)
        return self.step.held[key]

    # --- all the time

    def variables(self) -> VariableBytes:
        """Add up its variables."""
        total = VariableBytes()
        for variable, spec in self.step.laid.variable_specs.items():
            if self.step.stage[variable.handle.op] == self.stage:
                slots = self.step.laid.slots_spec(variable)
                ratio = self.step.state_ratio
                total = total.plus(self.pricer.stored_bytes(variable, spec, ratio, slots))
        return total

    def copies(self) -> float:
        """Add up copies of weights that lie in other stages."""
        handles = self.step.variables
        return sum(
            self.transfers.held_bytes(crossing)
            for crossing in self.step.crossings
            if self._is_sent(crossing.source, crossing.target)
            and crossing.target == self.stage
            and crossing.tensor in handles
        )

    def sums(self) -> float:
        """Add up gradients of weights that lie in other stages, until they are sent."""
        return sum(
            self.transfers.held_bytes(crossing)
            for crossing in self.step.crossings
            if self._is_sent(crossing.source, crossing.target)
            and crossing.source == self.stage
            and crossing.carries == "sum"
        )

    def inputs(self) -> float:
        """Add up the parts of the batch that the stage is fed, for all microbatches."""
        total = 0.0
        for tensor in self.step.laid.graph.inputs:
            spec = self.step.laid.specs[tensor]
            if self._reads(tensor, spec):
                parts = 1 if isinstance(spec[-1], Replicate) else self.step.microbatches
                total += parts * self.pricer.stored(tensor, spec)
        return total

    def made_once(self) -> float:
        """Add up what is made once a step and read for each microbatch, such as gathered
        weights."""
        found = 0.0
        for tensor, spec in self.step.users:
            op = tensor.op
            is_once = self.step.kinds[op] == "U" and self.step.roles.phase[op] != UPDATE
            if is_once and op.type != "Placeholder" and self._reads(tensor, spec):
                found += self.pricer.stored(tensor, spec)
        return found

    def _reads(self, tensor: Tensor, spec: Spec) -> bool:
        users = self.step.users.get((tensor, spec), ())
        return any(stage == self.stage and kind != "U" for stage, kind in users)

    def _is_sent(self, source: int, target: int) -> bool:
        return self.actors[source] != self.actors[target]

    # --- of a microbatch

    def kept(self) -> tuple[float, float]:
        """Add up what the backward pass finds when it begins, and what W does when I has ended.

        Where microbatches join, it is no less than what they all store past a join.
        """
        kept = for_weights = 0.0
        backward = ORDER[:3] if self.recompute else ORDER[1:3]
        for buffer, users in self.step.users.items():
            maker = buffer[0].op
            here = {kind for stage, kind in users if stage == self.stage}
            is_mine = self.step.stage[maker] == self.stage
            if "W" in here and not (is_mine and self.step.kinds[maker] == "W"):
                for_weights += self._size(*buffer)
            is_read = self.step.roles.phase[maker] == FORWARD and not here.isdisjoint(backward)
            if is_read and not (self.recompute and is_mine):
                kept += self._size(*buffer)
        if not self.step.trains:  # what the step gives, until its last microbatch has run
            kept += self._given()
        if self.recompute:
            kept -= self.transfers.in_slices(self.stage)  # it gathers them again
        return max(kept, self._past_joins()), for_weights

    def _given(self) -> float:
        """Bytes of what a microbatch makes that the step returns."""
        laid = self.step.laid
        own = (t for t in {*laid.graph.outputs} if self.step.stage[t.op] == self.stage)
        return sum(self._size(t, laid.specs[t]) for t in own)

    def _past_joins(self) -> float:
        """The most that is stored of a microbatch past a join."""
        stored: dict[int, float] = {}
        for buffer, joins in self.step.past_joins[self.stage].items():
            for join in joins:
                stored[join] = stored.get(join, 0.0) + self._size(*buffer)
        return max(stored.values(), default=0.0)

    def working(self, kept: float, for_weights: float) -> dict[str, float]:
        """Find what a task of each kind holds beside what is kept, and received while it runs."""
        activations, gradients = self._received("activations"), self._received("gradients")
        again = ORDER[: int(self.recompute)]
        return {
            "F": self._beyond(kept + activations, "F"),
            "B": self._beyond(kept + gradients, *again, "I", "W"),
            "I": self._beyond(kept + gradients, *again, "I"),
            "W": self._beyond(for_weights, "W"),
            "U": self._updating(),
        }

    def _received(self, carries: Carries) -> float:
        return sum(
            self.transfers.sent_bytes(crossing)
            for crossing in self.step.crossings
            if self._is_sent(crossing.source, crossing.target)
            and crossing.target == self.stage
            and crossing.carries == carries
        )

    def _size(self, tensor: Tensor, spec: Spec) -> float:
        """Bytes of what is made for each microbatch; the rest is counted as held all the time."""
        return self.pricer.stored(tensor, spec) if tensor.op in self.step.runs.each else 0.0

    def _beyond(self, counted: float, *kinds: Kind) -> float:
        """Find what a task of these kinds holds at most, less what is counted elsewhere."""
        ops = self.step.ops(self.stage, kinds)
        last, made = ORDER.index(kinds[-1]), kinds[-2:] if kinds[-1] == "W" else kinds[-1:]

        def is_needed(buffer: Buffer) -> bool:
            maker = buffer[0].op
            is_sent = self.step.stage[maker] == self.stage and self.step.kinds[maker] in made
            return any(
                ORDER.index(kind) > last if stage == self.stage else is_sent
                for stage, kind in self.step.users[buffer]
            )

        passing = {op: self._passing[op] for op in ops if op in self._passing}
        packed = 0.0 if self.pricer.cluster.one_memory else max(passing.values(), default=0.0)
        for op in ops:
            if op in self._temporaries:
                passing[op] = passing.get(op, 0.0) + self._temporaries[op]
        liveness = BufferLiveness(self.step.buffers, ops, is_needed)
        most, _ = liveness.find_peak(self._size, passing)
        return max(0.0, most - counted) + packed

    @functools.cached_property
    def _passing(self) -> dict[Op, float]:
        return operands_of_collectives(self.step.laid, self.pricer.stored, self.step.roles, 0.0)

    @functools.cached_property
    def _temporaries(self) -> dict[Op, float]:
        return temporaries_of_expansions(self.step.laid, self.pricer)

    def _updating(self) -> float:
        """Find what the update holds beside weights, slots and gradients."""
        step, ops = self.step, self.step.ops(self.stage, ("U",))
        updating = [op for op in ops if step.roles.phase[op] == UPDATE]
        passing = {}
        for op in updating:
            variable = step.variables.get(op.inputs[0]) if op.inputs else None
            if op.type in WHOLE_UPDATES and variable is not None:
                laid = step.laid.slots_spec(variable) or step.laid.variable_specs[variable]
                written = self.pricer.stored(variable, laid)
                away = self.pricer.is_away(variable)
                passing[op] = written * temporaries(variable.trainable, step.state_ratio, away)

        def size(tensor: Tensor, spec: Spec) -> float:
            is_own = step.roles.phase[tensor.op] == UPDATE
            return self.pricer.stored(tensor, spec) if is_own else 0.0

        liveness = BufferLiveness(step.buffers, updating, lambda buffer: False)
        return liveness.find_peak(size, passing).num_bytes
