"""Packing groups: tensors of a step that are moved at the same time, if they are moved. They are
the same for all plans.

Between the places where a step has one thing to do there are branches, side by side: queries, keys
and values are made of one tensor, and their gradients are added up to that of one tensor.

          +--> MatMul(w1) --> +b1 --+                  +--> MatMul(w1) --+
    x ----+--> MatMul(w2) --> +b2 --+--> ...    ... ---+--> MatMul(w2) --+--> AddN
          +--> MatMul(w3) --> +b3 --+                  +--> MatMul(w3) --+

No branch waits for another. So collectives of one kind and group on several of them are packed when
the step is written (`compile.local.packing`), and so are those of the weights that the branches
read. (Weights that wait for their turn are packed by turn: `ir.passes.gather_weights`.) The place
of a tensor on a branch is relative to what is near it, so that it is the same in a block of layers
that is repeated and in one that stands for all of them (`planning.folding.fold`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from tfpar.ir.gathered_weights import find_gathers, find_turn
from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.traits import ADDITIONS, CONVOLUTIONS, MATRIX_PRODUCTS, REDUCTIONS

_SUMMING = MATRIX_PRODUCTS | CONVOLUTIONS | REDUCTIONS
"""Ops that collectives follow or precede: no two of one kind are on a branch without one of these
between them."""


class _Place(NamedTuple):
    """Place of a tensor among parallel branches.

    Attributes:
        fork: what the branches come from or lead to.
        part: which of its branches: those of one layer, where it has some in several.
        step: how many products and reductions lie between.
        branch: which one.
    """

    fork: Tensor | Op
    part: int
    step: int
    branch: Tensor | Op

    @property
    def group(self) -> tuple[Hashable, ...]:
        """Key of the tensors that have the same place on parallel branches."""
        return self[:3]

    def past(self, op: Op) -> _Place:
        """Return the place on the other side of `op`."""
        return self._replace(step=self.step + (op.type in _SUMMING))


def moved_together(graph: Graph, deferrable: Collection[Tensor]) -> dict[Tensor, int]:
    """Number the packing group of each tensor, those that are moved together; a tensor that moves
    alone is absent.

    Args:
        deferrable: what only the update waits for (`Roles.deferrable`). It goes its own ways.
    """
    consumers = graph.consumers()
    aside = _for_deferrable(graph, deferrable, consumers)
    readers = {
        tensor: [r for r in consumers.get(tensor, ()) if not (r.outputs and aside >= {*r.outputs})]
        for op in graph.ops
        for tensor in op.outputs
        if tensor not in aside
    }
    data = _data(graph)
    found: dict[Tensor, Hashable] = _side_by_side(_from_one_tensor(graph, data, readers))
    weights = {t: ("read", group) for t, group in _read_by(found, graph, data).items()}
    sums = _side_by_side(_added_up(graph, data, readers))
    turns = {tensor: ("gathered", find_turn(tensor.op)) for tensor in find_gathers(graph)}
    found = {**sums, **found, **weights, **turns}
    number: dict[Hashable, int] = {}
    return {tensor: number.setdefault(group, len(number)) for tensor, group in found.items()}


def _side_by_side(places: Mapping[Tensor, Sequence[_Place]]) -> dict[Tensor, Hashable]:
    """The innermost group of each tensor that has several branches."""
    branches: dict[Hashable, set[Hashable]] = {}
    for place in itertools.chain.from_iterable(places.values()):
        branches.setdefault(place.group, set()).add(place.branch)
    found: dict[Tensor, Hashable] = {}
    for tensor, own in places.items():
        for place in own:  # outer ones first
            if len(branches[place.group]) > 1:
                found[tensor] = place.group
    return found


def _for_deferrable(
    graph: Graph, deferrable: Collection[Tensor], consumers: Mapping[Tensor, Sequence[Op]]
) -> set[Tensor]:
    """Return the deferrable tensors, and those made for them alone: a weight's gradient before it
    is summed up."""
    found = set(deferrable)
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            readers = consumers.get(tensor, ())
            if len(readers) == 1 and readers[0].outputs and found.issuperset(readers[0].outputs):
                found.add(tensor)
    return found


def _data(graph: Graph) -> set[Tensor]:
    """Return the tensors that depend on the inputs of the step."""
    found = set(graph.inputs)
    for op in graph.ops:
        if any(t in found for t in op.inputs):
            found.update(op.outputs)
    return found


def _from_one_tensor(
    graph: Graph, data: Collection[Tensor], readers: Mapping[Tensor, Sequence[Op]]
) -> dict[Tensor, list[_Place]]:
    """Find the places of tensors that are made of one tensor and of weights, until branches meet:
    outer places first.

    Branches that begin after some have met are others: the keys of the next layer, where all layers
    look at the same.
    """
    found: dict[Tensor, list[_Place]] = {}
    part: dict[Tensor | Op, int] = {}
    for op in graph.ops:
        inputs = {t for t in op.inputs if t in data and t in readers}
        if len(inputs) > 1:
            for place in {place for t in inputs for place in found.get(t, ())}:
                part[place.fork] = place.part + 1
        elif inputs:
            (tensor,) = inputs
            places = [place.past(op) for place in found.get(tensor, ())]
            if len(readers[tensor]) > 1 and op in readers[tensor]:
                places.append(_Place(tensor, part.get(tensor, 0), 0, op).past(op))
            if places:
                found.update((made, places) for made in op.outputs if made in readers)
    return found


def _added_up(
    graph: Graph, data: Collection[Tensor], readers: Mapping[Tensor, Sequence[Op]]
) -> dict[Tensor, list[_Place]]:
    """Find the places of tensors that are read on the way to one sum and nowhere else: the term of
    it that each leads to.

    Terms are apart that are made before and after another sum that several ops go on from: each
    layer has its own.
    """
    found: dict[Tensor, list[_Place]] = {}
    part: dict[Op, int] = {}
    sums = 0
    for op in graph.ops:
        part[op] = sums
        sums += op.type in ADDITIONS and any(len(readers.get(t, ())) > 1 for t in op.outputs)
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            if tensor not in data or len(readers.get(tensor, ())) != 1:
                continue
            (reader,) = readers[tensor]
            if reader.type in ADDITIONS:
                found[tensor] = [_Place(reader, part[op], 0, tensor)]
            elif any(made in found for made in reader.outputs):
                places = next(found[made] for made in reader.outputs if made in found)
                found[tensor] = [place.past(reader) for place in places]
    return found


def _read_by(
    groups: Mapping[Tensor, Hashable], graph: Graph, data: Collection[Tensor]
) -> dict[Tensor, Hashable]:
    """The values of weights, by the group of what is first made of them."""
    found: dict[Tensor, Hashable] = {}
    for op in graph.ops:
        for made in op.outputs:
            todo = [t for t in op.inputs if t not in data] if made in groups else []
            while todo:
                tensor = todo.pop()
                if tensor not in found and tensor.op.inputs:
                    found[tensor] = groups[made]
                    todo += tensor.op.inputs
    return found
