"""Sums over several stages: each stage adds up its own operands first, and sends one tensor.

    sum in stage 0                sends           becomes                     sends
    AddN(a2, b2, c1, d1, e0)      a2 b2 c1 d1     AddN(f2, g1, e0)            f2 g1
                                                  f2 = AddN(a2, b2), g1 = AddN(c1, d1)

(the number is the stage that an operand is made in). So the gradients of a tensor that several
stages read, such as what a decoder attends to, or of a tied weight, are sent as often as the tensor
is: once for each of these stages. So are norms and checks over all gradients, which pack a scalar
for each weight and reduce them.

The stage of the sum adds up its own operands apart, too: what is summed over microbatches or ranks
is summed in each stage and then sent, and the sum of these comes last.

Each part goes straight to the stage of the sum. A chain, in which each stage adds its part to that
of the next, would send as many bytes; but there a stage waits for others that it reads nothing of
(two towers), and the gradient of a tied weight, which is sent once a step, would wait in each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from tfpar.ir.constants import Constants
from tfpar.ir.graph import DType, Graph, Op, Tensor
from tfpar.ir.passes.trim import clone_op
from tfpar.ir.traits import ADDITIONS, CONSTANTS, REARRANGED, REFERENCES

_REDUCTIONS = frozenset({"Sum", "Prod", "Max", "Min", "All", "Any"})
"""Reductions of what was reduced in parts already give the same."""

_HANDED_ON = REARRANGED | {"Cast", "Sum"}
"""Ops that may be between an operand and its sum, and move to the operand's stage: a sum, as in the
gradients of what is spread, if it is over nothing."""


def sum_by_stage(graph: Graph, stage: Mapping[Op, int]) -> dict[Op, int]:
    """Let stages add up their own operands of each sum where that sends less, in place.

    Args:
        stage: of every op.

    Returns:
        the stage of every op that there is now. With one stage nothing changes.
    """
    found = dict(stage)
    if len({*found.values()}) > 1:
        work = _Rewriting(graph, found)
        work.additions()
        work.reductions()
        graph.ops = [*work.ops()]
    return {op: found[op] for op in graph.ops}


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An operand of a sum.

    Attributes:
        tensor: what the sum reads.
        views: what it passes on its way from `stage`, the last first; they lie where they are read.
        stage: where it comes from.
    """

    tensor: Tensor
    views: tuple[Op, ...]
    stage: int


_Read = tuple[Tensor, int]
"""A tensor, and a stage that reads it."""


