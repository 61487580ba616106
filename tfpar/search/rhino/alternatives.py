"""What a plan would cost with a weight laid otherwise: why it is laid as it is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from tfpar.cost.evaluate import evaluate
from tfpar.ir.graph import Variable
from tfpar.plans import Alternative
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import Anchors
from tfpar.search.deadline import Deadline
from tfpar.search.folded_model import FoldedModel
from tfpar.search.problem import Problem
from tfpar.spec import Mesh, Replicate, Shard, Spec, SpecError


def alternatives(
    problem: Problem, model: FoldedModel, mesh: Mesh, anchors: Anchors, memory_bytes: float,
    deadline: Deadline,
) -> dict[str, list[Alternative]]:  # fmt: skip
    """By the name of a variable of the folded graph, what else it could be, and the step's seconds.

    Weights that stand at one place of a block change together; along one mesh axis at a time. All
    others stay, and so do ops that still can run as planned; if all ops do better as they come,
    that is what counts.

    Args:
        anchors: the plan.
        memory_bytes: what a plan may store on a device.
        deadline: when to leave out the weights that are left; the largest come first.
    """

    def seconds(names: Sequence[str], spec: Spec) -> float:
        """The step with the variables `names` laid as `spec`; infinite if it cannot be."""
        variables, least = {**anchors.variables, **dict.fromkeys(names, spec)}, math.inf
        for ops in (anchors.ops, {}):
            changed = dataclasses.replace(anchors, variables=variables, ops=ops)
            try:
                laid = propagate(model.prepared, mesh, changed)
            except SpecError:
                continue
            cost = evaluate(laid, problem.cluster, model.roles, problem.state_ratio)
            if cost.memory_bytes <= memory_bytes:
                least = min(least, cost.seconds)
        return least

    found: dict[str, list[Alternative]] = {}
    for group in sorted(model.folded.groups, key=lambda group: -group[0].num_bytes):
        if deadline.over():
            break
        names = [variable.name for variable in group]
        if not group[0].trainable or any(name in problem.fixed for name in names):
            continue
        spec = anchors.variables[names[0]]
        if any(anchors.variables[name] != spec for name in names):
            continue  # ends of a chain of blocks that lie otherwise
        others = _others(group[0], spec, mesh)
        priced = [Alternative(other, seconds(names, other)) for other in others]
        found.update((name, priced) for name in names)
    return found


def _others(variable: Variable, spec: Spec, mesh: Mesh) -> Iterator[Spec]:
    """The specs that differ from `spec` along one mesh axis."""
    for axis, parts in enumerate(mesh.shape):
        if parts == 1:
            continue
        split = (Shard(dim) for dim, size in enumerate(variable.shape) if size >= parts)
        for placement in (Replicate(), *split):
            if placement != spec[axis]:
                yield (*spec[:axis], placement, *spec[axis + 1 :])
