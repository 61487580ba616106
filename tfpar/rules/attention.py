"""Attention on blocks of its scores (`ir.attention`), over several ranks.

    TfparAttention           b h x d, b h x d, b h x e -> b h x e, b h x 1, b h x 1
    TfparAttentionGradient   b h x d, ..., b h x e     -> b h x d, b h x d, b h x e

Batch dims split, and so do heads: then a rank computes what it has alone, and positions that were
split are exchanged for heads before it (Ulysses: Jacobs et al., 2023, §3). The positions of queries
and keys split together: then keys and values pass from rank to rank, each of which adds up what it
finds of its own queries (ring attention: Liu et al., 2023, §3). Queries of other positions than the
keys (cross-attention) split alone.

Either way the op runs as `rules.attention_blocks` builds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.ir.attention import ATTENTION, ATTENTION_GRADIENT
from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.attention_blocks import expand_attention, expand_gradient
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule


@rule(ATTENTION)
def _attention(op: Op, constants: Constants) -> OpRule:
    q, k, v, *operands = op.inputs
    sides = _Notation(q, k)
    left = [sides.rows(), sides.columns(), sides.columns(), *map(sides.operand, operands)]
    right = [sides.rows()] * 3
    return make_rule(
        op,
        f"{', '.join(left)} -> {', '.join(right)}",
        expand={sides.shared: expand_attention} if sides.shared else {},
        blocks={sides.shared: 1} if sides.shared else {},
        stands_for=expand_attention,
    )


@rule(ATTENTION_GRADIENT)
def _attention_gradient(op: Op, constants: Constants) -> OpRule:
    q, k, v, *_ = op.inputs
    sides = _Notation(q, k)
    rows, columns = sides.rows(), sides.columns()
    left = [rows, columns, columns, *[rows] * 4, *map(sides.operand, op.inputs[7:])]
    return make_rule(
        op,
        f"{', '.join(left)} -> {rows}, {columns}, {columns}",
        reduce={} if sides.shared else {"t": "sum"},
        expand={sides.shared: expand_gradient} if sides.shared else {},
        blocks={sides.shared: 1} if sides.shared else {},
        stands_for=expand_gradient,
    )


class _Notation:
    """Notation of the operands of an attention.

    Attributes:
        shared: the factor of rows and columns, if they may be the same positions.
    """

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self._num_batch_dims = len(q.shape) - 2
        rows, columns = q.shape[-2], k.shape[-2]
        self.shared = "x" if rows == columns else ""
        self._row, self._column = (self.shared or name for name in ("t", "s"))

    def rows(self) -> str:
        return self._named(self._batch_names(), self._row)

    def columns(self) -> str:
        return self._named(self._batch_names(), self._column)

    def operand(self, tensor: Tensor) -> str:
        *_, rows, columns = tensor.shape
        # Of a mask with both, a rank has all columns of its rows.
        last = self._row if rows > 1 else ".", self._column if rows == 1 < columns else "."
        return " ".join([*self._batch_names(), *last])

    def _batch_names(self) -> Sequence[str]:
        return [f"b{d}" for d in range(self._num_batch_dims)]

    def _named(self, batch: Sequence[str], positions: str) -> str:
        return " ".join([*batch, positions, "."])