class _Rewriting:
    def __init__(self, graph: Graph, stage: dict[Op, int]) -> None:
        self.graph = graph
        self.stage = stage
        self.readers = graph.consumers()
        self.outputs = set(graph.outputs)
        self.ordered = {op for each in graph.ops for op in each.control}
        self.added: dict[Op, list[Op]] = {}
        self.removed: set[Op] = set()

    def ops(self) -> Iterator[Op]:
        """Those of the graph, without what was removed and with what was added before each."""
        for op in self.graph.ops:
            yield from self.added.get(op, ())
            if op not in self.removed:
                yield op

    def _is_free(self, op: Op) -> bool:
        """Whether one op alone reads what this one gives, and nothing waits for it or it for
        anything: another may take its place."""
        if op.control or op in self.ordered or len(op.outputs) != 1:
            return False
        (out,) = op.outputs
        return len(self.readers.get(out, ())) == 1 and out not in self.outputs

    # --- additions -------------------------------------------------------------------

    def additions(self) -> None:
        """Of trees of sums of one shape, whose inner results nothing else reads."""
        plain = {op for op in self.graph.ops if _adds_alike(op)}
        inner = {
            op for op in plain if self._is_free(op) and self.readers[op.outputs[0]][0] in plain
        }
        for op in self.graph.ops:
            if op in plain and op not in inner:
                self._add(op, *_tree(op, inner))

    def _add(self, root: Op, leaves: Sequence[Tensor], inner: Sequence[Op]) -> None:
        stage, own = self.stage, self.stage[root]
        tree = {root, *inner}
        operands = [self._operand(t) for t in leaves]
        between = {view for operand in operands for view in operand.views}
        reads = [(t, stage[op]) for op in (*tree, *between) for t in op.inputs]
        before = self._sent(reads, tree | between)
        parts: dict[int, set[_Operand]] = {}
        for operand in operands:
            if operand.stage != own and not self._is_sent_anyway(operand, own, tree):
                parts.setdefault(operand.stage, set()).add(operand)
        joined = {o for part in parts.values() if len(part) > 1 for o in part}
        single = [o for o in operands if o not in joined]
        reads = [(o.tensor, own) for o in single]
        reads += [(t, stage[view]) for o in single for view in o.views for t in view.inputs]
        total = root.outputs[0].num_bytes
        after = self._sent(reads, tree | between) + [total] * len({o.stage for o in joined})
        if (sum(after), len(after)) < (sum(before), len(before)):
            for operand in joined:
                stage.update(dict.fromkeys(operand.views, operand.stage))
            self.removed.update(inner)
            self._add_up(root, operands, joined)
        else:
            for op in tree:
                self._add_up(op, [self._operand(t) for t in op.inputs], ())

    def _add_up(self, op: Op, operands: Sequence[_Operand], joined: Collection[_Operand]) -> None:
        """Let `op` add up these operands; before, each stage adds up those of `joined`, and the
        stage of `op` its own."""
        own = self.stage[op]
        terms: dict[_Operand | int, list[Tensor]] = {}
        for operand in operands:
            at = operand.stage
            key = at if at == own or operand in joined else operand
            terms.setdefault(key, []).append(operand.tensor)
        if len(terms) == 1 and isinstance(only := next(iter(terms)), int):
            self.stage[op] = only
            _become_sum(op, terms[only])
            return
        found: list[Tensor] = []
        for key, tensors in terms.items():
            if isinstance(key, int) and len(tensors) > 1:
                part = _like(op, key)
                part.add_output(op.outputs[0].shape, op.outputs[0].dtype)
                _become_sum(part, tensors)
                found.append(self._placed(part, key, op))
            else:
                found += tensors
        _become_sum(op, found)

    def _operand(self, tensor: Tensor) -> _Operand:
        at = self.stage[tensor.op]
        views: list[Op] = []
        source = tensor
        while self.stage[source.op] == at and self._may_move(source.op):
            views.append(source.op)
            source = source.op.inputs[0]
        found = self.stage[source.op]
        return _Operand(tensor, () if found == at else tuple(views), found)

    def _may_move(self, op: Op) -> bool:
        """Whether it hands on all of what it reads, to one reader."""
        if op.type not in _HANDED_ON or not self._is_free(op):
            return False
        source, *rest = op.inputs
        same = source.is_static and source.num_elements == op.outputs[0].num_elements
        return same and all(t.op.type in CONSTANTS for t in rest)

    def _is_sent_anyway(self, operand: _Operand, target: int, tree: Collection[Op]) -> bool:
        """Whether others in `target` read what the operand is sent as."""
        sent = operand.views[-1].inputs[0] if operand.views else operand.tensor
        return self._is_read(sent, target, {*tree, *operand.views})

    def _is_read(self, tensor: Tensor, target: int, besides: Collection[Op]) -> bool:
        """Whether others than `besides` read a tensor in that stage."""
        readers = self.readers.get(tensor, ())
        return any(self.stage[r] == target and r not in besides for r in readers)

    def _sent(self, reads: Iterable[_Read], by: Collection[Op]) -> list[int]:
        """Bytes of each tensor that is sent for these reads alone, which are those of `by`.

        Constants are not sent: each stage has its own.
        """
        return [
            tensor.num_bytes
            for tensor, target in dict.fromkeys(reads)
            if self.stage[tensor.op] != target
            and tensor.op.type not in CONSTANTS
            and not self._is_read(tensor, target, by)
        ]

    # --- reductions ------------------------------------------------------------------

    def reductions(self) -> None:
        """Of what is packed for them alone."""
        constants = Constants(self.graph)
        for op in self.graph.ops:
            if op.type in _REDUCTIONS and _reduces_pack(op, constants):
                pack = op.inputs[0].op
                if self._is_free(pack) and op.inputs[1].op.type in CONSTANTS:
                    self._reduce(op, pack)

    def _reduce(self, op: Op, pack: Op) -> None:
        here = self.stage[pack]
        parts: dict[int, list[Tensor]] = {}
        for tensor in pack.inputs:
            s = self.stage[tensor.op]
            if s != here and not self._is_read(tensor, here, {pack}):
                parts.setdefault(s, []).append(tensor)
        parts = {s: tensors for s, tensors in parts.items() if len({*tensors}) > 1}
        if not parts:
            return
        joined = {t for tensors in parts.values() for t in tensors}
        terms = [t for t in pack.inputs if t not in joined]
        for s, tensors in parts.items():
            own = _like(pack, s)
            own.add_output(pack.outputs[0].shape, pack.outputs[0].dtype)
            _become_pack(own, tensors)
            part = clone_op(op, [self._placed(own, s, op), op.inputs[1]])
            part.name = f"{op.name}/stage_{s}"
            terms.append(self._placed(part, s, op))
        _become_pack(pack, terms)
        self.removed.add(pack)  # from its place: it comes after the parts
        self._placed(pack, here, op)

    def _placed(self, op: Op, stage: int, before: Op) -> Tensor:
        self.stage[op] = stage
        self.added.setdefault(before, []).append(op)
        return op.outputs[0]


