"""Loops, branches and calls: their bodies are partitioned like the graph around them.

Here is a recurrent layer, a loop over time with the batch split: `x` arrives as S(0), `w` and `u`
are replicated, and the state `h` starts as zeros, R.

    h = tanh(x[t] @ w + h @ u)

In a first round the body is propagated with what arrives, and `h` comes out as S(0). A loop has to
give its state as it took it, so in the second round `h` goes in as S(0) too: each rank takes its
part of the zeros. Now it comes out as it went in, and the loop is settled.

- A body holds no collectives, for every rank runs a loop or branch of its own. So it is propagated
  *confined*: what would have to cross ranks in it excludes the mesh axis (`ImmovableInputError`).
  Then the inputs of the region are gathered along that axis before it: first only the weights, then
  all that can be moved, then everything.
- What is added up over trips may come out as a Partial. Then it goes in as one, zeros at first: the
  gradient of a weight is added up in the backward loop, and reduced once, after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tfpar.ir.graph import FunctionRef, Op, Tensor
from tfpar.ir.passes.region_variables import is_unchanged
from tfpar.ir.traits import CALLS, HANDED_ON, LOOPS, REFERENCES, origin
from tfpar.propagation.decide import ImmovableInputError, OpStrategy
from tfpar.propagation.factors import WHOLE
from tfpar.propagation.immovable import check_immovable
from tfpar.propagation.partitioned_graph import Anchors, Decision, PartitionedGraph
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.propagation.state import PropagationState
from tfpar.spec import Partial, Placement, Replicate, Shard, Spec, replicated_spec

# In each round a spec gets from one loop variable to the next: many variables take many rounds.
_MAX_ROUNDS = 16


def partition_region(state: PropagationState, op: Op) -> tuple[Decision, tuple[int, ...]]:
    """Decide how the loop, branch or call `op` runs, given the specs that its inputs have.

    Returns:
        The decision, and the mesh axes along which it had to run replicated.

    Raises:
        ImmovableInputError: lists or variables are sharded along an axis that the body cannot keep.
    """
    specs = tuple(state.spec(t) for t in op.inputs)
    loose = tuple(map(state.is_loose, op.inputs))
    whole = state.whole_axes(op)
    key = (op, specs, loose, state.mesh, state.confined, whole)
    known = state.prepared.caches.regions
    if key not in known:
        known[key] = _settle(state, op, specs, loose, whole)
    return known[key]


def _settle(
    state: PropagationState,
    op: Op,
    specs: Sequence[Spec],
    loose: Sequence[bool],
    whole: Sequence[int],
) -> tuple[Decision, tuple[int, ...]]:
    """Try to run `op` on its inputs as they come, then gathered more and more."""
    region = _Region(state, op, loose)
    inputs = range(len(op.inputs))
    weights = {i for i in inputs if _is_weight(op.inputs[i])}
    pinned = {i for i in inputs if op.inputs[i].dtype in REFERENCES and not loose[i]}
    # By mesh axis, the inputs that are gathered along it: the weights; all that can be moved; all.
    lent: dict[int, set[int]] = {axis: set(inputs) for axis in whole}
    while True:
        arriving = [
            _gathered(spec, {a for a, which in lent.items() if i in which}, i in pinned)
            for i, spec in enumerate(specs)
        ]
        try:
            for tensor, spec in zip(op.inputs, arriving, strict=True):
                check_immovable(state, tensor, spec)
            replicated = [axis for axis, which in lent.items() if len(which) == len(inputs)]
            return region.partition(arriving), tuple(sorted(replicated))
        except ImmovableInputError as error:
            if state.confined or not any(
                _lend_more(lent, axis, specs, weights, pinned) for axis in error.axes
            ):
                raise


def _lend_more(
    lent: dict[int, set[int]],
    axis: int,
    specs: Sequence[Spec],
    weights: set[int],
    pinned: set[int],
) -> bool:
    """Let more inputs be gathered along `axis`; whether there was more."""
    before = lent.setdefault(axis, set())
    sharded = {i for i, spec in enumerate(specs) if not _is_whole(spec, axis)}
    if len(before) == len(specs):
        return False
    if sharded & weights - before:
        lent[axis] = before | weights
    elif sharded & pinned and sharded - pinned - before:
        lent[axis] = set(range(len(specs))) - pinned
    else:
        lent[axis] = set(range(len(specs)))
    return True


def _is_weight(tensor: Tensor) -> bool:
    return tensor.dtype not in REFERENCES and origin(tensor, HANDED_ON).dtype == "resource"


def _is_whole(spec: Spec, axis: int) -> bool:
    return isinstance(spec[axis], Replicate)


def _gathered(spec: Spec, axes: Collection[int], pinned: bool) -> Spec:
    """`spec` with `axes` whole and, unless it is `pinned`, Partials reduced."""
    return tuple(
        Replicate() if a in axes or (isinstance(p, Partial) and not pinned) else p
        for a, p in enumerate(spec)
    )


@dataclasses.dataclass(frozen=True)
class _Region:
    """A region op; its `loose` inputs are zero everywhere, or lists to be had in any spec."""

    around: PropagationState
    op: Op
    loose: Sequence[bool]

    def partition(self, arriving: Sequence[Spec]) -> Decision:
        if self.op.type in LOOPS:
            return self._loop(arriving)
        if self.op.type in CALLS:
            return self._call(arriving)
        return self._branches(arriving)

    def _decision(
        self,
        in_specs: Sequence[Spec],
        out_specs: Sequence[Spec],
        bodies: Mapping[Any, PartitionedGraph],
    ) -> Decision:
        splits = (WHOLE,) * self.around.mesh.num_axes
        return Decision(OpStrategy(splits, tuple(in_specs), tuple(out_specs)), bodies=bodies)

    def _body(
        self, name: str, inputs: Sequence[Tensor], constant: Collection[int]
    ) -> PreparedGraph:
        """The prepared body `name`; of the arguments in `constant` the values may be known."""
        known: dict[int, np.ndarray] = {}
        for i in constant:
            value = self.around.prepared.constants.value(inputs[i])
            if value is not None:
                known[i] = value
        return self.around.prepared.body(name, known)

    def _confined(
        self,
        body: PreparedGraph,
        inputs: Sequence[Spec],
        outputs: Sequence[Spec | None] = (),
        zeros: frozenset[Tensor] = frozenset(),
    ) -> PartitionedGraph:
        anchors = Anchors(inputs=tuple(inputs), outputs=tuple(outputs))
        around = self.around
        return around.within(body, around.mesh, anchors, confined=True, zeros=zeros)

    # --- calls and branches --------------------------------------------------------

    def _call(self, arriving: Sequence[Spec]) -> Decision:
        name = self.op.attrs["f"]
        body = self._body(name, self.op.inputs, range(len(self.op.inputs)))
        inner = self._confined(body, arriving)
        return self._decision(arriving, inner.output_specs, {name: inner})

    def _branches(self, arriving: Sequence[Spec]) -> Decision:
        condition, *arguments = arriving
        inputs = self.op.inputs[1:]
        names = _branch_names(self.op)
        bodies = {n: self._body(n, inputs, range(len(inputs))) for n in names}
        first = {n: self._confined(b, arguments) for n, b in bodies.items()}
        agreed = [
            self._agree([(first[n].output_specs[i], first[n].is_free(i)) for n in names])
            for i in range(len(self.op.outputs))
        ]
        final = {n: self._confined(b, arguments, agreed) for n, b in bodies.items()}
        whole = replicated_spec(self.around.mesh.num_axes)
        return self._decision((whole, *arguments), agreed, final)

    def _agree(self, made: Sequence[tuple[Spec, bool]]) -> Spec:
        """One spec for what all branches return at one place."""
        specs = list(dict.fromkeys(s for s, free in made if not free)) or [made[0][0]]
        agreed = list(specs[0])
        for spec in specs[1:]:
            for axis, placement in enumerate(spec):
                if isinstance(agreed[axis], Replicate):
                    agreed[axis] = placement
                elif placement != agreed[axis] and not isinstance(placement, Replicate):
                    raise ImmovableInputError(axis)
        return tuple(agreed)

    # --- loops ---------------------------------------------------------------------

    def _loop(self, arriving: Sequence[Spec]) -> Decision:
        op = self.op
        graph = self.around.prepared.graph.functions[op.attrs["body"]]
        unchanged = [i for i in range(len(op.inputs)) if is_unchanged(graph, i)]
        body = self._body(op.attrs["body"], op.inputs, unchanged)
        test = self._body(op.attrs["cond"], op.inputs, unchanged)
        carried = [i for i in range(len(op.inputs)) if i not in set(unchanged)]
        zeros = frozenset(t for t, z in zip(graph.inputs, self.loose, strict=True) if z)
        state = list(arriving)
        for _ in range(_MAX_ROUNDS):
            inner = self._confined(body, state, zeros=zeros)
            before = list(state)
            for i in carried:
                state[i] = self._join(i, state[i], inner.output_specs[i])
            if state == before:
                break
        else:
            axes = range(self.around.mesh.num_axes)
            raise ImmovableInputError(*(a for a in axes if any(not _is_whole(s, a) for s in state)))
        final = self._confined(body, state, state)
        condition = self._confined(test, state, [replicated_spec(self.around.mesh.num_axes)])
        return self._decision(state, state, {op.attrs["body"]: final, op.attrs["cond"]: condition})

    def _join(self, position: int, into: Spec, out: Spec) -> Spec:
        """The next spec of a loop variable, which went in as `into` and came out as `out`."""
        fixed = self.op.inputs[position].dtype in REFERENCES and not self.loose[position]
        return tuple(
            self._join_axis(axis, a, b, fixed)
            for axis, (a, b) in enumerate(zip(into, out, strict=True))
        )

    def _join_axis(self, axis: int, into: Placement, out: Placement, fixed: bool) -> Placement:
        if into == out or isinstance(out, Replicate):
            return into
        if fixed or (isinstance(into, Shard) and isinstance(out, Partial)):
            raise ImmovableInputError(axis)
        return out


def _branch_names(op: Op) -> list[FunctionRef]:
    if "branches" in op.attrs:
        return list(op.attrs["branches"])
    return [op.attrs["then_branch"], op.attrs["else_branch"]]
