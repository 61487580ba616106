"""The memory loop of a plan in stages, each with the memory of its own devices.

A planner knows of no stages: it prices the whole model on the ranks of one. So it is given the
memory of all actors together, and what it finds is assigned to stages and priced in them. Where a
stage does not fit, slots are sharded or offloaded, the stage is recomputed, or units are reassigned
under a memory budget (`planning.inter_op.stages.memory_budget`), what costs least for a byte first;
and the layout is searched again with proportionally less memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from tfpar.cluster.description import Cluster
from tfpar.planning.deadline import Deadline
from tfpar.planning.incumbent import MakePlan, SearchInterrupted
from tfpar.planning.memory.fit import MemoryFit, MemoryMove, MoveEstimate
from tfpar.planning.memory.lower_limit import LimitedLayout, LowerLimit
from tfpar.planning.memory.move_estimates import link_seconds_per_byte
from tfpar.planning.memory.offload_moves import offload_slots
from tfpar.planning.memory.recompute_stages import RecomputeStages
from tfpar.planning.memory.shard_slots import shard_slots
from tfpar.planning.pricing.price import pipeline_cost_of, price_plan
from tfpar.planning.problem import Problem
from tfpar.plans import Plan
from tfpar.spec import MemoryLimitError, PlanError
from tfpar.spec.quantities import format_bytes

STAGES_SECONDS = 1.0
"""Time limit, in seconds, for finding the stages of an interrupted search's plan."""

REASSIGNED = 4
"""Number of times that layers are reassigned for the plan of one search."""


class StageStep(Protocol):
    """A step whose layouts are found for the actors of a pipeline, and given stages."""

    @property
    def problem(self) -> Problem:
        """Of the ranks of one stage, with the memory of all actors."""
        ...

    @property
    def may_recompute(self) -> bool:
        """Whether stages may be recomputed that nobody asked for."""
        ...

    def find(self, problem: Problem) -> Plan:
        """Find the layout of the ranks of one stage.

        Raises:
            MemoryLimitError: none fits.
        """
        ...

    def assign(
        self, layout: Plan, before: Plan | None = None, deadline: Deadline | None = None
    ) -> Plan:
        """Assign `layout` to stages, not priced yet: other ones than in `before`, which does not
        fit.

        Raises:
            PlanError: there is no assignment.
        """
        ...

    def price(self, plan: Plan) -> Plan | None:
        """Price a plan in stages; None if the step is part of a planned one, whose stages hold."""
        ...


