"""Redundant splits: weights that are split and then gathered for an op that all ranks compute in
full."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from tfpar.ir.graph import Op, Tensor, Variable
from tfpar.ir.roles import FORWARD
from tfpar.propagation.partitioned_graph import Decision
from tfpar.spec import Mesh, Replicate, Shard, Spec, format_spec


def find_redundant_splits(
    decisions: Mapping[Op, Decision],
    specs: Mapping[Tensor, Spec | None],
    phase: Mapping[Op, int],
    weight_of: Mapping[Tensor, Variable],
    judged: Collection[Variable],
) -> Iterator[tuple[Variable, int, Op]]:
    """(weight, mesh axis, op): along the axis a split weight is gathered, and no work is shared.

    Args:
        phase: of every op; the forward pass is judged, since what it shares the backward pass does.
        weight_of: of the tensors that hold a weight's value, see `fragments.weight_of_values`.
        judged: the weights whose splits must share work.
    """
    for op, decision in decisions.items():
        if phase[op] != FORWARD:
            continue
        for tensor, need in zip(op.inputs, decision.strategy.in_specs, strict=True):
            variable = weight_of.get(tensor)
            if variable is None or variable not in judged:
                continue
            if any(t in weight_of for t in op.outputs):  # it is relabelled: not used yet
                continue
            have = specs.get(tensor)
            for axis, placement in enumerate(have or ()):
                if (
                    isinstance(placement, Shard)
                    and isinstance(need[axis], Replicate)
                    and decision.strategy.splits[axis][0] < 0
                ):
                    yield variable, axis, op


def why_idle(variable: Variable, spec: Spec, axis: int, op: Op, mesh: Mesh) -> str:
    """Explain to users why splitting `variable` as `spec` is of no use."""
    return (
        f"{variable.name} is {format_spec(spec)}, but {op.type} "
        f"{op.name!r} runs whole along {mesh.axis_names[axis]!r}: the weight "
        f"would be gathered and no work shared"
    )
