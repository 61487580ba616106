"""Pricing many plans of one graph: only what a change reaches is propagated again.

The graph is cut into segments, contiguous runs of ops. Propagating through one
segment reads some specs from outside of it and gives specs, reshards and their price; what it
read is recorded in a trie of (tensor, spec) steps, so the same surroundings give the same
outcome without a run. When the specs of some weights change, segments that read what
changed are looked up again, in order, until nothing changes: by construction that is what
`propagate` would have given for the whole graph.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tfpar.cost.cost import Cost
from tfpar.cost.patterns import hands_on
from tfpar.cost.pricer import Pricer
from tfpar.cost.terms import Terms
from tfpar.ir.graph import Op, Tensor, Variable
from tfpar.ir.roles import FORWARD
from tfpar.propagation.engine import Whole, begin, lay_outputs, run_segment, with_lists_whole
from tfpar.propagation.follow import followed_spec
from tfpar.propagation.partitioned import Anchors, PartitionedGraph
from tfpar.propagation.prepared import PreparedGraph
from tfpar.rules.rule import relabelled
from tfpar.spec import (
    Mesh,
    Replicate,
    Shard,
    Spec,
    SpecError,
    canonical,
    format_spec,
    replicated,
)

_Change = tuple[Tensor, Spec, Spec]
"""A reshard as (tensor, from, to)."""

_ABSENT = object()
_Value = Any
"""A spec, FREE (None) for an open tensor, or _ABSENT for one that is not laid yet."""


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What a segment gives in certain surroundings.

    Attributes:
        writes: specs of tensors that other segments read, and of weights it settled.
        terms: the price of what is the segment's own.
        reshards: of tensors that other segments may reshard too, each with its price.
        idle: (weight, mesh axis, op): split weights gathered for an op that all ranks along
            the axis then compute alike.
        error: why propagation cannot go on, or empty.
        steps: what changes when it takes another outcome's place, as far as that was asked.
    """

    writes: Mapping[Tensor, Spec | None]
    terms: Terms
    reshards: tuple[tuple[_Change, Terms], ...] = ()
    idle: tuple[tuple[Variable, int, Op], ...] = ()
    error: str = ""
    steps: dict[Outcome | None, _Step] = dataclasses.field(default_factory=dict)


