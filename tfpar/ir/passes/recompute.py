"""Recompute: what the backward pass reads again is computed again (TAP §IV-H).

A block is a set of forward ops. Tensors made inside of it that the backward pass reads are no
longer kept: the ops that lead to them are cloned, and the backward pass reads the clones. What
enters and what leaves the block stays kept. The clones wait for the gradient that arrives at the
block: each tensor that enters them passes an Identity with a control edge from the op that makes
that gradient, so that they neither run early nor are the very ops of the forward pass, which
TensorFlow would run once.

Of a block that is recomputed selectively (Korthikanti et al., 2022, §5: attention, norms,
activations), products with weights stay kept (`find_costly`): they take nearly all the time, and
what they give is a small part of what is stored.

Only what depends on the step's inputs is cloned. So random numbers are never drawn again, nothing
with an effect runs twice (a moving mean is updated once), and weights are read once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from tfpar.ir.graph import DType, Graph, Op, Tensor
from tfpar.ir.passes.rereads import find_arrival, find_fed, is_reread, rewire_backward
from tfpar.ir.passes.trim import clone_op
from tfpar.ir.roles import Roles
from tfpar.ir.traits import CONVOLUTIONS, MATRIX_PRODUCTS, REFERENCES, SOURCES

_AGAIN = "/recompute"  # ends the names of clones


def is_recomputed(op: Op) -> bool:
    """Whether `op` computes again what the step has computed before."""
    return op.name.endswith(_AGAIN)


def recompute(
    graph: Graph, blocks: Sequence[Collection[Op]], roles: Roles, kept: Collection[Op] = ()
) -> Graph:
    """Return a copy of `graph` whose backward pass recomputes what it reads of `blocks`.

    Args:
        blocks: forward ops of `graph`; no two share one. One that the backward pass reads nothing
            of, or whose gradient depends on nothing that follows it, stays as it is.
        roles: of `graph`.
        kept: ops of the blocks whose results stay kept.
    """
    fed = find_fed(graph)
    readers = graph.consumers()
    position = {op: i for i, op in enumerate(graph.ops)}
    instead: dict[Tensor, Tensor] = {}
    added: dict[Op, list[Op]] = {}
    for ops in blocks:
        block = _Block.of(graph, ops, kept, roles, fed, readers, position)
        if block is not None:
            written, made = block.write()
            added.setdefault(block.before, []).extend(written)
            instead.update((t, made[t]) for t in block.reread)
    return rewire_backward(graph, added, instead, roles)


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """Recomputation of one block.

    Attributes:
        ops: what is cloned, in graph order.
        reread: the tensors whose clones the backward pass reads.
        after: the op that makes the gradient which arrives at the block.
        before: the first op of the backward pass that needs a clone.
        fed: see `rereads.find_fed`.
    """

    ops: Sequence[Op]
    reread: frozenset[Tensor]
    after: Op
    before: Op
    fed: frozenset[Op]

    @classmethod
    def of(
        cls,
        graph: Graph,
        ops: Collection[Op],
        kept: Collection[Op],
        roles: Roles,
        fed: frozenset[Op],
        readers: Mapping[Tensor, Sequence[Op]],
        position: Mapping[Op, int],
    ) -> _Block | None:
        inside = frozenset(ops)
        ordered = sorted(inside, key=position.__getitem__)
        returned = set(graph.outputs)
        cloneable = {op for op in ordered if op in fed and op not in kept and _can_run_again(op)}
        reread = frozenset(
            t
            for op in ordered
            if op in cloneable
            for t in op.outputs
            if t not in returned and is_reread(readers.get(t, ()), inside, roles)
        )
        again = {t.op for t in reread}
        for op in reversed(ordered):
            if op in again:
                again.update(t.op for t in op.inputs if t.op in cloneable and t.op not in again)
        if not again:
            return None
        arrival = find_arrival(graph.ops[position[ordered[0]] :], inside & fed, reread, roles)
        if arrival is None:
            return None
        return cls([op for op in ordered if op in again], reread, *arrival, fed)

    def write(self) -> tuple[list[Op], dict[Tensor, Tensor]]:
        """The clones with what they enter through, and by original the tensors they make."""
        written: list[Op] = []
        made: dict[Tensor, Tensor] = {}
        entered: dict[Tensor, Tensor] = {}
        for op in self.ops:
            name = f"gradient_tape/{op.name}{_AGAIN}"  # among the backward ops of its layer
            inputs = []
            for i, tensor in enumerate(op.inputs):
                if tensor not in made and tensor.op in self.fed and tensor not in entered:
                    entry = Op(f"{name}/enter_{i}", "Identity", [tensor], control=[self.after])
                    entry.attrs["T"] = DType(tensor.dtype)
                    entered[tensor] = entry.add_output(tensor.shape, tensor.dtype)
                    written.append(entry)
                inputs.append(made.get(tensor) or entered.get(tensor, tensor))
            clone = clone_op(op, inputs)
            clone.name = name
            written.append(clone)
            made.update(zip(op.outputs, clone.outputs, strict=True))
        return written, made


def find_costly(ops: Collection[Op], fed: Collection[Op]) -> set[Op]:
    """Find the products with weights, and convolutions, of some ops.

    Args:
        fed: the ops that depend on what the step is fed (`rereads.find_fed`).
    """
    return {
        op
        for op in ops
        if op.type in MATRIX_PRODUCTS | CONVOLUTIONS and any(t.op not in fed for t in op.inputs)
    }


def _can_run_again(op: Op) -> bool:
    """Whether running `op` twice gives the same, and changes nothing."""
    return (
        not op.stateful
        and op.type not in SOURCES
        and not any(t.dtype in REFERENCES for t in (*op.inputs, *op.outputs))
    )
