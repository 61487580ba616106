"""Pricing many plans of one graph: only what a change reaches is propagated again.

The graph is cut into segments, contiguous runs of ops. Propagating through one segment reads some
specs from outside of it and gives specs, reshards and their price; both are memoized
(`fragment_memo`), so the same surroundings give the same outcome without a run. When the specs of
some weights change, segments that read what changed are looked up again, in order, until nothing
changes: by construction that is what `propagate` would have given for the whole graph.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tfpar.cost.cost import Cost
from tfpar.cost.pricer import Pricer, VariableBytes
from tfpar.cost.terms import Terms
from tfpar.ir.graph import Op, Tensor, Variable
from tfpar.ir.roles import FORWARD
from tfpar.ir.traits import REFERENCES
from tfpar.planning.intra_op.incremental.fragment_memo import (
    ABSENT,
    Change,
    FragmentMemo,
    FragmentOutcome,
    Seen,
    step_between,
)
from tfpar.planning.intra_op.incremental.fragments import (
    border_tensors,
    closed_segments,
    weight_of_values,
)
from tfpar.planning.intra_op.incremental.pricing_counters import PricingCounters
from tfpar.propagation.engine import Whole, begin, lay_outputs, run_segment, with_lists_whole
from tfpar.propagation.follow import followed_spec
from tfpar.propagation.partitioned_graph import Anchors, Decision
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.propagation.rule_decision import decide_by_rule
from tfpar.propagation.state import PropagationState
from tfpar.propagation.step import record, visit
from tfpar.spec import (
    Mesh,
    Replicate,
    Shard,
    Spec,
    SpecError,
    canonical,
    format_spec,
    replicated_spec,
)


class IncrementalPricer:
    """Prices plans that differ in the specs of some weights.

    Args:
        segments: the graph's ops in order, cut into runs.
        anchors: what all plans share: inputs, border tensors, outputs, weights fixed.
        state_ratio: as in `cost.evaluation.evaluate`.
        judged: weights whose splits must share work; by default all.
        work: counts what is done.
    """

    def __init__(
        self,
        prepared: PreparedGraph,
        mesh: Mesh,
        anchors: Anchors,
        segments: Sequence[Sequence[Op]],
        pricer: Pricer,
        state_ratio: float | None = None,
        judged: Collection[Variable] | None = None,
        work: PricingCounters | None = None,
    ) -> None:
        self.prepared = prepared
        self.graph = prepared.graph
        self.mesh = mesh
        self.anchors = anchors
        self.pricer = pricer
        self.state_ratio = state_ratio
        self.work = work or PricingCounters()
        self.nothing = FragmentOutcome({}, pricer.zero())
        self.replicated = replicated_spec(mesh.num_axes)
        self.start = begin(prepared, mesh, anchors)
        fixed = propagate_invariant_ops(self.start)
        self.fixed_terms = pricer.zero()
        pricer.add_ops(self.fixed_terms, self.start.result)
        self.initial: dict[Tensor, Spec | None] = dict(self.start.specs)
        open_handles = {h for h, s in self.initial.items() if s is None}
        varying = [[op for op in ops if op not in fixed] for ops in segments]
        self.segments = closed_segments([ops for ops in varying if ops], prepared, open_handles)
        self.segment_of = {op: i for i, ops in enumerate(self.segments) for op in ops}
        self.border = border_tensors(prepared, self.segment_of)
        self.weight_of = weight_of_values(prepared)
        self.judged = set(self.graph.variables if judged is None else judged)
        self.variable_of = self.graph.variable_of()
        self.open_in: dict[int, list[Variable]] = {}
        for variable in self.graph.variables:
            if self.initial[variable.handle] is None:
                readers = prepared.consumers.get(variable.handle, ())
                for at in {self.segment_of[op] for op in readers}:
                    self.open_in.setdefault(at, []).append(variable)
        self._forget()

    def _forget(self) -> None:
        count = len(self.segments) + 1  # the last one lays the graph's outputs
        self.outcomes = [FragmentMemo() for _ in range(count)]
        self.current: list[FragmentOutcome | None] = [None] * count
        self.made: dict[Tensor, tuple[int, Spec | None]] = {}
        self.readers: dict[Tensor, set[int]] = {}
        self.dirty = list(range(count))
        self.queued = [True] * count
        self.terms = self.fixed_terms.copy()
        self.shared: dict[Change, int] = {}  # reshards, by how many segments want them
        self.gathering: set[int] = set()  # segments with idle splits
        self.stored: dict[Variable, VariableBytes] = {}
        self.total = VariableBytes()
        for variable in self.graph.variables:
            self._resize(variable)

    # --- plans ---------------------------------------------------------------------

    def lay(self, variable: Variable, spec: Spec) -> None:
        """Anchor `variable`, which `anchors` names too, at `spec`."""
        spec = canonical(variable.shape or (), spec, self.mesh)
        self._place(variable, spec)
        for slot, mapping in self.start.followers.get(variable, ()):
            self._place(slot, followed_spec(spec, mapping))

    def _place(self, variable: Variable, spec: Spec) -> None:
        if self.initial[variable.handle] != spec:
            self.initial[variable.handle] = spec
            self._resize(variable)
            self._look_again(variable.handle)

    def settle(self) -> str:
        """Propagate what changed; returns why the plan cannot be, or nothing."""
        return with_lists_whole(self._settle, self.start.whole)

    def _settle(self, whole: Whole) -> str:
        if whole != self.start.whole:  # rare: some loop's lists; from now on for all plans
            self.start = begin(self.prepared, self.mesh, self.anchors, whole)
            self._forget()
        dirty, current = self.dirty, self.current
        while dirty:
            at = dirty[0]
            outcome = self._outcome(at)
            if outcome.error:
                return outcome.error  # it stays dirty: the next plan starts here
            heapq.heappop(dirty)
            self.queued[at] = False
            before = current[at]
            if outcome is not before:
                current[at] = outcome
                self._exchange(at, before, outcome)
        return ""

    def broken(self) -> dict[Op, str]:
        """Return the ops that cannot run under the current plan, and why; empty for a valid
        plan."""
        error = self.settle()
        if error:
            return {self.first_op(self.dirty[0]): error}
        found: dict[Op, str] = {}
        for at in self.gathering:
            outcome = self.current[at]
            assert outcome is not None
            for variable, axis, op in outcome.idle:
                found[op] = why_idle(variable, self.weight_spec(variable), axis, op, self.mesh)
        return found

    def outcomes_with(self, variables: Iterable[Variable]) -> Mapping[int, FragmentOutcome | None]:
        """Return the outcomes of the segments that read some of `variables`, by their number."""
        found = (self.readers.get(v.handle, ()) for v in variables)
        return {at: self.current[at] for readers in found for at in readers}

    def first_op(self, at: int) -> Op:
        """Return an op of segment `at`; of the last one, the one that makes an output."""
        return self.segments[at][0] if at < len(self.segments) else self.graph.outputs[0].op

    def weight_spec(self, variable: Variable) -> Spec:
        """Return the spec of a weight in the settled plan."""
        entry = self.made.get(variable.handle)
        spec = entry[1] if entry is not None else self.initial[variable.handle]
        return self.replicated if spec is None else spec

    def cost(self) -> Cost:
        """Return the price of the settled plan."""
        terms = self.terms.copy()
        self.pricer.add_variables(terms, self.total, self.state_ratio)
        return self.pricer.cost(terms)

    def add_up(self) -> None:
        """Sum the terms anew: thousands of changes leave roundings."""
        self.terms = self.fixed_terms.copy()
        prices: dict[Change, Terms] = {}
        for outcome in self.current:
            assert outcome is not None
            self.terms += outcome.terms
            prices.update(outcome.reshards)
        for price in prices.values():
            self.terms += price

    def _resize(self, variable: Variable) -> None:
        """Keep account of what a rank stores of `variable`."""
        spec = self.weight_spec(variable)
        stored = self.pricer.stored_bytes(variable, spec, self.state_ratio)
        before = self.stored.get(variable, VariableBytes())
        self.stored[variable] = stored
        self.total = self.total.plus(stored.minus(before))

    # --- segments --------------------------------------------------------------------

    def seen(self, tensor: Tensor, at: int) -> Seen:
        """Return the spec of `tensor` as segment `at` finds it."""
        entry = self.made.get(tensor)
        if entry is not None and entry[0] < at:
            return entry[1]
        return self.initial.get(tensor, ABSENT)

    def varies(self, tensor: Tensor, at: int) -> bool:
        """Whether that may differ between plans: the weights, and what earlier segments make."""
        if tensor in self.initial:
            return tensor in self.variable_of
        return self.segment_of.get(tensor.op, -1) < at

    def _outcome(self, at: int) -> FragmentOutcome:
        known = self.outcomes[at]
        self.work.looked_up += 1
        outcome = known.find(at, self.made, self.initial)
        if outcome is None:
            ledger = Ledger(self, at)
            outcome = self._run(at, ledger)
            for tensor in ledger.read:
                self.readers.setdefault(tensor, set()).add(at)
            known.note(ledger.read, outcome)
        return outcome

    def _run(self, at: int, ledger: Ledger) -> FragmentOutcome:
        """Propagate through one segment."""
        ops = self.segments[at] if at < len(self.segments) else ()
        self.work.segments_run += 1
        self.work.ops_visited += len(ops)
        terms = self.pricer.zero()
        # What is opened here is read here or never (see `closed_segments`).
        waiting = self.open_in.get(at, ())
        state = self.start.part(ledger, [v for v in waiting if ledger.get(v.handle, 0) is None])
        result = state.result
        try:
            if ops:
                run_segment(state, ops)
            else:
                lay_outputs(state)
        except SpecError as error:
            return FragmentOutcome({}, terms, error=str(error))
        others = []
        for reshard in result.reshards:
            if reshard.tensor in self.border:
                price = self.pricer.zero()
                self.pricer.add_reshard(price, reshard)
                others.append(((reshard.tensor, reshard.source, reshard.target), price))
            else:
                self.pricer.add_reshard(terms, reshard)
        self.pricer.add_ops(terms, result)
        writes = {t: s for t, s in ledger.items() if t in self.border}
        phase = self.pricer.roles.phase
        idle = find_redundant_splits(result.decisions, ledger, phase, self.weight_of, self.judged)
        return FragmentOutcome(writes, terms, tuple(others), tuple(idle))

    def _exchange(self, at: int, before: FragmentOutcome | None, after: FragmentOutcome) -> None:
        """Put `after` in the place of `before`: prices, specs, and who must look again."""
        step = after.steps.get(before)
        if step is None:
            step = after.steps[before] = step_between(
                before or self.nothing, after, self.variable_of
            )
        made, shared = self.made, self.shared
        self.terms += step.terms
        for change, price in step.wants:
            wanted = shared[change] = shared.get(change, 0) + 1
            if wanted == 1:
                self.terms += price
        for change, price in step.drops:
            shared[change] -= 1
            if not shared[change]:
                self.terms -= price
        if after.idle:
            self.gathering.add(at)
        else:
            self.gathering.discard(at)
        for tensor, spec in step.lays:
            laid = (at, spec)
            if made.get(tensor) != laid:
                made[tensor] = laid
                self._moved(tensor, at)
        for tensor in step.leaves:
            if made[tensor][0] == at:
                del made[tensor]
                self._moved(tensor, at)

    def _moved(self, tensor: Tensor, at: int) -> None:
        """Queue the segments after `at` that read a tensor whose spec has changed."""
        self._look_again(tensor, at)
        variable = self.variable_of.get(tensor)
        if variable is not None:
            self._resize(variable)

    def _look_again(self, tensor: Tensor, at: int = -1) -> None:
        """Queue the segments after `at` that read `tensor`."""
        queued = self.queued
        for reader in self.readers.get(tensor, ()):
            if reader > at and not queued[reader]:
                queued[reader] = True
                heapq.heappush(self.dirty, reader)


# --- Plan-invariant ops ---
#
# They are propagated and priced once. The rest of the graph is shorter, and so is what it reads of
# its surroundings.


def propagate_invariant_ops(state: PropagationState) -> set[Op]:
    """Propagate the ops that run in the same way in all plans, and return them.

    Args:
        state: at its begin.
    """
    prepared, anchors = state.prepared, state.anchors
    fixed: set[Op] = set()
    made: set[Tensor] = set()
    for op in prepared.graph.ops:
        if op.type == "Placeholder":
            visit(state, op)
            fixed.add(op)
        elif made.issuperset(op.inputs) and op.name not in anchors.ops and not anchors.tensors:
            if _hangs_on_inputs_alone(op, prepared) and _stays_as_made(state, op):
                fixed.add(op)
                made.update(op.outputs)
    return fixed


def _hangs_on_inputs_alone(op: Op, prepared: PreparedGraph) -> bool:
    """Whether the decision of `op` depends on nothing but its rule and the specs of its inputs."""
    if op in prepared.ordinary:
        *_, keeps = prepared.ordinary[op]
        return keeps
    return op.type == "Const" and not any(t.dtype in REFERENCES for t in op.outputs)


def _stays_as_made(state: PropagationState, op: Op) -> bool:
    """Take the step of `op` if it moves nothing and leaves no Partials, on which readers have a
    say."""
    decision = decide_by_rule(state, op)
    arriving = tuple(state.spec(t) for t in op.inputs)
    if decision.makes_partials or decision.strategy.in_specs != arriving:
        return False
    record(state, op, decision)
    return True


# --- The specs as one run of a segment sees them ---


class Surroundings(Protocol):
    """Specs around a segment in the plan that is priced."""

    def seen(self, tensor: Tensor, at: int) -> Seen:
        """Return the spec of `tensor` as segment `at` finds it."""

    def varies(self, tensor: Tensor, at: int) -> bool:
        """Whether that may differ between plans."""


class Ledger(dict[Tensor, "Spec | None"]):
    """The specs that segment `at` finds and settles; a propagation takes it for its `specs`.

    Attributes:
        read: what it found in its surroundings that plans differ in, in the order in which it
            was read.
    """

    def __init__(self, around: Surroundings, at: int) -> None:
        super().__init__()
        self.around = around
        self.at = at
        self.read: dict[Tensor, Seen] = {}
        self._found: dict[Tensor, Seen] = {}  # what it read, and what is the same for all plans

    def _outside(self, tensor: Tensor) -> Seen:
        if tensor in self._found:
            return self._found[tensor]
        value = self._found[tensor] = self.around.seen(tensor, self.at)
        if self.around.varies(tensor, self.at):
            self.read[tensor] = value
        return value

    def __missing__(self, tensor: Tensor) -> Spec | None:
        value = self._outside(tensor)
        if value is ABSENT:
            raise KeyError(tensor)
        return value

    def get(self, tensor: Tensor, default: Any = None) -> Any:
        if dict.__contains__(self, tensor):
            return dict.__getitem__(self, tensor)
        value = self._outside(tensor)
        return default if value is ABSENT else value

    def setdefault(self, tensor: Tensor, default: Any = None) -> Any:
        value = self.get(tensor, ABSENT)
        if value is ABSENT:
            self[tensor] = value = default
        return value


# --- Redundant splits ---


def find_redundant_splits(
    decisions: Mapping[Op, Decision],
    specs: Mapping[Tensor, Spec | None],
    phase: Mapping[Op, int],
    weight_of: Mapping[Tensor, Variable],
    judged: Collection[Variable],
) -> Iterator[tuple[Variable, int, Op]]:
    """(weight, mesh axis, op): along the axis a split weight is gathered, and no work is shared.

    Args:
        phase: of every op; the forward pass is judged, since what it shares the backward pass does.
        weight_of: of the tensors that hold a weight's value, see `fragments.weight_of_values`.
        judged: the weights whose splits must share work.
    """
    for op, decision in decisions.items():
        if phase[op] != FORWARD:
            continue
        for tensor, need in zip(op.inputs, decision.strategy.in_specs, strict=True):
            variable = weight_of.get(tensor)
            if variable is None or variable not in judged:
                continue
            if any(t in weight_of for t in op.outputs):  # it is relabelled: not used yet
                continue
            have = specs.get(tensor)
            for axis, placement in enumerate(have or ()):
                if (
                    isinstance(placement, Shard)
                    and isinstance(need[axis], Replicate)
                    and decision.strategy.splits[axis][0] < 0
                ):
                    yield variable, axis, op


def why_idle(variable: Variable, spec: Spec, axis: int, op: Op, mesh: Mesh) -> str:
    """Explain to users why splitting `variable` as `spec` is of no use."""
    return (
        f"{variable.name} is {format_spec(spec)}, but {op.type} "
        f"{op.name!r} runs whole along {mesh.axis_names[axis]!r}: the weight "
        f"would be gathered and no work shared"
    )
