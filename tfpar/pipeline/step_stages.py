"""Assignment of the backward pass and the update to stages, once the forward ops have theirs.

    forward     as given; what is not given reads no data, and goes where it is read first
    variable    the stage that writes it, or else that reads it first, owns it
    update      where what it updates lies, slots with their weight
    backward    where what it reads of the forward pass lies: where that was made or sent to

A gradient only ever goes to earlier stages, from its loss to the owner of a weight: an op of the
backward pass lies between the stages of what reads it and of the gradients that it reads. Within
that it runs as late as the tensors of the forward pass allow that it reads. Only what reads no more
than it gives (a cast, a sum that is spread again) goes on to where it is read, so that the least is
sent.

A weight that several stages read, such as a tied embedding, is owned by the first of them. The
gradients of all its uses are added up there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.roles import BACKWARD, FORWARD, Roles
from tfpar.ir.traits import CONSTANTS, REFERENCES, SIZES, VARIABLE_READS
from tfpar.pipeline.owners import update_stages, variable_owners
from tfpar.spec import PlanError


def assignable(graph: Graph, roles: Roles) -> list[Op]:
    """Return the forward ops that stages are to be given for, in graph order.

    They depend on what the step is fed; or on weights, and the backward pass reads what comes of
    them (penalties). All else goes where it is read: constants, the values of variables, random
    draws and their seeds, what the update reads of the weights.
    """
    consumers = graph.consumers()
    weights = {v.handle for v in graph.variables if v.trainable}
    fed: set[Op] = {t.op for t in graph.inputs}
    weighted: set[Op] = set()
    leading: set[Op] = set()
    for op in graph.ops:
        if any(t.op in fed for t in op.inputs):
            fed.add(op)
        if any(t.op in weighted or t in weights for t in op.inputs):
            weighted.add(op)
    for op in reversed(graph.ops):
        readers = (r for t in op.outputs for r in consumers.get(t, ()))
        if roles.phase[op] == BACKWARD or any(r in leading for r in readers):
            leading.add(op)
    return [
        op
        for op in graph.ops
        if roles.phase[op] == FORWARD
        and op.inputs
        and op.type != "ReadVariableOp"
        and (op in fed or (op in weighted and op in leading))
    ]


def stages_of_step(
    graph: Graph,
    roles: Roles,
    forward_stage: Mapping[Op, int],
    lying: Mapping[str, int] | None = None,
) -> dict[Op, int]:
    """Return the stage of every op of a training step.

    Args:
        forward_stage: of the ops that `assignable` lists, others may be left out. An op comes in no
            earlier stage than what it reads.
        lying: by name, the stages in which variables stay, if they can: those that the step was
            given stages by.

    Raises:
        PlanError: an op that `assignable` lists has no stage; a variable is written, or one op
            updates variables, in several stages.
    """
    missing = [op.name for op in assignable(graph, roles) if op not in forward_stage]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise PlanError(f"No stage is given for {missing[0]!r}{more} of the forward pass.")
    consumers = graph.consumers()
    stage = dict(forward_stage)

    def where_read(ops: Sequence[Op], which: Callable[[Iterable[int]], int]) -> None:
        for op in reversed(ops):
            if op not in stage:
                readers = (r for t in op.outputs for r in consumers.get(t, ()))
                stages = [stage[r] for r in readers if r in stage]
                if stages:
                    stage[op] = which(stages)

    forward = [op for op in graph.ops if roles.phase[op] == FORWARD]
    where_read(forward, min)
    owners = variable_owners(graph, roles.phase, stage, lying)
    for handle, owner in owners.items():
        for op in (handle.op, *consumers.get(handle, ())):
            if roles.phase[op] == FORWARD and op not in forward_stage:
                stage[op] = owner
    for op in _smaller_of_weights(graph, forward):
        read = [stage[t.op] for t in op.inputs if t.op in stage]
        if op not in forward_stage and read:  # else no stage reads these weights forward
            stage[op] = max(read)
    where_read(forward, min)
    stage.update(update_stages(graph, roles.phase, stage, owners))
    backward = _Backward(graph, roles, consumers, stage)
    stage.update(backward.stages())
    where_read(backward.ops, max)
    late = {*backward.ops}
    for op in graph.ops:  # what reads gradients and belongs to no weight
        stages = [stage[t.op] for t in op.inputs if t.op in late and t.op in stage]
        if stages:
            late.add(op)
            stage.setdefault(op, min(stages))
    where_read(graph.ops, max)
    return {op: stage.get(op, 0) for op in graph.ops}


def _smaller_of_weights(graph: Graph, ops: Iterable[Op]) -> Iterator[Op]:
    """Those of `ops` that read weights or what comes of these alone, and give no more than that:
    the penalties for them, whose gradients do not need their values."""
    weights = {v.handle for v in graph.variables if v.trainable}
    constant = constant_ops(graph)
    values: set[Tensor] = set()
    for op in ops:
        read = [t for t in op.inputs if t.op not in constant]
        if op.type == "ReadVariableOp" and read[0] in weights:
            values.update(op.outputs)
        elif read and all(t in values for t in read):
            if sum(t.num_bytes for t in op.outputs) <= sum(t.num_bytes for t in {*read}):
                values.update(op.outputs)
                yield op


_MOST_TOGETHER = 8
"""Largest number of ops of the backward pass that move to where they are read together."""


class _Backward:
    """The backward pass, between the forward pass and the update, whose stages are known."""

    def __init__(
        self,
        graph: Graph,
        roles: Roles,
        consumers: Mapping[Tensor, Sequence[Op]],
        stage: Mapping[Op, int],
    ) -> None:
        constant = constant_ops(graph)
        self.ops = [
            op
            for op in graph.ops
            if roles.phase[op] == BACKWARD and op not in constant and op not in stage
        ]
        self.members = frozenset(self.ops)
        self.constant = constant
        self.phase = roles.phase
        self.deferrable = roles.deferrable
        self.consumers = consumers
        self.stage = dict(stage)
        self.last = max(stage.values(), default=0)
        self._variables = self._stages_with_variable(graph)

    def stages(self) -> dict[Op, int]:
        """Of its ops that read of the forward pass, or gradients that come of what does.

        Scalars bind nothing: a global norm may be read by what it is made of. The rest (what the
        backward pass begins with, what works on scalars) can run where it is read.
        """
        least: dict[Op, int] = {}
        for op in reversed(self.ops):
            tensors = [t for t in op.outputs if t.shape != ()]
            readers = (r for t in tensors for r in self.consumers.get(t, ()))
            read = (least.get(r, self.stage.get(r, 0)) for r in readers)
            least[op] = max(read, default=0)
        for op in self.ops:
            gradients = [self.stage[t.op] for t in op.inputs if self._is_gradient(t)]
            kept = self._kept(op)
            if gradients or kept:
                most = min(gradients, default=self.last)
                self.stage[op] = self._latest(kept, least[op], most)
        placed = [op for op in self.ops if op in self.stage]
        while any([self._hand_on(op) for op in reversed(placed)]):  # what one moves lets others
            pass
        return {op: self.stage[op] for op in placed}

    def _is_gradient(self, tensor: Tensor) -> bool:
        return tensor.shape != () and tensor.op in self.members and tensor.op in self.stage

    def _latest(self, kept: Sequence[Tensor], least: int, most: int) -> int:
        """The last stage from `least` to `most` that has all of `kept`; or near where the last of
        them was made."""
        if not kept:
            return most
        able = [s for s in set.intersection(*map(self._having, kept)) if least <= s <= most]
        return max(able, default=min(max(least, *(self.stage[t.op] for t in kept)), most))

    def _hand_on(self, op: Op) -> bool:
        """Move an op to where it is read, if no more is sent then; or the gradient of a weight with
        ops whose results it alone reads, if less is: that may be a product, and then a sum."""
        own = self.stage[op]
        readers = (r for t in op.outputs for r in self.consumers.get(t, ()))
        goal = max((self.stage[r] for r in readers if r in self.stage), default=own)
        group = [op]
        while goal < own and all(goal in self._having(t) for t in self._kept(group[-1])):
            made = self._sent_of(group, goal)
            read, then = (self._sent_to(group, stage) for stage in (own, goal))
            if then < read + made or (then <= made and len(group) == 1):
                self.stage.update(dict.fromkeys(group, goal))
                return True
            source = self._only_for(group) if self.deferrable.issuperset(op.outputs) else None
            if source is None or len(group) == _MOST_TOGETHER:
                return False
            group.append(source)
        return False

    def _only_for(self, group: Sequence[Op]) -> Op | None:
        """An op of their stage that works for these alone."""
        for source in (t.op for op in group for t in op.inputs if self._is_gradient(t)):
            readers = (r for t in source.outputs for r in self.consumers.get(t, ()))
            if source not in group and self.stage[source] == self.stage[group[0]]:
                if all(r in group for r in readers):
                    return source
        return None

    def _sent_of(self, group: Sequence[Op], target: int) -> float:
        """Bytes that others read of these ops in that stage."""
        made = (t for op in group for t in op.outputs)
        return sum(_sent_bytes(t) for t in made if self._is_read_in(t, target, group))

    def _sent_to(self, group: Sequence[Op], target: int) -> float:
        """Bytes of the gradients that these ops alone read, if they are in that stage."""
        read = {t for op in group for t in op.inputs if t.op not in group and self._is_gradient(t)}
        sent = (t for t in read if self.stage[t.op] != target)
        return sum(_sent_bytes(t) for t in sent if not self._is_read_in(t, target, group))

    def _is_read_in(self, tensor: Tensor, stage: int, besides: Sequence[Op]) -> bool:
        """Whether others read `tensor` in that stage."""
        readers = self.consumers.get(tensor, ())
        return any(r not in besides and self.stage.get(r) == stage for r in readers)

    def _kept(self, op: Op) -> list[Tensor]:
        """The tensors of the forward pass whose values an op reads.

        What has no stage yet binds nothing: only the backward pass reads it, such as what is fed
        for a loss that contains gradients.
        """
        if op.type in SIZES:
            return []
        made = (t for t in op.inputs if t.op not in self.members and t.op not in self.constant)
        return [t for t in made if t.op in self.stage]

    def _having(self, tensor: Tensor) -> set[int]:
        """The stages that have `tensor` once the forward pass is done."""
        handle = _variable_read(tensor)
        if handle in self._variables:
            return self._variables[handle]
        return {self.stage[tensor.op]} | self._reading(tensor)

    def _reading(self, tensor: Tensor) -> set[int]:
        readers = self.consumers.get(tensor, ())
        return {self.stage[r] for r in readers if self.phase[r] == FORWARD and r in self.stage}

    def _stages_with_variable(self, graph: Graph) -> dict[Tensor, set[int]]:
        """By handle, the stages whose forward pass has the variable's value."""
        found = {}
        for variable in graph.variables:
            found[variable.handle] = stages = self._reading(variable.handle)
            for op in self.consumers.get(variable.handle, ()):
                if op.type in VARIABLE_READS:
                    stages.update(*(self._reading(t) for t in op.outputs))
        return found


def can_be_sent(tensor: Tensor) -> bool:
    """Whether stages can send it each other: numbers, of known shape."""
    return tensor.is_static and tensor.dtype != "string" and tensor.dtype not in REFERENCES


def _sent_bytes(tensor: Tensor) -> float:
    """Infinite for what cannot be sent, such as a list."""
    return tensor.num_bytes if can_be_sent(tensor) else math.inf


def _variable_read(tensor: Tensor) -> Tensor:
    """The handle of the variable whose value `tensor` is; else itself."""
    return tensor.op.inputs[0] if tensor.op.type == "ReadVariableOp" else tensor


def constant_ops(graph: Graph) -> frozenset[Op]:
    """Return the ops that depend on constants alone."""
    found: set[Op] = set()
    for op in graph.ops:
        reads = all(t.op in found for t in op.inputs) and not op.stateful
        if op.type in CONSTANTS or (op.inputs and reads):
            found.add(op)
    return frozenset(found)
