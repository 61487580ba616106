"""Search on one logical mesh by coordinate descent: all plans of each subgraph are priced while
those of the others are fixed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tfpar.cost.cost import Cost
from tfpar.cost.memory import live_peak
from tfpar.cost.pricer import Pricer
from tfpar.ir.graph import Variable
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.folding.folded_plan import FoldedPlan
from tfpar.planning.intra_op.incremental.fragment_memo import FragmentOutcome
from tfpar.planning.intra_op.incremental.incremental import IncrementalPricer
from tfpar.planning.intra_op.tap.neighbourhoods import (
    MAX_TOGETHER,
    Candidates,
    Picks,
    adjacent,
    every,
    group_units,
    nearby,
)
from tfpar.planning.intra_op.tap.routing import pattern_routing
from tfpar.planning.intra_op.tap.warm_starts import Layout
from tfpar.planning.intra_op.weights import WeightGroup, resembling, weight_groups
from tfpar.planning.memory.peak_model import PeakMemoryModel
from tfpar.planning.meshes import LogicalMesh
from tfpar.planning.problem import Problem
from tfpar.plans import SpecOption
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import Anchors
from tfpar.spec import Shard, Spec

MAX_CANDIDATES = 1024
"""Plans of one subgraph that are all priced; a larger one is searched part by part."""

MAX_SWEEPS = 6
"""Largest number of sweeps over the subgraphs (empirical: two or three sweeps settle models)."""

MAX_LOOKS = 5
"""Largest number of times that a search goes on after a close look at the memory of its plan."""

MAX_KICKS = 8
"""Weights outside of all blocks each of whose options is tried with the blocks fitted to it."""


class Key(NamedTuple):
    """Sort key of plans: less is better.

    Attributes:
        over: bytes beyond the device's memory.
        judged: `seconds`, and the penalty on collectives (`MeshSearch.simplify`).
        split: how many groups of weights are split.
    """

    over: float
    judged: float
    split: int
    seconds: float


INVALID = Key(math.inf, math.inf, 0, math.inf)


class IncrementalPricers(dict[tuple[FoldedModel, LogicalMesh], IncrementalPricer]):
    """Pricers by model and mesh: a problem that is searched again goes on with them."""


class MeshSearch:
    """The search on one logical mesh.

    Args:
        deadline: when the best plan priced so far is to do; by default the search has no end.
        offer: is called with each plan that is better than those before.
    """

    def __init__(
        self,
        problem: Problem,
        model: FoldedModel,
        logical: LogicalMesh,
        deadline: Deadline | None = None,
        offer: Callable[[FoldedPlan], None] | None = None,
    ) -> None:
        self.problem, self.model, self.logical = problem, model, logical
        self.deadline = deadline or Deadline()
        self.offer = offer
        mesh, graph = logical.mesh, model.prepared.graph
        self.fixed = self._fixed_specs()
        self.groups = weight_groups(problem, model, logical)
        laid = {v.name: spec for v, spec in self.fixed}
        laid |= {v.name: g.options[0] for g in self.groups for v in g.variables}
        self.anchors = model.anchors(problem, logical, laid)
        weights = [v for g in self.groups for v in g.variables]
        pricers = problem.memo.of(IncrementalPricers)
        if (model, logical) not in pricers:
            pricers[model, logical] = IncrementalPricer(
                model.prepared,
                mesh,
                self.anchors,
                model.nodes.segments(graph, model.roles),
                Pricer(mesh, problem.cluster, model.roles),
                problem.step.state_ratio,
                weights,
                model.statistics,
            )
        self.plans = pricers[model, logical]
        for group in self.groups:  # where a search before this one has left them
            self.lay(group, group.chosen)
        self.limit = problem.memory_limit
        # What was seen of plans that were looked at closely, the least of it; at first nothing.
        self.at_peak, self.looked_at = PeakMemoryModel(), PeakMemoryModel(*[math.inf] * 5)
        self.refused = ""
        self.surcharge_s = problem.aim.objective.surcharge_s
        self.key: Key = INVALID
        # Plans of a unit, by what the other groups have chosen.
        self.priced: dict[Any, dict[Picks, Key]] = {}

    def _fixed_specs(self) -> list[tuple[Variable, Spec]]:
        """The variables that are given."""
        given = self.problem.given.variables
        return [
            (v, given[v.name].spec) for v in self.model.folded.graph.variables if v.name in given
        ]

    # --- search --------------------------------------------------------------------

    def glance(self, layouts: Iterable[Layout]) -> None:
        """Price whole weights and these layouts, and take the best.

        Args:
            layouts: of meshes like this one.
        """
        self.key = self._price()
        self._tell(self.key)
        if self.key[0] > 0:
            self.look_closely()
        whole = best = [g.chosen for g in self.groups]
        for layout in layouts:
            if self.deadline.over():
                break
            key = self.key
            self._begin_with(layout)
            if self.key < key:
                best = [g.chosen for g in self.groups]
                self._tell(self.key)
            else:
                self.key = key
            self._restore(whole, self.key)
        self._restore(best, self.key)

    def explore(self, others: Iterable[Layout], near: Candidates) -> None:
        """Find out what the mesh promises, after a glance: plans near the current layout are
        priced, and near these other ones.

        Args:
            near: the plans of a unit that are near the current one.
        """
        self._sweep(near)
        for layout in others:
            before, key = [g.chosen for g in self.groups], self.key
            self._begin_with(layout)
            self._sweep(near)
            if not self.key < key:
                self._restore(before, key)

    def exhaust(self) -> None:
        """Price all plans of each subgraph, from the current layout on."""
        self._sweep(every)

    @property
    def layout(self) -> Layout:
        """Chosen option of each weight group."""
        return {g.name: g.options[g.chosen] for g in self.groups}

    @property
    def whole(self) -> Layout:
        """Weights that are not split."""
        return {g.name: g.options[0] for g in self.groups}

    def _begin_with(self, layout: Layout) -> None:
        """Give the weights the specs that they have on another mesh."""
        for group in self.groups:
            pick = resembling(layout.get(group.name), group)
            if pick is not None:
                group.chosen = pick
                self.lay(group, pick)
        self.key = self._price()

    def refine(self) -> None:
        """Price all plans of each subgraph until none improves.

        What suits the blocks depends on the specs of the weights around them, which the residual
        stream runs through: each of their options is tried, with the blocks that feel it fitted to
        it. Where memory is short, what plans store is then looked at closely, and the search goes
        on.
        """
        self.exhaust()
        self._fit_blocks_to_the_rest()
        for _ in range(MAX_LOOKS):
            if not self.look_closely():
                break
            self.exhaust()

    def simplify(self, surcharge_s: float) -> FoldedPlan | None:
        """Return the best plan near the current one, with a penalty `surcharge_s` on each
        collective."""
        self.surcharge_s = surcharge_s
        self.priced.clear()
        self.key = self._price()
        self._sweep(nearby)
        return self.found()

    def _fit_blocks_to_the_rest(self) -> None:
        units = self.units()
        inner = [unit for unit in units if self._block(unit[0]) >= 0]
        around = [g for unit in units if self._block(unit[0]) < 0 for g in unit]
        if not inner:
            return
        for group in around[:MAX_KICKS]:
            for pick in range(len(group.options)):
                if pick == group.chosen:
                    continue
                if self.deadline.over():
                    return
                before, key = [g.chosen for g in self.groups], self.key
                self.plans.settle()
                gave = [self._around(unit) for unit in inner]
                group.chosen = pick
                self.lay(group, pick)
                self.key = self._price()
                felt = [u for u, was in zip(inner, gave, strict=True) if self._around(u) != was]
                for unit in felt:  # before what is around them can go back
                    self._search(unit, nearby(unit))
                if felt or self.key < key:
                    self._sweep(adjacent)
                if self.key < key:
                    self._sweep(nearby)
                else:
                    self._restore(before, key)

    def _around(self, unit: Sequence[WeightGroup]) -> Mapping[int, FragmentOutcome | None]:
        """Return the outcomes of the segments that read weights of `unit`: as long as these stay,
        the segments feel nothing of what changes elsewhere."""
        return self.plans.outcomes_with(v for group in unit for v in group.variables)

    def _cost_and_live(self) -> Cost:
        """Price the settled plan, with its live peak of memory (`cost.memory`)."""
        self.plans.settle()
        laid = propagate(self.model.prepared, self.logical.mesh, self._anchored({}))
        cost = self.plans.cost()
        ratio = self.problem.step.state_ratio
        return live_peak(laid, self.plans.pricer, cost.bucket_bytes, ratio).in_cost(cost)

    def look_closely(self) -> bool:
        """Find out what the current plan stores at once; whether that changes by how much it fits.

        What a plan stores at its peak takes a propagation of the whole graph to know. So it is
        found out for one plan now and then, and then taken for all: the least that was seen.
        """
        if self.key == INVALID:
            return False
        self.at_peak = self.looked_at = PeakMemoryModel.of(self._cost_and_live()).least(
            self.looked_at
        )
        before, self.key = self.key, self._price()
        if self.key[0] == before[0]:
            return False
        self.priced.clear()
        return True

    def _sweep(self, candidates: Candidates) -> None:
        """Search subgraph by subgraph, the largest first, until none improves."""
        units = self.units()
        for _ in range(MAX_SWEEPS):
            before = self.key
            for unit in units:
                self._search(unit, candidates(unit))
            if self.key == before or len(units) == 1:
                break

    def _restore(self, chosen: Sequence[int], key: Key) -> None:
        """Go back to a plan that was priced before."""
        self.key = key
        for group, pick in zip(self.groups, chosen, strict=True):
            if group.chosen != pick:
                group.chosen = pick
                self.lay(group, pick)

    def found(self) -> FoldedPlan | None:
        """Return the best valid plan, or None; `refused` then says why the first was invalid."""
        if self.key[0] == math.inf:
            return None
        self.plans.settle()
        self.plans.add_up()
        return self._found(self._cost_and_live())

    def _found(self, cost: Cost, picks: Mapping[int, int] | None = None) -> FoldedPlan:
        """Return the current plan, in which the groups of these ids have other options than they
        have chosen."""
        return FoldedPlan(
            self.logical.mesh,
            self.logical.batch_names,
            self._anchored(picks or {}),
            cost,
            self._num_split(),
        )

    def _anchored(self, picks: Mapping[int, int]) -> Anchors:
        chosen = {
            v.name: g.options[picks.get(id(g), g.chosen)] for g in self.groups for v in g.variables
        }
        return dataclasses.replace(self.anchors, variables={**self.anchors.variables, **chosen})

    def _tell(self, key: Key, picks: Mapping[int, int] | None = None) -> None:
        """Report the current plan; `picks` as of `_found`."""
        if self.offer is None or key == INVALID:
            return
        cost = self.plans.cost()
        live_bytes = self.at_peak.live_bytes(cost)
        self.offer(self._found(dataclasses.replace(cost, live_bytes=live_bytes), picks))

    def units(self) -> list[list[WeightGroup]]:
        """Return the groups, in subgraphs small enough to price all plans of each, the largest
        first.

        A block is one unit if it can be, else its parts along the name tree are.
        """
        out = []
        by_block: dict[int, list[WeightGroup]] = {}
        for group in self.groups:
            by_block.setdefault(self._block(group), []).append(group)
        for block, members in by_block.items():
            out += group_units(members, MAX_CANDIDATES if block >= 0 else MAX_TOGETHER)
        stored = self.plans.stored
        return sorted(out, key=lambda unit: -sum(stored[v][0] for g in unit for v in g.variables))

    def _block(self, group: WeightGroup) -> int:
        """The number of the shared block that the weights belong to; -1 for none."""
        return self.model.folded.block_of.get(group.name, -1)

    def _search(self, unit: Sequence[WeightGroup], candidates: Iterable[Picks]) -> None:
        """Price plans of `unit`, the rest as it is; keep the best."""
        best = choice = start = tuple(g.chosen for g in unit)
        priced = self._priced_beside(unit)
        priced[start] = self.key
        for picks in candidates:
            if picks in priced:
                if priced[picks] < self.key:
                    best, self.key = picks, priced[picks]
                continue
            if self.deadline.over():
                break
            for group, pick, last in zip(unit, picks, choice, strict=True):
                if pick != last:
                    self.lay(group, pick)
            choice = picks
            key = priced[picks] = self._price()
            if key < self.key:
                best, self.key = picks, key
                self._tell(key, dict(zip(map(id, unit), picks, strict=True)))
            if self.problem.aim.progress is not None:
                self.problem.aim.progress(str(self.logical), self.model.statistics.candidates)
        for group, pick in zip(unit, best, strict=True):
            group.chosen = pick
            self.lay(group, pick)
        self.plans.settle()

    def _priced_beside(self, unit: Sequence[WeightGroup]) -> dict[Picks, Key]:
        """The plans of `unit` priced so far with the other groups as they are."""
        others = tuple(g.chosen for g in self.groups if g not in unit)
        return self.priced.setdefault((tuple(g.name for g in unit), others), {})

    def alternatives(self) -> dict[str, list[SpecOption]]:
        """Return for each group its options and the best step priced with each, the rest about as
        chosen."""
        found = {}
        for unit in self.units():
            priced = self._priced_beside(unit)
            for at, group in enumerate(unit):
                seconds = [math.inf] * len(group.options)
                for picks, key in priced.items():
                    seconds[picks[at]] = min(seconds[picks[at]], key.seconds)
                found[group.name] = [
                    SpecOption(spec, s) for spec, s in zip(group.options, seconds, strict=True)
                ]
        return found

    def lay(self, group: WeightGroup, pick: int) -> None:
        """Give the group's weights its option number `pick`."""
        for variable in group.variables:
            self.plans.lay(variable, group.options[pick])

    def _idle_axes(self) -> str:
        """The mesh axis that the plan has no use for, as a reason; nothing if it uses all."""
        for axis in self.logical.used_axes:
            weights = (v for v in self.plans.graph.variables if v.trainable)
            if not any(isinstance(self.plans.weight_spec(v)[axis], Shard) for v in weights):
                name = self.logical.mesh.axis_names[axis]
                return f"all ranks along {name!r} would compute the same"
        return ""

    def _price(self) -> Key:
        """Return the key of the current plan; infinite if it is invalid."""
        statistics = self.model.statistics
        statistics.candidates += 1
        self.deadline.count_candidate()
        routing = pattern_routing(self.model.nodes, self.plans.broken())
        idle = self._idle_axes()
        if not routing.valid or idle:
            self.refused = self.refused or routing.reason or idle
            return INVALID
        statistics.valid += 1
        cost = self.plans.cost()
        over = max(0.0, self.problem.stored_bytes(cost, self.at_peak) - self.limit)
        judged = cost.seconds + self.surcharge_s * cost.collectives
        return Key(over, _rounded(judged), self._num_split(), _rounded(cost.seconds))

    def _num_split(self) -> int:
        """Count the weight groups that the current plan splits."""
        initial, whole = self.plans.initial, self.plans.replicated
        return sum(initial[group.variables[0].handle] != whole for group in self.groups)


def _rounded(seconds: float) -> float:
    """Times that differ by rounding are equal: then fewer split weights win."""
    return float(f"{seconds:.9e}")
