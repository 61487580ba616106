"""A collective of a step, as a value: what moves how much over which mesh axes, and for whom.

`PartitionedGraph.communications()` lists those of a step. Whoever counts, prices or shows what a
step moves walks that list, so that all see the same: what the rewriter emits.
"""

from __future__ import annotations

from typing import NamedTuple

from tfpar.ir.graph import Op, Tensor
from tfpar.ir.roles import Roles, When
from tfpar.propagation.reshard import ReshardStep
from tfpar.spec import Mesh, replicated_spec


class Communication(NamedTuple):
    """One collective of a step.

    Attributes:
        step: what it does, along which mesh axes.
        num_bytes: its payload on one rank, as in `reshard.step_bytes`.
        op: whose result it moves, or whose work it is part of. The roles of `op` say in which
            phase it runs, and how many of the model it stands for (`ir.roles`).
        tensor: what it moves, an output of `op`; None if it is part of the work of `op`.
    """

    step: ReshardStep
    num_bytes: int
    op: Op
    tensor: Tensor | None = None

    @property
    def kind(self) -> str:
        return self.step.kind

    @property
    def axes(self) -> tuple[int, ...]:
        return self.step.axes

    def when(self, roles: Roles) -> When:
        """Whether ops wait for it; if they do not, with which others it is packed."""
        return When.BETWEEN if self.tensor is None else roles.when(self.tensor)

    @classmethod
    def of_shared(cls, op: Op, mesh: Mesh) -> Communication:
        """Return the broadcast of what the first rank computes for all."""
        whole = replicated_spec(mesh.num_axes)
        step = ReshardStep("broadcast", tuple(range(mesh.num_axes)), whole, whole)
        return cls(step, sum(t.num_bytes for t in op.outputs), op)
