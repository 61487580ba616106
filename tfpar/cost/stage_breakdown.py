"""Cost of each stage of a step, from its ops, collectives and tensors.

F, I, W     the ops of a microbatch, the collectives that they wait for, and what they add up
B           I and W
U           the update, and what runs once as the step begins (what is computed of weights)
reduction   the sums of gradients over ranks, packed in buckets
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cost.host import waiting_for_host
from tfpar.cost.pipeline_model import StageProfile
from tfpar.cost.stage_memory import StageMemory
from tfpar.cost.stage_transfers import ORDER, SliceGather, StageTransfers
from tfpar.cost.sub_batch_cost import OneMicrobatch
from tfpar.cost.sub_batch_pricing import adding_seconds, without_parts
from tfpar.cost.task_partition import TaskPartition
from tfpar.cost.terms import Terms, best_buckets
from tfpar.ir.roles import BACKWARD, FORWARD, UPDATE
from tfpar.ir.traits import is_free
from tfpar.pipeline.recompute import RecomputeOf, recomputes
from tfpar.pipeline.tasks import Kind
from tfpar.propagation.reshard import Communication

_PHASE: Mapping[Kind, int] = {"F": FORWARD, "I": BACKWARD, "W": BACKWARD, "U": UPDATE}
"""Of a kind of task, the phase that its terms have."""


@dataclasses.dataclass(frozen=True)
class StageCostBreakdown:
    """Cost of a stage by kind of task.

    Attributes:
        cost: what is simulated.
        compute_s, waiting_s: of ops, and of the collectives that they wait for, by kind of task
            (F, I, W, U).
        dispatch_s: in which the host issues these ops, by kind of task.
        weight_bytes, state_bytes: of the variables that lie in it.
        sum_bytes: of its sums of gradients.
        bucket_bytes: of packed gradients.
        collectives: that a rank takes part in, packed ones counted as one.
        host_slot_bytes, host_activation_bytes: in host memory; of one microbatch.
    """

    cost: StageProfile
    compute_s: Mapping[str, float]
    waiting_s: Mapping[str, float]
    dispatch_s: Mapping[str, float]
    weight_bytes: float
    state_bytes: float
    sum_bytes: float
    bucket_bytes: int
    collectives: int
    host_slot_bytes: float = 0.0
    host_activation_bytes: float = 0.0

    @property
    def host_wait_s(self) -> dict[str, float]:
        """Seconds that a rank waits for its host to issue ops, by kind of task (F, I, W, U)."""
        return _host_wait_s(self.compute_s, self.waiting_s, self.dispatch_s)


def stage_prices(
    transfers: StageTransfers,
    clusters: Sequence[Cluster],
    recompute: RecomputeOf = False,
    beside: Sequence[Cluster] = (),
) -> list[StageCostBreakdown]:
    """Price each stage.

    Args:
        transfers: of the step.
        clusters: the part of the machines that each actor is.
        recompute: the stages whose backward pass runs their forward pass again.
        beside: of each actor its ranks and those of others that share its links, rank by rank of
            each; by default its own alone.
    """
    step = transfers.step
    mesh, roles, linked = step.laid.mesh, step.roles, beside or clusters
    pricers = [OneMicrobatch(mesh, clusters[a], roles, beside=linked[a]) for a in transfers.actors]
    stages = [_TaskTerms(step, pricer) for pricer in pricers]
    for communication in step.laid.communications(step.roles.wire_dtypes):
        stages[step.stage[communication.op]].add(communication)
    for stage, terms in enumerate(stages):
        for gather in transfers.gathers(stage):
            terms.wait(gather)
    return [
        _price(
            step, terms, StageMemory(transfers, stage, terms.pricer, recomputes(recompute, stage))
        )
        for stage, terms in enumerate(stages)
    ]


class _TaskTerms:
    """Terms of each task of a stage: of one microbatch, or of one step in `U`.

    Args:
        pricer: for the machines of its actor.
    """

    def __init__(self, step: TaskPartition, pricer: OneMicrobatch) -> None:
        self.step, self.pricer = step, pricer
        self.of: dict[Kind, Terms] = {kind: pricer.zero() for kind in ORDER}

    def add(self, communication: Communication) -> None:
        """Add a collective: it runs in the task that makes what it moves, as do sums over
        microbatches."""
        step, op = self.step, communication.op
        maker = step.kinds[op]
        if step.microbatches > 1 and op in step.runs.each:
            seconds = adding_seconds(communication, self.pricer, step.statistics)
            # What is summed for the update alone, as the gradients of one weight in several places.
            self._add_seconds("W" if maker == "U" else maker, seconds)
        moved, times = without_parts(communication, step.laid.mesh), step.roles.times.get(op, 1)
        if moved is None or not times:
            return
        self._add_seconds(maker, times * self.pricer.cut_seconds(communication))
        each = moved.each or op in step.statistics.sums or step.microbatches == 1
        task, runs = (maker, step.microbatches) if each else ("U", 1)
        terms = self.of[task]
        self.pricer.add_collective(terms, communication, moved.axes, _PHASE[task], times, runs)

    def wait(self, gather: SliceGather) -> None:
        """Add a gather of what was sent in slices."""
        terms = self.of[gather.kind]
        terms.communication[_PHASE[gather.kind]] += gather.seconds
        terms.count += self.step.microbatches if gather.is_per_microbatch else 1

    def compute(self, stage: int) -> None:
        """Add the ops of a stage."""
        for kind, terms in self.of.items():
            for op in self.step.ops(stage, (kind,)):
                decision = self.step.laid.decisions.get(op)
                if decision is not None and not is_free(op):
                    rule, times = (
                        self.step.laid.prepared.rules[op],
                        self.step.roles.times.get(op, 1),
                    )
                    self.pricer.add_compute(terms, op, rule, decision, _PHASE[kind], times)

    def _add_seconds(self, kind: Kind, seconds: float) -> None:
        self.of[kind].compute[_PHASE[kind]] += seconds


def _host_wait_s(
    compute_s: Mapping[str, float], waiting_s: Mapping[str, float], dispatch_s: Mapping[str, float]
) -> dict[str, float]:
    return {
        kind: waiting_for_host(dispatch_s[kind], compute_s[kind] + waiting_s[kind])
        for kind in ORDER
    }


def _price(step: TaskPartition, tasks: _TaskTerms, memory: StageMemory) -> StageCostBreakdown:
    pricer = tasks.pricer
    tasks.compute(memory.stage)
    pricer.add_variables(tasks.of["U"], memory.variables(), step.state_ratio)
    waits = {kind: pricer.wait(terms) for kind, terms in tasks.of.items()}
    compute: dict[str, float] = {
        kind: float(terms.compute[_PHASE[kind]]) for kind, terms in tasks.of.items()
    }
    waiting: dict[str, float] = {kind: waited[_PHASE[kind]] for kind, (waited, _) in waits.items()}
    count = sum(starts for _, starts in waits.values())
    total = functools.reduce(operator.add, tasks.of.values())
    packed = best_buckets(total, 0.0, pricer.ranks, pricer.linked)
    waiting["U"] += packed.after_s
    dispatch: dict[str, float] = {
        kind: float(terms.dispatch.sum()) for kind, terms in tasks.of.items()
    }
    if memory.recompute:
        for of_tasks in (compute, waiting, dispatch):
            of_tasks["I"] += of_tasks["F"]
    idle = _host_wait_s(compute, waiting, dispatch)
    taken: dict[str, float] = {kind: compute[kind] + waiting[kind] + idle[kind] for kind in ORDER}
    held = memory.held()
    sums = total.weight_bytes + held.sums if step.trains else 0.0
    cost = StageProfile(
        {**taken, "B": taken["I"] + taken["W"]},
        total.weight_bytes + total.state_bytes + sums + held.others,
        held.kept,
        held.for_weights,
        held.working,
        packed.seconds,
    )
    return StageCostBreakdown(
        cost,
        compute,
        waiting,
        dispatch,
        total.weight_bytes,
        total.state_bytes,
        sums,
        packed.bucket_bytes,
        round(count + packed.num_buckets),
        total.host_slot_bytes,
        total.host_activation_bytes,
    )