class StagedFit:
    """The memory loop of a step in stages.

    Attributes:
        layout: the last that was found, before it had stages.
    """

    def __init__(self, step: StageStep) -> None:
        self._step = step
        self._fit = MemoryFit(_excess)
        self.layout: Plan | None = None
        self.slot_moves = (
            ChangeSlots(step, shard_slots, "shard slots", 0.0),
            ChangeSlots(
                step,
                offload_slots,
                "offload slots",
                link_seconds_per_byte(step.problem.cluster),
            ),
        )

    def run(self, layout: Plan) -> Plan:
        """Return a layout in stages that fit, or another one, with what it costs so; without a cost
        if the step has no price.

        Args:
            layout: that was found for all memory.

        Raises:
            MemoryLimitError: no plan was found that fits; says which stage lacks most.
            PlanError, ScheduleError: as of the step.
        """
        first = self._in_stages(layout)
        if first.plan.cost is None:
            return first.plan
        best = self._fit.run(first.plan, [*self.moves(), LowerLimit(self, first)])
        if not self._fit.fits(best):
            raise _too_large(best, "No plan fits")
        return best

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Have what is found within known when Ctrl-C ends it.

        Raises:
            SearchInterrupted: Ctrl-C, in the search or while stages are found; its plan has stages.
        """
        try:
            yield
        except SearchInterrupted as caught:
            stopped = caught
            raise SearchInterrupted(self._best_of(lambda: stopped.plan)) from None
        except KeyboardInterrupt:
            raise SearchInterrupted(self._best_of(lambda: self.layout)) from None

    def _best_of(self, layout: MakePlan) -> MakePlan:
        """Makes the best plan that was found, or the layout in stages that are found quickly, if it
        fits."""

        def best_so_far() -> Plan | None:
            fitting = [plan for plan in self._fit.tried if self._fit.fits(plan)]
            if fitting:
                return min(fitting, key=_seconds).with_findings(cut_short=True)
            found = layout()
            if found is None:
                return None
            found = found.with_findings(cut_short=True)
            plan = self._step.assign(found, deadline=Deadline(STAGES_SECONDS))
            priced = self._step.price(plan)
            if priced is None:
                return plan
            priced = self._fit.refine(priced, self.slot_moves)
            return priced if self._fit.fits(priced) else None

        return best_so_far

    @property
    def limit(self) -> float:
        return self._step.problem.memory_limit

    def find(self, limit: float) -> LimitedLayout:
        problem = self._step.problem.with_objective(memory_limit=limit)
        return self._in_stages(self._step.find(problem))

    def _in_stages(self, layout: Plan) -> LimitedLayout:
        self.layout = layout
        plan = self._step.assign(layout)
        priced = None if layout.cost is None else self._step.price(plan)
        expected = 0.0 if layout.cost is None else layout.cost.memory_bytes
        return LimitedLayout(priced or plan, expected)

    def room(self, plan: Plan) -> float:
        shares = pipeline_cost_of(plan).stages
        return min(
            (s.limit_bytes / s.peak_bytes for s in shares if s.limit_bytes and s.peak_bytes),
            default=1.0,
        )

    def moves(self) -> list[MemoryMove]:
        """Return the moves that search no layout, of the one that was found last."""
        assert self.layout is not None, "a layout that was found"
        layout = self.layout.with_findings(attempts=())  # they are in the log already
        again = [RecomputeStages(self._step)] if self._step.may_recompute else []
        reassign = Reassign(self._step, layout, self.slot_moves, again)
        return [*self.slot_moves, *again, reassign]

    def settle(self, layout: Plan) -> Plan | None:
        """Return a layout in stages that fit without another layout, priced; None if none do.

        Raises:
            PlanError, ScheduleError: as of the step.
        """
        first = self._in_stages(layout)
        plan = first.plan if first.plan.cost is None else self.lighter(first.plan, self._fit)
        return plan if plan.cost is not None and self._fit.fits(plan) else None

    def lighter(self, plan: Plan, fit: MemoryFit) -> Plan:
        return fit.refine(plan, self.moves())


@dataclasses.dataclass(frozen=True)
class ChangeSlots:
    """The slots of the stages that do not fit, sharded or offloaded: of the plan that lacks least
    of those whose slots are not so yet. Stages that fit keep theirs, which may be faster.

    Attributes:
        seconds_per_byte: see `MoveEstimate`.
    """

    step: StageStep
    change: SlotChange
    name: str
    seconds_per_byte: float

    def estimate(self, fit: MemoryFit) -> MoveEstimate:
        return MoveEstimate(self.seconds_per_byte)

    def plans(self, fit: MemoryFit) -> Iterator[Plan]:
        for plan in fit.misses():
            changed = self.change(plan, self.step.problem, _weights_that_do_not_fit(plan))
            if changed is not None and changed != plan:
                priced = self.step.price(changed)
                if priced is not None:
                    yield priced
                return


class SlotChange(Protocol):
    """Changes where the slots of some weights of a plan lie, not priced yet; None if they have
    none."""

    def __call__(
        self, plan: Plan, problem: Problem, weights: Collection[str], /
    ) -> Plan | None: ...


@dataclasses.dataclass(frozen=True)
class Reassign:
    """Another cut: units go from stages that store too much to others.

    Attributes:
        layout: before it had stages.
        slot_moves: that are tried for each cut.
        again: that are tried for the last cut, which lacks least.
    """

    step: StageStep
    layout: Plan
    slot_moves: tuple[ChangeSlots, ...]
    again: Sequence[RecomputeStages] = ()
    name: str = "another cut"

    def estimate(self, fit: MemoryFit) -> MoveEstimate:
        """Estimate what the busiest rank computes more: units that leave the fullest stage take
        their part of its work to others, which have time for some of it."""
        plan = fit.best()
        excess, staged = fit.excess(plan), pipeline_cost_of(plan)
        if not excess:
            return MoveEstimate()
        full = max(staged.stages, key=lambda s: max(s.excess_bytes, s.host_excess_bytes))
        work = {s.ranks: staged.seconds / (1 + s.bubble) for s in staged.stages}
        idle = sum(max(work.values()) - s for ranks, s in work.items() if ranks != full.ranks)
        moved = work[full.ranks] * excess / max(full.peak_bytes + full.host_bytes, excess)
        return MoveEstimate(max(0.0, moved - idle) / excess)

    def plans(self, fit: MemoryFit) -> Iterator[Plan]:
        best = self._best(fit)
        yield from self._cuts(best, fit)
        if not fit.fits(self._best(fit)):  # units are weighed otherwise where slots are elsewhere
            lighter = fit.refine(best, self.slot_moves)
            if fit.excess(lighter) < fit.excess(best):
                yield from self._cuts(lighter, fit)
        last = self._best(fit)
        if last is not best and not fit.fits(fit.best()):
            yield fit.refine(last, self.again)

    def _best(self, fit: MemoryFit) -> Plan:
        """Return the best plan whose stages are recomputed as at first: what units keep is read off
        them."""
        first = fit.tried[0].stages
        assert first is not None, "a plan with stages"
        return fit.best(lambda plan: plan.stages and plan.stages.recompute == first.recompute)

    def _cuts(self, plan: Plan, fit: MemoryFit) -> Iterator[Plan]:
        """Cuts that lack ever less, the first less than `plan`, until one fits."""
        for _ in range(REASSIGNED):
            if fit.fits(plan):
                return
            try:
                cut = self.step.assign(self.layout, before=plan)
            except PlanError:  # there is room for none
                return
            priced = self.step.price(cut)
            if priced is None:
                return
            cut = fit.refine(priced, self.slot_moves)
            if fit.excess(cut) >= fit.excess(plan):
                return
            yield cut
            plan = cut


def with_prices(plan: Plan, problem: Problem, cluster: Cluster) -> Plan:
    """Price a plan with stages that was not searched.

    It stays without where an actor has nothing to do that takes time: such a plan runs, though
    nobody would find it.

    Args:
        cluster: the machines of all ranks.
    """
    try:
        return dataclasses.replace(price_plan(plan, problem, cluster), cluster=cluster)
    except PlanError:
        return plan


def check_given(plan: Plan) -> None:
    """Check that a plan that was not searched fits into the memory of its devices, if priced.

    Raises:
        MemoryLimitError: it does not; says which stage lacks most.
    """
    if plan.cost is not None and not pipeline_cost_of(plan).fits:
        raise _too_large(plan, "What the constraints give does not fit")


def _excess(plan: Plan) -> float:
    """Return the bytes that a rank of the most overfull stage holds beyond its memory, host
    included."""
    return max(0.0, *(s.excess_bytes + s.host_excess_bytes for s in pipeline_cost_of(plan).stages))


def _weights_that_do_not_fit(plan: Plan) -> set[str]:
    """Return the variables of the stages whose ranks hold more than they may."""
    assert plan.stages is not None, "a plan with stages"
    shares = pipeline_cost_of(plan).stages
    full = {s for s, one in enumerate(shares) if max(one.excess_bytes, one.host_excess_bytes) > 0}
    return {name for name, stage in plan.stages.owners.items() if stage in full}


def _seconds(plan: Plan) -> float:
    return pipeline_cost_of(plan).seconds


def _too_large(plan: Plan, what: str) -> MemoryLimitError:
    """The error that a priced plan in stages does not fit, which begins with `what`."""
    staged = pipeline_cost_of(plan)
    full = max(staged.stages, key=lambda share: share.host_excess_bytes)
    if full.host_excess_bytes and all(share.excess_bytes <= 0 for share in staged.stages):
        room = full.host_limit_bytes or 0.0
        return MemoryLimitError(
            f"{what} into the memory of the hosts in {len(staged.stages)} stages: a rank of stage "
            f"{staged.stages.index(full)} has {format_bytes(full.host_bytes)} there of "
            f"{format_bytes(room)} that it may. Use more machines or an optimizer with fewer "
            f"slots, or offload less (offload=). If the host has more, say so with host_memory in "
            f"the cluster file.",
            full.host_bytes,
        )
    stage = staged.fullest
    most = staged.stages[stage]
    limit = most.limit_bytes
    assert limit is not None, "it is known where something does not fit"
    cluster = "" if plan.cluster is None else f" of {plan.cluster.name!r}"
    trains = any(share.backward_s for share in staged.stages)
    means = ", another schedule, recompute=True of the pipeline" if trains else ""
    return MemoryLimitError(
        f"{what} into the memory of a device{cluster} in {len(staged.stages)} stages: a rank "
        f"of stage {stage} stores {format_bytes(most.peak_bytes)} of {format_bytes(limit)} that it "
        f"may, {format_bytes(most.fixed_bytes)} of them all the time and "
        f"{format_bytes(most.kept_bytes)} for each of {most.in_flight} microbatches in flight. Use "
        f"more stages or microbatches{means}, or put fewer layers into that stage (tap.stage).",
        most.peak_bytes,
    )
