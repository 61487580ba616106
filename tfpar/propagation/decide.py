"""Decision of how one op runs, given the specs that its inputs arrive with.

Take `y = x @ w`, in factors `i k, k j -> i j`, on two ranks. `x` is float32[8,4] and arrives as
S(0); `w` is float32[4,6] and arrives as S(1). Along the axis the op may

    replicate          x and w are gathered     128 + 96 bytes
    split i, the rows  w is gathered            96 bytes          S(0),R -> S(0)
    split j            x is gathered            128 bytes         R,S(1) -> S(1)

and splits the rows, which moves the fewest bytes. One mesh axis is decided after the other; what
one has split, the next finds smaller.

- An op splits a factor only where some input is split there already: here `k` was no candidate. So
  propagation follows the plan.
- Where an input arrives Partial, an op that is linear in it can also *carry* it: let it pass, and
  make a Partial itself. The sum over ranks is then still to be paid, by what comes later.
- There is one split that propagation starts of its own. Where several Partials meet in an op, each
  would have to be reduced whole. Scattered over a factor that they share they move half as much,
  and the op's work is shared out (ATP §3.2.1: the attention core).
- For an op whose outputs have to be reduced for its sake (of a sparse op), the bytes of that count
  too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence

from tfpar.ir.graph import Tensor
from tfpar.ir.traits import REFERENCES
from tfpar.propagation.factors import (
    CARRY,
    WHOLE,
    Split,
    Splits,
    fits,
    has_factor,
    shard_of,
    size_after,
    spec_of,
    split_in_place,
    split_of,
)
from tfpar.rules.rule import PLAIN, Dims, OpRule
from tfpar.spec import Mesh, Partial, Placement, Replicate, Shard, Spec

FREE = None
"""In place of a spec: a weight that the plan leaves open takes what its reader wants."""


@dataclasses.dataclass(frozen=True)
class OperandState:
    """Properties of an input tensor that matter to a decision.

    Attributes:
        num_bytes: of the whole tensor.
        pinned: it cannot be moved: a variable, or a list that is not empty.
        confined: nothing of it may cross ranks (in a loop's body); what is replicated may still
            be cut, since each rank has all of it.
        zero: it is zero everywhere, so making it Partial costs nothing.
    """

    num_bytes: int
    pinned: bool = False
    confined: bool = False
    zero: bool = False

    @classmethod
    def of(cls, tensor: Tensor, loose: bool = False, confined: bool = False) -> OperandState:
        """Return the operand `tensor`; a `loose` one is zero, or a list that can be made anew."""
        pinned = tensor.dtype in REFERENCES and not loose
        return cls(max(tensor.num_bytes, 1), pinned, confined, loose)

    def moving(self, cost: float) -> float:
        """Return `cost` of a move that crosses ranks, or infinity."""
        return _INFINITE if self.pinned or self.confined else cost


@dataclasses.dataclass(frozen=True)
class OpStrategy:
    """Strategy of an op: one split per axis, and the specs that follow.

    Attributes:
        splits: per axis a factor with its pattern, REPLICATE or CARRY.
        in_specs: what each input must be resharded to.
        out_specs: what the outputs come as.
    """

    splits: Splits
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]


class ImmovableInputError(Exception):
    """An op cannot run: along these mesh axes some inputs cannot be moved (variables, anything in
    the body of a loop), and no strategy takes them as they are."""

    def __init__(self, *axes: int) -> None:
        super().__init__(*axes)
        self.axes = axes


def choose_strategy(
    rule: OpRule,
    operands: Sequence[OperandState],
    specs: Sequence[Spec | None],
    out_bytes: int,
    mesh: Mesh,
    whole_axes: Collection[int] = (),
    *,
    planned: OpStrategy | None = None,
    sparse: bool = False,
    deferred: bool = False,
) -> OpStrategy:
    """Choose the cheapest way to run an op with `rule` on inputs of `specs`.

    Args:
        whole_axes: mesh axes along which the op must replicate.
        planned: how it runs along the first mesh axes, if that is given.
        sparse: its outputs are reduced for its sake, if it leaves them partial (see `OpRule`).
        deferred: its outputs are better carried on than reduced, if it leaves them partial.

    Raises:
        ImmovableInputError: pinned inputs contradict each other on some axis.
    """
    sizes = list(rule.sizes)  # as the chosen splits leave them
    seen = [list(rule.sizes) for _ in specs]  # as each input's own spec leaves them
    own_splits: list[list[Split | None]] = [[] for _ in specs]
    splits: list[Split] = []
    takes: list[tuple[int, ...]] = []
    reductions: list[str] = []
    for axis, parts in enumerate(mesh.shape):
        placed = [
            _placed(rule.inputs[i], specs[i], axis, seen[i], parts) for i in range(len(specs))
        ]
        in_place = [
            None if own is None else split_in_place(own, rule.sizes, before, splits, mesh)
            for own, before in zip(placed, own_splits, strict=True)
        ]
        if planned is not None and axis < len(planned.splits):
            split, group, reduction = _along(planned, axis)
        else:
            split, group, reduction = _choose_axis(
                rule,
                operands,
                specs,
                placed,
                in_place,
                sizes,
                axis,
                mesh,
                out_bytes,
                axis in whole_axes,
                sparse,
                deferred,
            )
        splits.append(split)
        takes.append(group)
        reductions.append(reduction)
        for own, left, before in zip(placed, seen, own_splits, strict=True):
            before.append(own)
            if own is not None and own[0] >= 0:
                left[own[0]] = size_after(left[own[0]], own[1], parts)
        if split[0] >= 0:
            sizes[split[0]] = size_after(sizes[split[0]], split[1], parts)
    chosen = tuple(splits)
    return OpStrategy(
        chosen,
        input_specs(rule, chosen, mesh, takes, reductions),
        output_specs(rule, chosen, mesh, takes, reductions),
    )


def strategy_of(
    rule: OpRule, in_specs: Sequence[Spec], made: Sequence[Spec], mesh: Mesh
) -> OpStrategy | None:
    """Find the strategy that reads inputs as `in_specs` and gives outputs as `made`; None if `rule`
    has none.

    What an op that stands for others gives is theirs to say: there `made` is not looked at.
    """
    sizes = list(rule.sizes)
    splits: list[Split] = []
    takes: list[tuple[int, ...]] = []
    reductions: list[str] = []
    operands = [*zip(rule.inputs, in_specs, strict=True), *zip(rule.outputs, made, strict=True)]
    for axis, parts in enumerate(mesh.shape):
        split, reduction = WHOLE, "sum"
        group: tuple[int, ...] = ()
        for dims, spec in operands:
            placement = spec[axis]
            if isinstance(placement, Shard):
                found = split_of(dims, placement, sizes, parts)
                if found is None or not may_split(rule, found, sizes, parts):
                    return None
                split = found
                break
        else:
            group, reduction = _carried(in_specs, axis)
            if group:
                split = CARRY, PLAIN
                if not may_carry(rule, group, reduction):
                    return None
        splits.append(split)
        takes.append(group)
        reductions.append(reduction)
        if split[0] >= 0:
            sizes[split[0]] = size_after(sizes[split[0]], split[1], parts)
    chosen = tuple(splits)
    strategy = OpStrategy(
        chosen,
        input_specs(rule, chosen, mesh, takes, reductions),
        output_specs(rule, chosen, mesh, takes, reductions),
    )
    stands_for_others = any(factor in rule.expand for factor, _ in chosen)
    fits_outputs = stands_for_others or strategy.out_specs == tuple(made)
    return strategy if strategy.in_specs == tuple(in_specs) and fits_outputs else None


def _along(strategy: OpStrategy, axis: int) -> tuple[Split, tuple[int, ...], str]:
    """Return the split of `strategy` along one mesh axis, and of a carried Partial its inputs and
    its reduction."""
    split = strategy.splits[axis]
    return split, *(_carried(strategy.in_specs, axis) if split[0] == CARRY else ((), "sum"))


def _carried(in_specs: Sequence[Spec], axis: int) -> tuple[tuple[int, ...], str]:
    """The inputs that are Partial along a mesh axis, and by what reduction."""
    found = [(i, p.op) for i, s in enumerate(in_specs) if isinstance(p := s[axis], Partial)]
    return tuple(i for i, _ in found), found[0][1] if found else "sum"


def may_split(rule: OpRule, split: Split, sizes: Sequence[int], parts: int) -> bool:
    """Whether an op may make `split` over `parts` ranks, its factors left at `sizes`."""
    factor, pattern = split
    return (
        sizes[factor] > 1
        and rule.can_split(factor)
        and fits(sizes[factor], pattern)
        and rule.takes_pattern(factor, pattern)
        and rule.can_cut(factor, sizes[factor], parts)
    )


def may_carry(rule: OpRule, group: Sequence[int], reduction: str) -> bool:
    """Whether Partials of the inputs `group` pass through an op, the others whole."""
    if len(group) == 1 and group[0] in rule.monotone:
        return True
    return reduction == "sum" and tuple(group) in rule.linear


def output_specs(
    rule: OpRule,
    splits: Splits,
    mesh: Mesh,
    takes: Sequence[tuple[int, ...]],
    reductions: Sequence[str],
) -> tuple[Spec, ...]:
    """Return the specs that the outputs of an op come as which runs as `splits`."""
    return tuple(
        operand_spec(dims, rule, splits, mesh, takes, reductions, None) for dims in rule.outputs
    )


def input_specs(
    rule: OpRule,
    splits: Splits,
    mesh: Mesh,
    takes: Sequence[tuple[int, ...]],
    reductions: Sequence[str],
) -> tuple[Spec, ...]:
    """Return the specs that an op which runs as `splits` needs of its inputs."""
    return tuple(
        operand_spec(dims, rule, splits, mesh, takes, reductions, i)
        for i, dims in enumerate(rule.inputs)
    )


def operand_spec(
    dims: Dims,
    rule: OpRule,
    splits: Splits,
    mesh: Mesh,
    takes: Sequence[tuple[int, ...]],
    reductions: Sequence[str],
    position: int | None,
) -> Spec:
    spec = list(spec_of(dims, rule, splits, mesh.shape, is_output=position is None))
    for axis, (split, _) in enumerate(splits):
        if split == CARRY:
            passes = position is None or position in takes[axis]
            spec[axis] = Partial(reductions[axis]) if passes else Replicate()
    return tuple(spec)


def _placed(
    dims: Dims, spec: Spec | None, axis: int, sizes: Sequence[int], parts: int
) -> Split | None:
    """The split that the input's own placement is; WHOLE, or None (cuts across factors)."""
    placement = None if spec is None else spec[axis]
    if not isinstance(placement, Shard):
        return WHOLE
    return split_of(dims, placement, sizes, parts)


def _choose_axis(
    rule: OpRule,
    operands: Sequence[OperandState],
    specs: Sequence[Spec | None],
    placed: Sequence[Split | None],
    in_place: Sequence[Split | None],
    sizes: Sequence[int],
    axis: int,
    mesh: Mesh,
    out_bytes: int,
    whole: bool,
    sparse: bool,
    deferred: bool,
) -> tuple[Split, tuple[int, ...], str]:
    parts = mesh.shape[axis]
    if parts == 1:
        return WHOLE, (), "sum"
    placements = [Replicate() if s is None else s[axis] for s in specs]
    best: _Candidate = (_replicate_cost(operands, placements), 2, 0.0, WHOLE, (), "sum")
    if whole:
        if best[0] == _INFINITE:
            raise ImmovableInputError(axis)
        return WHOLE, (), "sum"
    for group, reduction in _carry_groups(rule, placements):
        relabelled = set(group) <= set(rule.monotone)
        cost, forced = _carry_cost(operands, placements, group, out_bytes, deferred or relabelled)
        best = min(
            best, (cost, 3 if forced else 1, 0.0, (CARRY, PLAIN), group, reduction), key=_order
        )
    found = [s for s in (*in_place, *placed) if s is not None and s[0] >= 0]
    for split in dict.fromkeys(found or _scatters(rule, placements, specs, sizes, axis, mesh)):
        if not may_split(rule, split, sizes, parts):
            continue
        factor = split[0]
        cost, settled = _split_cost(rule, operands, placements, in_place, sizes, split, parts)
        if sparse and factor in rule.reduce:
            cost += 2.0 * out_bytes * _left(rule, sizes)
        # Among equals, leave in place what is largest; a reduced factor loses ties.
        rank = -settled + (0.5 if factor in rule.reduce else 0.0)
        best = min(best, (cost, 0, rank, split, (), "sum"), key=_order)
    if best[0] == float("inf"):
        raise ImmovableInputError(axis)
    return best[3], best[4], best[5]


def _scatters(
    rule: OpRule,
    placements: Sequence[Placement],
    specs: Sequence[Spec | None],
    sizes: Sequence[int],
    axis: int,
    mesh: Mesh,
) -> list[Split]:
    """The factors over which the Partials that meet here could be scattered along an axis, evenly:
    also where axes behind it split them already."""
    partial = [i for i, p in enumerate(placements) if isinstance(p, Partial)]
    if len(partial) < 2 or any(set(partial) <= set(group) for group in rule.linear):
        return []
    shared = (*(rule.inputs[i] for i in partial), *rule.outputs)
    return [
        (f, PLAIN)
        for f in rule.splittable
        if sizes[f] % (mesh.shape[axis] * _split_behind(f, rule, specs, axis, mesh)) == 0
        and all(has_factor(dims, f) for dims in shared)
    ]


def _split_behind(
    factor: int, rule: OpRule, specs: Sequence[Spec | None], axis: int, mesh: Mesh
) -> int:
    """In how many parts the inputs of an op come that split a factor along axes behind this one."""

    def is_split(behind: int) -> bool:
        for dims, spec in zip(rule.inputs, specs, strict=True):
            placement = None if spec is None else spec[behind]
            if isinstance(placement, Shard) and has_factor(dims[placement.dim :][:1], factor):
                return True
        return False

    return math.prod(
        mesh.shape[behind] for behind in range(axis + 1, mesh.num_axes) if is_split(behind)
    )


def _left(rule: OpRule, sizes: Sequence[int]) -> float:
    """The share of the outputs that one rank makes, with factors of these sizes: 1/2 if one of
    them is half as long as that of the rule."""
    factors = {f for dims in rule.outputs for dim in dims for f in dim}
    return math.prod(sizes[f] / rule.sizes[f] for f in factors)


_Candidate = tuple[float, int, float, Split, tuple[int, ...], str]
"""(cost, kind, rank) to compare; what is split, the inputs that stay Partial and by what reduction.
"""


def _order(candidate: _Candidate) -> tuple[float, int, float]:
    return candidate[:3]


_INFINITE = float("inf")


def _replicate_cost(operands: Sequence[OperandState], placements: Sequence[Placement]) -> float:
    cost = 0.0
    for operand, placement in zip(operands, placements, strict=True):
        if isinstance(placement, Shard):
            cost += operand.moving(operand.num_bytes)
        elif isinstance(placement, Partial):
            cost += operand.moving(2.0 * operand.num_bytes)
    return cost


def _carry_groups(
    rule: OpRule, placements: Sequence[Placement]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """(inputs, reduction) for each group through which the Partials here may pass."""
    for group in rule.linear:
        if any(placements[i] is Partial("sum") for i in group):
            yield group, "sum"
    for i in rule.monotone:
        placement = placements[i]
        if isinstance(placement, Partial):
            yield (i,), placement.op


def _carry_cost(
    operands: Sequence[OperandState],
    placements: Sequence[Placement],
    group: tuple[int, ...],
    out_bytes: int,
    deferred: bool,
) -> tuple[float, bool]:
    """(bytes moved, whether what comes out is to be reduced for this op's sake)."""
    cost = 0.0
    reduced = not deferred
    for i, (operand, placement) in enumerate(zip(operands, placements, strict=True)):
        if isinstance(placement, Partial) and i in group:
            continue
        if isinstance(placement, Replicate):
            if i in group and operand.pinned:
                return _INFINITE, True
            # Adding a replicated tensor to a Partial one makes it Partial too, and its sum is to
            # be paid later. That is worth it for a bias, which is small beside the result.
            reduced |= i in group and not operand.zero and operand.num_bytes >= out_bytes
        elif isinstance(placement, Shard):
            cost += operand.moving(operand.num_bytes)
            reduced |= i in group
        else:
            cost += operand.moving(2.0 * operand.num_bytes)
    reduced |= cost > 0
    return cost + (2.0 * out_bytes if reduced else 0.0), reduced


def _split_cost(
    rule: OpRule,
    operands: Sequence[OperandState],
    placements: Sequence[Placement],
    in_place: Sequence[Split | None],
    sizes: Sequence[int],
    split: Split,
    parts: int,
) -> tuple[float, float]:
    """(bytes moved, bytes already in place) if the axis makes `split`."""
    cost = settled = 0.0
    for i, operand in enumerate(operands):
        placement = placements[i]
        want = shard_of(rule.inputs[i], split, sizes, parts)
        if want is None:
            assert not has_factor(rule.inputs[i], split[0])
            if isinstance(placement, Shard):
                cost += operand.moving(operand.num_bytes)
            elif isinstance(placement, Partial):
                cost += operand.moving(2.0 * operand.num_bytes)
        elif in_place[i] == split and (placement is want or len(rule.inputs[i][want.dim]) == 1):
            settled += operand.num_bytes
        elif operand.pinned:
            return _INFINITE, 0.0
        elif isinstance(placement, Shard):
            cost += operand.moving(operand.num_bytes / parts)
        elif isinstance(placement, Partial):
            cost += operand.moving(operand.num_bytes)
    return cost, settled