def _adds_alike(op: Op) -> bool:
    """Whether an op adds up tensors of one shape, none of which is spread."""
    if op.type not in ADDITIONS:
        return False
    (out,) = op.outputs
    return (
        out.is_static
        and out.dtype not in REFERENCES
        and all(t.shape == out.shape for t in op.inputs)
    )


def _tree(root: Op, inner: Collection[Op]) -> tuple[list[Tensor], list[Op]]:
    """Return the terms that a sum adds up, through the sums that lead to it alone, and these
    sums."""
    leaves: list[Tensor] = []
    passed: list[Op] = []
    stack = [*reversed(root.inputs)]
    while stack:
        tensor = stack.pop()
        if tensor.op in inner:
            passed.append(tensor.op)
            stack += reversed(tensor.op.inputs)
        else:
            leaves.append(tensor)
    return leaves, passed


def _reduces_pack(op: Op, constants: Constants) -> bool:
    """Whether an op reduces what a Pack puts side by side, and nothing else."""
    pack = op.inputs[0].op
    if pack.type != "Pack" or op.attrs.get("keep_dims") or not op.inputs[0].is_static:
        return False
    dims = constants.value(op.inputs[1])
    rank = len(op.inputs[0].shape)
    return dims is not None and [int(d) % rank for d in dims.reshape(-1)] == [
        int(pack.attrs.get("axis", 0)) % rank
    ]


def _like(op: Op, stage: int) -> Op:
    """An op of that type for one stage, without inputs and outputs."""
    return Op(f"{op.name}/stage_{stage}", op.type, attrs=dict(op.attrs))


def _become_sum(op: Op, terms: Sequence[Tensor]) -> None:
    op.inputs = list(terms)
    if op.type == "AddN" or len(terms) != 2:
        op.type, op.attrs = "AddN", {"N": len(terms), "T": DType(op.outputs[0].dtype)}


def _become_pack(op: Op, tensors: Sequence[Tensor]) -> None:
    op.inputs = list(tensors)
    op.attrs = {**op.attrs, "N": len(tensors)}
    (out,) = op.outputs
    axis = int(op.attrs.get("axis", 0)) % len(out.shape)
    out.shape = (*out.shape[:axis], len(tensors), *out.shape[axis + 1 :])