class _Node:
    """A step of the trie: which tensor is read next, and what followed each of its specs."""

    __slots__ = ("children", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.children: dict[_Value, _Node | Outcome] = {}


class _Ledger(dict):
    """The specs as one run of a segment sees them: its own, else the surroundings'.

    Attributes:
        read: of the surroundings', those that plans differ in.
    """

    def __init__(self, pricer: IncrementalPricer, at: int) -> None:
        super().__init__()
        self.pricer = pricer
        self.at = at
        self.read: dict[Tensor, _Value] = {}

    def _outside(self, tensor: Tensor) -> _Value:
        if tensor in self.read:
            return self.read[tensor]
        value = self.pricer.seen(tensor, self.at)
        if self.pricer.varies(tensor, self.at):
            self.read[tensor] = value
        return value

    def __missing__(self, tensor: Tensor) -> Spec | None:
        value = self._outside(tensor)
        if value is _ABSENT:
            raise KeyError(tensor)
        return value

    def get(self, tensor: Tensor, default: Any = None) -> Any:
        if dict.__contains__(self, tensor):
            return dict.__getitem__(self, tensor)
        value = self._outside(tensor)
        return default if value is _ABSENT else value

    def setdefault(self, tensor: Tensor, default: Any = None) -> Any:
        value = self.get(tensor, _ABSENT)
        if value is _ABSENT:
            self[tensor] = value = default
        return value


class IncrementalPricer:
    """Prices plans that differ in the specs of some weights.

    Args:
        segments: the graph's ops in order, cut into runs.
        anchors: what all plans share: inputs, border tensors, outputs, weights fixed.
        state_ratio: as in `cost.evaluate.evaluate`.
        judged: weights whose splits must share work; by default all.
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
    ) -> None:
        self.prepared = prepared
        self.graph = prepared.graph
        self.mesh = mesh
        self.anchors = anchors
        self.pricer = pricer
        self.state_ratio = state_ratio
        self.nothing = Outcome({}, pricer.zero())
        self.replicated = replicated(mesh.num_axes)
        self.start = begin(prepared, mesh, anchors)
        self.initial: dict[Tensor, _Value] = dict(self.start.specs)
        self.segments = _closed(list(segments), prepared, self._open_handles())
        self.segment_of = {op: i for i, ops in enumerate(self.segments) for op in ops}
        self.border = self._border()
        self.weight_of = _weight_values(self.graph, prepared)
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
        self.tries: list[_Node | Outcome | None] = [None] * count
        self.current: list[Outcome | None] = [None] * count
        self.made: dict[Tensor, tuple[int, _Value]] = {}
        self.readers: dict[Tensor, set[int]] = {}
        self.dirty = list(range(count))
        self.queued = [True] * count
        self.terms = self.pricer.zero()
        self.shared: dict[_Change, int] = {}  # reshards, by how many segments want them
        self.gathering: set[int] = set()  # segments with idle splits
        self.stored: dict[Variable, tuple[float, float]] = {}  # see `Pricer.stored_bytes`
        self.weight_bytes = self.state_bytes = 0.0
        for variable in self.graph.variables:
            self._resize(variable)

    def _open_handles(self) -> set[Tensor]:
        return {h for h, s in self.initial.items() if s is None}

    def _border(self) -> set[Tensor]:
        """Tensors that more than the segment that makes them may ask for."""
        border = set(self.graph.outputs)
        for tensor, readers in self.prepared.consumers.items():
            home = self.segment_of[tensor.op]
            if any(self.segment_of[op] != home for op in readers):
                border.add(tensor)
        # A list that another segment wants in another spec is made anew, of what it was made of.
        lists = [t for t in border if t.dtype == "variant"]
        while lists:
            sources = set(lists.pop().op.inputs) - border
            border |= sources
            lists += [t for t in sources if t.dtype == "variant"]
        return border | {v.handle for v in self.graph.variables}

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
        """Ops that the laid plan cannot serve, and why; empty for a valid plan."""
        error = self.settle()
        if error:
            return {self.first_op(self.dirty[0]): error}
        found: dict[Op, str] = {}
        for at in self.gathering:
            outcome = self.current[at]
            assert outcome is not None
            for variable, axis, op in outcome.idle:
                found[op] = (
                    f"{variable.name} is {format_spec(self.weight_spec(variable))}, but {op.type} "
                    f"{op.name!r} runs whole along {self.mesh.axis_names[axis]!r}: the weight "
                    f"would be gathered and no work shared"
                )
        return found

    def first_op(self, at: int) -> Op:
        """An op of segment `at`; of the last one, the one that makes an output."""
        return self.segments[at][0] if at < len(self.segments) else self.graph.outputs[0].op

    def weight_spec(self, variable: Variable) -> Spec:
        """Where the settled plan lays a weight."""
        entry = self.made.get(variable.handle)
        spec = entry[1] if entry is not None else self.initial[variable.handle]
        return self.replicated if spec is None else spec

    def cost(self) -> Cost:
        """The price of the settled plan."""
        terms = self.terms.copy()
        terms.weight_bytes, terms.state_bytes = self.weight_bytes, self.state_bytes
        self.pricer.add_update(terms, self.state_ratio)
        return self.pricer.cost(terms)

    def add_up(self) -> None:
        """Sum the terms anew: thousands of changes leave roundings."""
        self.terms = self.pricer.zero()
        prices: dict[_Change, Terms] = {}
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
        before = self.stored.get(variable, (0.0, 0.0))
        self.stored[variable] = stored
        self.weight_bytes += stored[0] - before[0]
        self.state_bytes += stored[1] - before[1]

    # --- segments --------------------------------------------------------------------

    def seen(self, tensor: Tensor, at: int) -> _Value:
        """The spec of `tensor` as segment `at` finds it."""
        entry = self.made.get(tensor)
        if entry is not None and entry[0] < at:
            return entry[1]
        return self.initial.get(tensor, _ABSENT)

    def varies(self, tensor: Tensor, at: int) -> bool:
        """Whether that may differ between plans: the weights, and what earlier segments make."""
        if tensor in self.initial:
            return tensor in self.variable_of
        return self.segment_of.get(tensor.op, -1) < at

    def _outcome(self, at: int) -> Outcome:
        made, initial = self.made, self.initial
        node = self.tries[at]
        while type(node) is _Node:
            tensor = node.tensor
            entry = made.get(tensor)
            if entry is None or entry[0] >= at:  # as `seen`, in the innermost loop of all
                node = node.children.get(initial.get(tensor, _ABSENT))
            else:
                node = node.children.get(entry[1])
        if isinstance(node, Outcome):
            return node
        ledger = _Ledger(self, at)
        outcome = self._run(at, ledger)
        self._note(at, ledger.read, outcome)
        return outcome

    def _note(self, at: int, read: Mapping[Tensor, _Value], outcome: Outcome) -> None:
        for tensor in read:
            self.readers.setdefault(tensor, set()).add(at)
        steps = list(read.items())
        if not steps:
            self.tries[at] = outcome
            return
        node = self.tries[at]
        if node is None:
            node = self.tries[at] = _Node(steps[0][0])
        for i, (tensor, value) in enumerate(steps):
            assert isinstance(node, _Node) and node.tensor is tensor
            if i + 1 == len(steps):
                node.children[value] = outcome
            else:
                node = node.children.setdefault(value, _Node(steps[i + 1][0]))

    def _run(self, at: int, ledger: _Ledger) -> Outcome:
        """Propagate through one segment."""
        terms = self.pricer.zero()
        # What is opened here is read here or never (see `_closed`).
        waiting = self.open_in.get(at, ())
        state = self.start.part(ledger, [v for v in waiting if ledger.get(v.handle, 0) is None])
        result = state.result
        try:
            if at < len(self.segments):
                run_segment(state, self.segments[at])
            else:
                lay_outputs(state)
        except SpecError as error:
            return Outcome({}, terms, error=str(error))
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
        return Outcome(writes, terms, tuple(others), tuple(self._idle(result, ledger)))

    def _idle(
        self, result: PartitionedGraph, ledger: _Ledger
    ) -> Iterator[tuple[Variable, int, Op]]:
        for op, decision in result.decisions.items():
            if self.pricer.roles.phase[op] != FORWARD:
                continue
            for tensor, need in zip(op.inputs, decision.strategy.in_specs, strict=True):
                variable = self.weight_of.get(tensor)
                if variable not in self.judged or any(t in self.weight_of for t in op.outputs):
                    continue
                have = ledger.get(tensor)
                for axis, placement in enumerate(have or ()):
                    if (
                        isinstance(placement, Shard)
                        and isinstance(need[axis], Replicate)
                        and decision.strategy.splits[axis][0] < 0
                    ):
                        yield variable, axis, op

    def _exchange(self, at: int, before: Outcome | None, after: Outcome) -> None:
        """Put `after` in the place of `before`: prices, specs, and who must look again."""
        step = after.steps.get(before)
        if step is None:
            step = after.steps[before] = _step(before or self.nothing, after, self.variable_of)
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
            made[tensor] = (at, spec)
            self._look_again(tensor, at)
        for tensor in step.leaves:
            if made[tensor][0] == at:
                del made[tensor]
                self._look_again(tensor, at)
        for variable in step.weights:
            self._resize(variable)

    def _look_again(self, tensor: Tensor, at: int = -1) -> None:
        """The segments after `at` that read `tensor` must be looked up."""
        queued = self.queued
        for reader in self.readers.get(tensor, ()):
            if reader > at and not queued[reader]:
                queued[reader] = True
                heapq.heappush(self.dirty, reader)


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """From one outcome of a segment to another: what changes."""

    terms: Terms
    wants: Sequence[tuple[_Change, Terms]]
    drops: Sequence[tuple[_Change, Terms]]
    lays: Sequence[tuple[Tensor, Spec | None]]
    leaves: Sequence[Tensor]
    weights: Sequence[Variable]


def _step(before: Outcome, after: Outcome, variable_of: Mapping[Tensor, Variable]) -> _Step:
    had, has = dict(before.reshards), dict(after.reshards)
    # Weights are laid by whichever segment reads them first: always said anew.
    lays = [
        (tensor, spec)
        for tensor, spec in after.writes.items()
        if tensor in variable_of or tensor not in before.writes or before.writes[tensor] != spec
    ]
    leaves = [tensor for tensor in before.writes if tensor not in after.writes]
    return _Step(
        after.terms - before.terms,
        [(change, price) for change, price in has.items() if change not in had],
        [(change, price) for change, price in had.items() if change not in has],
        lays,
        leaves,
        [variable_of[t] for t in (*(t for t, _ in lays), *leaves) if t in variable_of],
    )


def _weight_values(graph: Any, prepared: PreparedGraph) -> dict[Tensor, Variable]:
    """The tensors that hold nothing but a weight's value: reads, casts, reshapes of it."""
    found: dict[Tensor, Variable] = {v.handle: v for v in graph.variables if v.trainable}
    for op in graph.ops:
        for tensor in op.inputs:
            if tensor in found and hands_on(op, tensor, prepared):
                found[op.outputs[0]] = found[tensor]
    return found


def _closed(
    segments: list[Sequence[Op]], prepared: PreparedGraph, open_handles: set[Tensor]
) -> list[list[Op]]:
    """`segments`, merged so that a weight left open, or a draw, is settled where it is opened."""
    home = {op: i for i, ops in enumerate(segments) for op in ops}
    position = {op: i for i, op in enumerate(prepared.graph.ops)}
    joined = list(range(len(segments)))  # each segment -> the last one it is joined with
    for ops in segments:
        for op in ops:
            opens = prepared.rules[op].drawn or any(t in open_handles for t in op.inputs)
            if not opens or not op.outputs:
                continue
            reader = _first_reader(op, prepared, position)
            if reader is not None:
                joined[home[op]] = max(joined[home[op]], home[reader])
    out: list[list[Op]] = []
    end = -1
    for i, ops in enumerate(segments):
        if i <= end:
            out[-1].extend(ops)
        else:
            out.append(list(ops))
        end = max(end, joined[i])
    return out


def _first_reader(op: Op, prepared: PreparedGraph, position: Mapping[Op, int]) -> Op | None:
    """The first op that reads what `op` makes, past ops that may only relabel it."""
    first: Op | None = None
    stack, seen = list(op.outputs), set()
    while stack:
        for reader in prepared.consumers.get(stack.pop(), ()):
            if reader in seen or (first is not None and position[reader] > position[first]):
                continue
            seen.add(reader)
            rule = prepared.rules[reader]
            relabels = len(reader.outputs) == 1 and (
                bool(relabelled(reader, rule)) or (prepared.rules[op].drawn and rule.lower is None)
            )
            if relabels:
                stack += reader.outputs
            else:
                first = reader
    return first
