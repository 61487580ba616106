"""Growth of the axis splits among which ops choose (Rhino §4.3.3: candidate strategies).

They are grown from ops that compute much or read a weight. Take `y = x @ w` and `z = relu(y)`.
Each factor of the product is split at maximal stride: its rows, its columns, what it sums over.
Split by rows it leaves `y` as S(0), so `relu` may split its first dim, which moves nothing; by
columns, its second. From `z` it goes on to the ops that read it, and backwards to those that made
`x` in the same way, until nothing new is reached.

Splits of other strides come about only so, where they save communication: behind a reshape that
merges dims, such as those of a fused projection of Q, K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tfpar.cost.op_compute import flops
from tfpar.ir.graph import Op, Tensor
from tfpar.ir.traits import FREE
from tfpar.planning.deadline import Deadline
from tfpar.planning.intra_op.rhino.axis_strategy import AxisSplit, axis_strategy_of, carrying
from tfpar.propagation.decide import may_carry, may_split
from tfpar.propagation.deferral import is_product
from tfpar.propagation.factors import split_of
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.rules.rule import PLAIN, Dims
from tfpar.spec import Partial, Placement, Shard

_SUMMED = frozenset({"half", "bfloat16", "float32", "float64", "int32", "int64"})
"""The dtypes of which a Partial can be kept."""


def is_compute_intensive(op: Op, prepared: PreparedGraph) -> bool:
    """Whether `op` is one of the few that most of a model's time goes to (§4.3.1)."""
    rule = prepared.rules[op]
    return is_product(rule) or flops(op, rule) > 0


class Growth:
    """The axis splits of a graph's ops along one mesh axis.

    Args:
        decided: the ops that a planner decides.
        sizes_of: the sizes of an op's factors, as the axes before left them.
        parts: ranks along the axis.
        deadline: where growing ends if the search is given up.

    Attributes:
        axis_splits: by op; not splitting is none of them.
        placements: as what each tensor is read or made with some split, without Replicate.
    """

    def __init__(
        self,
        prepared: PreparedGraph,
        decided: Iterable[Op],
        sizes_of: Callable[[Op], Sequence[int]],
        parts: int,
        deadline: Deadline,
    ) -> None:
        self.deadline = deadline
        self.prepared = prepared
        self.sizes_of = sizes_of
        self.parts = parts
        self.axis_splits: dict[Op, dict[AxisSplit, None]] = {op: {} for op in decided}
        self.placements: dict[Tensor, dict[Placement, None]] = {}
        self._waiting: list[tuple[Tensor, Placement]] = []

    def begin(self) -> None:
        """Add the beginnings: see the module."""
        weights = self.prepared.weights
        for op in self.axis_splits:
            reads_weight = op.type not in FREE and any(t in weights for t in op.inputs)
            if reads_weight or is_compute_intensive(op, self.prepared):
                sizes = self.sizes_of(op)
                for factor in self.prepared.rules[op].splittable:
                    if sizes[factor] >= self.parts:
                        self.add(op, AxisSplit((factor, PLAIN)))

    def place(self, tensor: Tensor, placement: Placement) -> None:
        """Add a placement that `tensor` may have."""
        seen = self.placements.setdefault(tensor, {})
        if isinstance(placement, Shard | Partial) and placement not in seen:
            seen[placement] = None
            self._waiting.append((tensor, placement))

    def add(self, op: Op, axis_split: AxisSplit) -> None:
        """Add a split of `op`, if it can run so, and the placements that its operands have then."""
        known, rule = self.axis_splits.get(op), self.prepared.rules[op]
        if known is None or axis_split in known:
            return
        sizes = self.sizes_of(op)
        if axis_split.split[0] >= 0:
            if not may_split(rule, axis_split.split, sizes, self.parts):
                return
        elif not may_carry(rule, axis_split.group, axis_split.reduction):
            return
        strategy = axis_strategy_of(rule, axis_split, sizes, self.parts)
        operands = [
            *zip(op.inputs, strategy.needs, strict=True),
            *zip(op.outputs, strategy.made, strict=True),
        ]
        if any(isinstance(p, Partial) and t.dtype not in _SUMMED for t, p in operands):
            return
        known[axis_split] = None
        for tensor, placement in operands:
            self.place(tensor, placement)

    def grow(self) -> None:
        """Add all that can be reached from what there is without communication."""
        while self._waiting:
            self.deadline.check()
            tensor, placement = self._waiting.pop()
            if isinstance(placement, Shard):
                self._grow_along(
                    tensor.op, self.prepared.rules[tensor.op].outputs[tensor.index], placement
                )
            for op in self.prepared.consumers.get(tensor, ()):
                rule = self.prepared.rules[op]
                for position, read in enumerate(op.inputs):
                    if read is not tensor:
                        continue
                    if isinstance(placement, Shard):
                        self._grow_along(op, rule.inputs[position], placement)
                    elif isinstance(placement, Partial):
                        for group in (*rule.linear, *((i,) for i in rule.monotone)):
                            if position in group:
                                self.add(op, carrying(group, placement.op))

    def _grow_along(self, op: Op, dims: Dims, placement: Shard) -> None:
        if op in self.axis_splits:
            split = split_of(dims, placement, self.sizes_of(op), self.parts)
            if split is not None:
                self.add(op, AxisSplit(split))
