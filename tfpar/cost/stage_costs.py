"""What each stage of a step takes, from what its ops, collectives and tensors do.

F, I, W     the ops of a microbatch, the collectives that they wait for, and what they add up
B           I and W
U           the update, and what runs once as the step begins (what is computed of weights)
reduction   the sums of gradients over ranks, packed in buckets
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cost.buckets import best_buckets
from tfpar.cost.collectives import collective_seconds
from tfpar.cost.microbatches import OneMicrobatch
from tfpar.cost.parts import without_parts
from tfpar.cost.running_sums import adding_seconds
from tfpar.cost.stage_memory import StageMemory
from tfpar.cost.stage_transfers import ORDER, Gather, StageTransfers
from tfpar.cost.stages import StageCost
from tfpar.cost.step_in_stages import StepInStages
from tfpar.cost.terms import Terms
from tfpar.cost.together import NOTHING, Packable, Together
from tfpar.ir.roles import When
from tfpar.ir.traits import is_free
from tfpar.propagation.communication import Communication


@dataclasses.dataclass(frozen=True)
class StagePrice:
    """What a stage takes, and of what it is made up.

    Attributes:
        cost: what is simulated.
        compute_s, waiting_s: of ops, and of the collectives that they wait for, by kind of task
            (F, I, W, U).
        weight_bytes, state_bytes: of the variables that lie in it.
        sum_bytes: of its sums of gradients.
        bucket_bytes: of packed gradients.
        collectives: that a rank takes part in, packed ones counted as one.
        host_slot_bytes, host_activation_bytes: in host memory; of one microbatch.
    """

    cost: StageCost
    compute_s: Mapping[str, float]
    waiting_s: Mapping[str, float]
    weight_bytes: float
    state_bytes: float
    sum_bytes: float
    bucket_bytes: int
    collectives: int
    host_slot_bytes: float = 0.0
    host_activation_bytes: float = 0.0


def stage_prices(
    transfers: StageTransfers, clusters: Sequence[Cluster], recompute: bool = False
) -> list[StagePrice]:
    """What each stage takes.

    Args:
        transfers: of the step.
        clusters: the part of the machines that each actor is.
        recompute: the backward pass of a stage runs its forward pass again.
    """
    step = transfers.step
    stages = [_Collectives(step, clusters[actor]) for actor in transfers.actors]
    for communication in step.laid.communications(step.roles.wire_dtypes):
        stages[step.stage[communication.op]].add(communication)
    for stage, found in enumerate(stages):
        for gather in transfers.gathers(stage):
            found.wait(gather)
        found.pack()
    return [
        _price(step, found, StageMemory(transfers, stage, found.pricer, recompute))
        for stage, found in enumerate(stages)
    ]


class _Collectives:
    """The collectives of a stage.

    Attributes:
        pricer: for the machines of its actor.
        waiting: seconds of those that ops wait for, by kind of task.
        adding: seconds of ops that collectives bring, by kind of task: a microbatch adds what it
            makes to sums, and kernels are cut (`Pricer.cut_seconds`).
        together: those of them that are packed where several run at the same time.
        terms: those that nothing waits for until the update, which are packed.
        count: how often a rank waits in a step.
    """

    def __init__(self, step: StepInStages, cluster: Cluster) -> None:
        self.step, self.pricer = step, OneMicrobatch(step.laid.mesh, cluster, step.roles)
        self.mesh = step.laid.mesh.without_last_axis()
        self.waiting: dict[str, float] = dict.fromkeys(ORDER, 0.0)
        self.adding: dict[str, float] = dict.fromkeys(ORDER, 0.0)
        self.together = NOTHING
        self.terms = Terms(self.mesh.num_axes)
        self.count = 0.0

    def add(self, communication: Communication) -> None:
        """Count a collective: it runs in the task that makes what it moves, as do sums over
        microbatches."""
        if self.step.microbatches > 1 and communication.op in self.step.runs.each:
            seconds = adding_seconds(communication, self.pricer, self.step.statistics)
            kind: str = self.step.kinds[communication.op]
            # What is summed for the update alone, as the gradients of one weight in several places.
            self.adding["W" if kind == "U" else kind] += seconds
        moved, op = without_parts(communication, self.step.laid.mesh), communication.op
        times = self.step.roles.times.get(op, 1)
        if moved is None or not times:
            return
        self.adding[self.step.kinds[op]] += times * self.pricer.cut_seconds(communication)
        when, kind, size = communication.when(self.step.roles), communication.kind, communication[1]
        if when is When.BETWEEN:
            cluster = self.pricer.cluster
            seconds = collective_seconds(kind, moved.axes, size, self.mesh, cluster)
            own = op in self.step.statistics.sums
            each = moved.each or own or self.step.microbatches == 1
            task = self.step.kinds[op] if each else "U"
            self.waiting[task] += times * seconds
            self.count += times * (self.step.microbatches if each else 1)
            packable = Packable.of(communication, self.step.roles, (task, each))
            if packable is not None:
                one = Together.one(packable._replace(axes=moved.axes), size, seconds)
                self.together = self.together.plus(one)
        else:
            self.terms.pack(when, kind, moved.axes, times * size)

    def pack(self) -> None:
        """Count those that run at the same time as one."""
        cluster = self.pricer.cluster
        for (task, each), seconds, fewer in self.together.saved(
            lambda *moved: collective_seconds(*moved, self.mesh, cluster)
        ):
            self.waiting[task] -= seconds
            self.count -= fewer * (self.step.microbatches if each else 1)

    def wait(self, gather: Gather) -> None:
        """Count a gather of what was sent in slices."""
        self.waiting[gather.kind] += gather.seconds
        self.count += self.step.microbatches if gather.each else 1


def _price(step: StepInStages, found: _Collectives, memory: StageMemory) -> StagePrice:
    cluster = found.pricer.cluster
    compute, on_host = dict(found.adding), 0.0
    for kind in ORDER:
        for op in step.ops(memory.stage, (kind,)):
            decision = step.laid.decisions.get(op)
            if decision is not None and not is_free(op):
                rule = step.laid.prepared.rules[op]
                seconds = found.pricer.op_seconds(op, rule, decision)
                times = step.roles.times.get(op, 1)
                compute[kind] += times * seconds
                on_host += times * found.pricer.kept_on_host(op, decision)
    stored = memory.variables()
    weights, state = stored.weight, stored.state
    if step.state_ratio is not None:
        compute["U"] += found.pricer.update_seconds(stored.updated, step.state_ratio)
        compute["U"] += stored.copies_s
    packed = best_buckets(found.terms, 0.0, found.mesh, cluster)
    waiting = dict(found.waiting)
    waiting["U"] += packed.after_s
    if memory.recompute:
        compute["I"] += compute["F"]
        waiting["I"] += waiting["F"]
    taken: dict[str, float] = {kind: compute[kind] + waiting[kind] for kind in ORDER}
    held = memory.held()
    sums = weights + held.sums
    cost = StageCost(
        {**taken, "B": taken["I"] + taken["W"]},
        weights + state + sums + held.others,
        held.kept,
        held.for_weights,
        held.working,
        packed.seconds,
    )
    count = found.count + packed.num_buckets
    return StagePrice(
        cost,
        compute,
        waiting,
        weights,
        state,
        sums,
        packed.bucket_bytes,
        round(count),
        stored.away,
        on_host,
    )
