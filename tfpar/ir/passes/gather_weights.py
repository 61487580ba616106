"""Gathers of weights that ranks store in parts (ZeRO-3: Rajbhandari et al., 2020, §5.3; FSDP).

    %w = ReadVariableOp(%kernel)            %w = ReadVariableOp(%kernel)
    %y = MatMul(%x, %w)           becomes   %part = Identity(%w)           waits for its turn
    ...                                     %whole = Identity(%part)       gathered
    %dx = MatMul(%dy, %w)                   %y = MatMul(%x, %whole)
                                            ...
                                            %part_ = Identity(%w)          waits for its turn
                                            %whole_ = Identity(%part_)     gathered
                                            %dx = MatMul(%dy, %whole_)

Both have specs that a plan fixes: the first is as the weight is stored, the second is whole, so
that propagation puts a gather between them. What is made of a gathered weight alone (a reshaped
kernel) is made again for the backward pass, too: nothing of a weight's whole is kept from one pass
to the other.

In microbatches all of that is done for each. Their gradients are added up, and a part of the sum is
all that a rank stores of it if each is scattered before: an Identity between gradient and update
says so.

    %g = MatMul(%x, %dy)                    %g = MatMul(%x, %dy)
    AssignSub(%kernel, %g)        becomes   %own = Identity(%g)            scattered
                                            AssignSub(%kernel, %own)

A gather has nothing to wait for, and all would run when the step begins. So weights are gathered in
groups, a block of layers each, in the order in which a pass needs them: those of a group wait until
the group before begins to compute, which hides them. The last group of the forward pass is as a
rule the first of the backward pass: needed again at once, it is gathered once for both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from tfpar.ir.gathered_weights import (
    GATHERED,
    MARK,
    SCATTERED,
    STORED_PART,
    WEIGHT,
    find_gathers,
    is_scattered_gradient,
)
from tfpar.ir.graph import DType, Graph, Op, Tensor
from tfpar.ir.order import sort_topologically
from tfpar.ir.passes.copy import copy_graph
from tfpar.ir.passes.rereads import find_fed
from tfpar.ir.passes.trim import clone_op
from tfpar.ir.roles import BACKWARD, FORWARD, UPDATE, Roles
from tfpar.ir.traits import SIZES

_AGAIN = "/made_again"  # ends those of what is made of a weight for the backward pass

_BACKWARD_SCOPE = "gradient_tape/"


def gather_weights(
    graph: Graph,
    groups: Sequence[Collection[str]],
    kept: Collection[str],
    scattered: Mapping[str, Tensor],
    roles: Roles,
) -> Graph:
    """Return a copy of `graph` that gathers some of its weights, and none otherwise.

    Args:
        groups: the names of these weights; those of one group are gathered at the same time.
        kept: those whose whole the backward pass reads as the forward pass had it.
        scattered: gradients that are scattered for each microbatch, by weight.
        roles: of `graph`.
    """
    found, copies = copy_graph(graph)
    phase = {copies[op]: roles.phase[op] for op in graph.ops}
    _remove_gathers(found)
    writer = _Writer(found, phase)
    stored = {
        name: writer.stored(variable.handle)
        for variable in found.variables
        if (name := variable.name) in {n for group in groups for n in group}
    }
    values = [[v for n in group for v in stored.get(n, ())] for group in groups]
    writer.write(values, {v for n in kept for v in stored.get(n, ())})
    for name, gradient in scattered.items():
        if is_scattered_gradient(gradient.op):
            (gradient,) = gradient.op.inputs
        writer.scatter(name, copies[gradient.op].outputs[gradient.index])
    found.ops = sort_topologically(found.ops)
    return found


def _remove_gathers(graph: Graph) -> None:
    """Have all ops read weights as they are stored."""
    stored = {tensor: tensor.op.inputs[0].op.inputs[0] for tensor in find_gathers(graph)}
    gone = {op for tensor in stored for op in (tensor.op, tensor.op.inputs[0].op)}
    for op in filter(is_scattered_gradient, graph.ops):
        stored[op.outputs[0]] = op.inputs[0]
        gone.add(op)
    graph.ops = [op for op in graph.ops if op not in gone]
    for op in graph.ops:
        op.inputs = [stored.get(t, t) for t in op.inputs]


class _Writer:
    """Writes gathers into a graph, in place.

    Args:
        phase: of every op.
    """

    def __init__(self, graph: Graph, phase: Mapping[Op, int]) -> None:
        self._graph, self._phase = graph, phase
        self._readers = graph.consumers()
        self._position = {op: i for i, op in enumerate(graph.ops)}
        self._fed = find_fed(graph)
        self._added: list[Op] = []

    def stored(self, handle: Tensor) -> list[Tensor]:
        """Return what ops compute with of a weight as it is stored: reads of it, or casts of
        these."""
        found = []
        for op in self._readers.get(handle, ()):
            if op.type == "ReadVariableOp":
                (read,) = op.outputs
                casts = [o.outputs[0] for o in self._readers.get(read, ()) if o.type == "Cast"]
                found += [v for v in (read, *casts) if any(map(self._takes_whole, self._of(v)))]
        return found

    def write(self, groups: Sequence[Sequence[Tensor]], kept: Collection[Tensor]) -> None:
        """Gather the stored values of each group, for each pass but those that are `kept`."""
        made = {v: self._made_of(v) for values in groups for v in values}
        forward = self._in_turn(groups, made, FORWARD)
        backward = self._in_turn(groups, made, BACKWARD)
        at_once: set[Tensor] = set()
        if forward and backward and {*backward[0].values} <= {*forward[-1].values}:
            at_once.update(backward[0].values)
        whole: dict[Tensor, Tensor] = {}
        for use in forward:
            whole.update((v, self._gather(v, use.begins_after)) for v in use.values)
        again: dict[Tensor, Tensor] = {}
        for use in backward:
            for value in use.values:
                if value not in whole or not (value in kept or value in at_once):
                    again[value] = self._gather(value, use.begins_after, backward=True)
        of_weights = {op for ops in made.values() for op in ops if self._phase[op] == FORWARD}
        self._rewire(whole, again, of_weights)

    def scatter(self, weight: str, gradient: Tensor) -> None:
        """Have the update, if there is one, read a gradient through an Identity."""
        own = Op(f"{gradient.op.name}/{gradient.index}/{SCATTERED}", "Identity", [gradient])
        own.attrs = {"T": DType(gradient.dtype), MARK: SCATTERED, WEIGHT: weight}
        tensor = own.add_output(gradient.shape, gradient.dtype)
        readers = [op for op in self._of(gradient) if self._phase[op] == UPDATE]
        for op in readers:
            op.inputs = [tensor if t is gradient else t for t in op.inputs]
        self._graph.ops += [own] if readers else []

    def _of(self, tensor: Tensor) -> Sequence[Op]:
        return self._readers.get(tensor, ())

    def _takes_whole(self, op: Op) -> bool:
        """Whether an op that reads a stored weight computes a part of a pass with it."""
        return self._phase[op] != UPDATE and op.type not in SIZES and op.type != "Cast"

    def _made_of(self, value: Tensor) -> list[Op]:
        """Return the ops that make something of a weight and of nothing that the step is fed."""
        found: dict[Op, None] = {}
        reached = [value]
        while reached:
            tensor = reached.pop()
            for op in self._of(tensor):
                if op not in found and op not in self._fed and self._takes_whole(op):
                    found[op] = None
                    reached += op.outputs
        return [*found]

    def _in_turn(
        self, groups: Sequence[Sequence[Tensor]], made: Mapping[Tensor, Sequence[Op]], phase: int
    ) -> list[_Use]:
        """Return the uses that one pass makes of groups, in the order in which it does."""
        found: list[tuple[Op, list[Tensor]]] = []
        for values in groups:
            users = {
                value: [
                    op
                    for tensor in (value, *(t for o in made[value] for t in o.outputs))
                    for op in self._of(tensor)
                    if self._phase[op] == phase and self._takes_whole(op) and op not in made[value]
                ]
                for value in values
            }
            own = [value for value in values if users[value]]
            if own:
                first = min((op for v in own for op in users[v]), key=self._position.__getitem__)
                found.append((first, own))
        found.sort(key=lambda use: self._position[use[0]])
        begins = [self._arrival(op) for op, _ in found]
        # Each waits for the one before; the first of the backward pass for what it needs itself.
        waits = [begins[0] if phase == BACKWARD else None, *begins] if found else []
        return [_Use(values, wait) for (_, values), wait in zip(found, waits, strict=False)]

    def _arrival(self, op: Op) -> Op | None:
        """Return the last op that `op` reads the data or the gradient of."""
        sources = [t.op for t in op.inputs if t.op in self._fed]
        return max(sources, key=self._position.__getitem__, default=None)

    def _gather(self, value: Tensor, after: Op | None, backward: bool = False) -> Tensor:
        """Return the whole of a stored value, gathered once `after` has run."""
        name = f"{_BACKWARD_SCOPE if backward else ''}{value.op.name}"
        control = [] if after is None else [after]
        part = Op(f"{name}/{STORED_PART}", "Identity", [value], control=control)
        whole = Op(f"{name}/{GATHERED}", "Identity", [part.add_output(value.shape, value.dtype)])
        for op, mark in ((part, STORED_PART), (whole, GATHERED)):
            op.attrs = {"T": DType(value.dtype), MARK: mark}
            self._added.append(op)
        return whole.add_output(value.shape, value.dtype)

    def _rewire(
        self,
        whole: Mapping[Tensor, Tensor],
        again: Mapping[Tensor, Tensor],
        made: Collection[Op],
    ) -> None:
        """Have the forward pass read `whole`, and the backward pass `again` where it is there.

        Args:
            made: what the forward pass makes of weights, which the backward pass makes anew.
        """
        clones: dict[Op, Op] = {}

        def reread(tensor: Tensor) -> Tensor:
            if tensor in again:
                return again[tensor]
            if tensor.op not in made:
                return whole.get(tensor, tensor)
            if tensor.op not in clones:
                inputs = [reread(t) for t in tensor.op.inputs]
                if inputs == [whole.get(t, t) for t in tensor.op.inputs]:
                    return tensor
                clone = clones[tensor.op] = clone_op(tensor.op, inputs)
                clone.name = f"{_BACKWARD_SCOPE}{tensor.op.name}{_AGAIN}"
                self._added.append(clone)
            return clones[tensor.op].outputs[tensor.index]

        graph = self._graph
        new = {op: list(op.inputs) for op in graph.ops}
        for op in graph.ops:
            if not self._takes_whole(op):
                continue
            if self._phase[op] == FORWARD:
                new[op] = [whole.get(t, t) for t in op.inputs]
            else:
                new[op] = [reread(t) for t in op.inputs]
        for op, inputs in new.items():
            op.inputs = inputs
        graph.ops += self._added


@dataclasses.dataclass(frozen=True, eq=False)
class _Use:
    """The use that one pass makes of a group of weights.

    Attributes:
        values: what it reads of them as they are stored.
        begins_after: what has run when its turn to be gathered comes; None: nothing.
    """

    values: Sequence[Tensor]
    begins_after: Op | None
