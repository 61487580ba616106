"""Roles of the ops and tensors of a step: forward, backward or update, and whose time they take."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Collection, Mapping, Sequence

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.kernels import InKernel, Kernels, kernels_of, source
from tfpar.ir.packing_groups import moved_together
from tfpar.ir.traits import (
    ASSIGNMENTS,
    CONSTANTS,
    FREE,
    LOOPS,
    NEW_LISTS,
    ON_HOST,
    REARRANGED,
    SIZES,
    TO_THE_UPDATE,
    VARIABLE_READS,
)

FORWARD, BACKWARD, UPDATE = range(3)
PHASES = ("forward", "backward", "update")


class When(enum.Enum):
    """When a collective runs, beside the ops of its rank."""

    BETWEEN = "between ops: those that read its result wait for it"
    BESIDE = "beside the backward pass, packed with others: only the update waits for it"
    AFTER = "in the update, packed with others"


NARROW = frozenset({"half", "float16", "bfloat16"})
"""The dtypes of 16 bits."""

COMPRESSIONS = {"fp16": "float16", "bf16": "bfloat16"}
"""The dtypes in which gradients may travel, by the names that users give them."""

_BACKWARD_SCOPES = ("gradient_tape/", "gradients/")


@dataclasses.dataclass(frozen=True, eq=False)
class Roles:
    """The roles of a graph, the same for all its plans.

    Attributes:
        phase: FORWARD, BACKWARD or UPDATE of each op.
        deferrable: tensors of the backward pass that only the update waits for: the gradients
            of weights and what is merely added up to them. Reducing them can run beside the
            rest of the backward pass. What some gradient is computed from is none of them.
        activations: tensors of the forward pass that the backward pass reads, themselves or by
            another name (reshaped).
        times: how many ops of the model each op stands for (see `planning.folding.fold`); 1 if
            absent.
        wire_dtypes: the dtype in which collectives carry a tensor, if it is not its own: that of
            what it was cast from (see `find_widened_tensors`), or that to which the user has
            gradients compressed.
        kernels: what XLA computes in one kernel; None: it does not compile the step.
        graph: whose roles these are.
    """

    phase: Mapping[Op, int]
    deferrable: frozenset[Tensor]
    activations: frozenset[Tensor]
    times: Mapping[Op, int] = dataclasses.field(default_factory=dict)
    wire_dtypes: Mapping[Tensor, str] = dataclasses.field(default_factory=dict)
    kernels: Kernels | None = None
    graph: Graph = dataclasses.field(default_factory=Graph)

    @classmethod
    def of(
        cls,
        graph: Graph,
        gradients: Collection[Tensor] = (),
        times: Mapping[Op, int] | None = None,
        compression: str | None = None,
        jit_compile: bool = False,
    ) -> Roles:
        """Read the roles off the graph.

        Args:
            gradients: the tensors that enter the optimizer; what they lead to is the update.
                Without any, it is what follows from the backward pass without leading back to
                it.
            compression: the dtype in which what is deferrable travels (see `COMPRESSIONS`).
            jit_compile: XLA compiles the step.
        """
        marked = set(gradients)
        for op in graph.ops:  # an optimizer may begin by adding up the rows of a sparse gradient
            if op.type == "UnsortedSegmentSum" and op.inputs[0] in marked:
                marked.add(op.outputs[0])
        consumers = graph.consumers()
        leads = _leading_to_gradients(graph, marked, consumers)
        decay = _decaying_weights(graph, leads, consumers)
        phase: dict[Op, int] = {}
        empty = _filled_forward(graph, consumers)
        updated: set[Tensor] = set()  # handles of what the update has written: slots, weights
        for op in graph.ops:
            own = BACKWARD if op.name.startswith(_BACKWARD_SCOPES) else FORWARD
            for tensor in op.inputs:
                own = max(own, phase[tensor.op])
            if op in empty:
                own = FORWARD
            if op in decay:
                own = UPDATE
            elif op in leads:  # a gradient that is the optimizer's may go on in the backward pass
                own = min(own, BACKWARD)
            elif any(t in marked or t in updated for t in op.inputs):
                own = UPDATE
            # A tape adds up the gradients of a weight's uses outside of its scope.
            elif own == BACKWARD and not marked and op.type != "AddN":
                own = UPDATE
            if own == UPDATE and op.type not in VARIABLE_READS:
                updated.update(t for t in op.inputs if t.dtype == "resource")
            phase[op] = own
        ends = marked | set(graph.outputs)
        deferrable: set[Tensor] = set()
        activations: set[Tensor] = set()
        for op in reversed(graph.ops):
            for tensor in op.outputs:
                readers = consumers.get(tensor, ())
                if phase[op] == FORWARD and ON_HOST not in op.attrs:
                    if any(_keeps(r, tensor, phase, activations) for r in readers):
                        activations.add(tensor)
                elif phase[op] == BACKWARD and (readers or tensor in ends):
                    if all(_defers(r, phase, deferrable) for r in readers):
                        deferrable.add(tensor)
        wire_dtypes = find_widened_tensors(graph)
        if compression is not None:
            for tensor in deferrable:
                if tensor.dtype in ("float32", "float64"):
                    wire_dtypes.setdefault(tensor, compression)
        return cls(
            phase,
            frozenset(deferrable),
            frozenset(activations),
            times or {},
            wire_dtypes,
            kernels_of(graph, phase, marked) if jit_compile else None,
            graph,
        )

    @property
    def jit_compile(self) -> bool:
        """Whether XLA compiles the step."""
        return self.kernels is not None

    def in_kernel(self, op: Op) -> InKernel | None:
        """Return the part that an op has in a kernel; None if it is not fused with others."""
        return None if self.kernels is None else self.kernels.get(op)

    def stays_within(self, tensor: Tensor) -> bool:
        """Whether no memory holds `tensor`, as who reads it computes it in the same kernel."""
        if not self.kernels:
            return False
        made = self.kernels.get(source(tensor).op)
        return made is not None and not made.ends

    @functools.cached_property
    def together(self) -> Mapping[Tensor, int]:
        """The number of the tensors that each is moved together with, if there are any; see
        `ir.packing_groups`."""
        return moved_together(self.graph, self.deferrable)

    def when(self, tensor: Tensor) -> When:
        """When the collectives run that `tensor` is moved or reduced by."""
        if tensor in self.deferrable:
            return When.BESIDE
        return When.AFTER if self.phase[tensor.op] == UPDATE else When.BETWEEN


def changes_weights(graph: Graph) -> bool:
    """Whether the step writes to a trainable variable."""
    weights = {v.handle for v in graph.variables if v.trainable}
    return any(t in weights for op in graph.ops if op.type not in VARIABLE_READS for t in op.inputs)


def trains(graph: Graph, roles: Roles) -> bool:
    """Whether the step computes gradients and writes to a trainable variable."""
    return BACKWARD in roles.phase.values() and changes_weights(graph)


def find_widened_tensors(graph: Graph) -> dict[Tensor, str]:
    """Find the tensors whose values come from one of 16 bits, by a Cast, with its dtype.

    A collective moves no more of them than that: it is as if it stood before the Cast, where the
    tensor is narrower. (Propagation itself puts those of a tensor that is cast to 16 bits after
    that Cast, which runs on whatever part of it a rank has.)
    """
    found: dict[Tensor, str] = {}
    for op in graph.ops:
        if op.type == "Cast" and op.inputs[0].dtype in NARROW:
            if op.outputs[0].dtype in ("float32", "float64"):
                found[op.outputs[0]] = op.inputs[0].dtype
        elif op.type in REARRANGED and op.inputs[0] in found:
            found[op.outputs[0]] = found[op.inputs[0]]
    return found


def _filled_forward(graph: Graph, consumers: Mapping[Tensor, Sequence[Op]]) -> set[Op]:
    """The ops that loops of the forward pass begin with for the backward pass, whose names they
    bear: the empty lists that they fill, and the constants from which TensorFlow 1 counts their
    rounds."""
    found = set()
    for op in graph.ops:
        readers = (r for t in op.outputs for r in consumers.get(t, ()))
        forward = (r for r in readers if not r.name.startswith(_BACKWARD_SCOPES))
        if op.type in NEW_LISTS and any(forward):
            found.add(op)
        elif op.type in CONSTANTS and any(r.type in LOOPS for r in forward):
            found.add(op)
    return found


def _keeps(op: Op, tensor: Tensor, phase: Mapping[Op, int], activations: set[Tensor]) -> bool:
    """Whether `tensor` must be stored for the backward pass because `op` reads it."""
    if op.type in SIZES or ON_HOST in op.attrs:
        return False
    if phase[op] == BACKWARD:
        return True
    return op.type in FREE and any(
        t in activations
        for i, t in enumerate(op.outputs)
        if op.type != "IdentityN" or op.inputs[i] is tensor
    )


def _decaying_weights(
    graph: Graph, leads: Collection[Op], consumers: Mapping[Tensor, Sequence[Op]]
) -> set[Op]:
    """Find the ops by which an optimizer changes weights without gradients (decoupled weight
    decay).

    Assignments of weights that depend on nothing that the step is fed, and what only they read.
    """
    weights = {v.handle for v in graph.variables if v.trainable}
    fed: set[Op] = {t.op for t in graph.inputs}
    for op in graph.ops:
        if any(t.op in fed for t in op.inputs):
            fed.add(op)
    found: set[Op] = set()
    ends = set(graph.outputs)
    for op in reversed(graph.ops):
        if op in fed or op in leads:
            continue
        if op.type in ASSIGNMENTS and op.inputs[0] in weights:
            found.add(op)
        elif op.inputs and op.outputs and not any(t in ends for t in op.outputs):
            readers = [r for t in op.outputs for r in consumers.get(t, ())]
            if readers and all(r in found for r in readers):
                found.add(op)
    return found


def _leading_to_gradients(
    graph: Graph, marked: Collection[Tensor], consumers: Mapping[Tensor, Sequence[Op]]
) -> set[Op]:
    """The ops that gradients depend on, with the ones that make them.

    Without marks it is the backward pass by the names of its ops, and all that these depend on.
    """
    ends = {t.op for t in marked}
    found: set[Op] = set()
    for op in reversed(graph.ops):
        is_end = op in ends if marked else op.name.startswith(_BACKWARD_SCOPES)
        if is_end or any(r in found for t in op.outputs for r in consumers.get(t, ())):
            found.add(op)
    return found


def _defers(op: Op, phase: Mapping[Op, int], deferrable: set[Tensor]) -> bool:
    """Whether `op` may get what it reads late: it is the update, or hands on to it."""
    if phase[op] == UPDATE:
        return True
    return op.type in TO_THE_UPDATE and all(t in deferrable for t in op.outputs)
