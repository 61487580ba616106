"""What part each op and tensor of a step plays: forward, backward or update; on whose time."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from tfpar.ir.graph import Graph, Op, Tensor

FORWARD, BACKWARD, UPDATE = range(3)
PHASES = ("forward", "backward", "update")

_BACKWARD_SCOPES = ("gradient_tape/", "gradients/")


@dataclasses.dataclass(frozen=True, eq=False)
class Roles:
    """The roles of a graph, the same for all its plans.

    Attributes:
        phase: FORWARD, BACKWARD or UPDATE of each op.
        deferrable: tensors of the backward pass that only the update waits for; reducing them
            can run beside the rest of it (the gradients of weights).
        kept: tensors of the forward pass that the backward pass reads.
        times: how many ops of the model each op stands for (see `search.fold`); 1 if absent.
    """

    phase: Mapping[Op, int]
    deferrable: frozenset[Tensor]
    kept: frozenset[Tensor]
    times: Mapping[Op, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, graph: Graph, gradients: Collection[Tensor] = (), times: Mapping[Op, int] | None = None
    ) -> Roles:
        """Read the roles off the graph.

        Args:
            gradients: the tensors that enter the optimizer; what they lead to is the update.
                Without any, assignments that the backward pass leads to are.
        """
        marked = set(gradients)
        phase: dict[Op, int] = {}
        for op in graph.ops:
            own = BACKWARD if op.name.startswith(_BACKWARD_SCOPES) else FORWARD
            for tensor in op.inputs:
                own = max(own, UPDATE if tensor in marked else phase[tensor.op])
            if own == BACKWARD and not marked and op.type.startswith(("Assign", "ResourceApply")):
                own = UPDATE
            phase[op] = own
        consumers = graph.consumers()
        ends = marked | set(graph.outputs)
        deferrable: set[Tensor] = set()
        kept: set[Tensor] = set()
        for op in reversed(graph.ops):
            for tensor in op.outputs:
                readers = consumers.get(tensor, ())
                if phase[op] == FORWARD:
                    if any(phase[r] == BACKWARD for r in readers):
                        kept.add(tensor)
                elif phase[op] == BACKWARD and (readers or tensor in ends):
                    if all(_defers(r, phase, deferrable) for r in readers):
                        deferrable.add(tensor)
        return cls(phase, frozenset(deferrable), frozenset(kept), times or {})


def _defers(op: Op, phase: Mapping[Op, int], deferrable: set[Tensor]) -> bool:
    return phase[op] == UPDATE or bool(op.outputs) and all(t in deferrable for t in op.outputs)
