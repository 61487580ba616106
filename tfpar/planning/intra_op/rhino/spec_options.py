"""Options of each weight: the cost of a plan with another spec of it, which explains its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from tfpar.cost.cost import Cost
from tfpar.cost.pricer import Pricer
from tfpar.ir.graph import Variable
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.incremental.incremental import IncrementalPricer
from tfpar.planning.problem import Problem
from tfpar.plans import SpecOption
from tfpar.propagation.partitioned_graph import Anchors
from tfpar.spec import Mesh, Replicate, Shard, Spec, SpecError


def price_spec_options(
    problem: Problem,
    model: FoldedModel,
    mesh: Mesh,
    anchors: Anchors,
    cost: Cost,
    deadline: Deadline,
) -> dict[str, list[SpecOption]]:
    """Price the other options of each variable of the folded graph, by name: the spec and the
    step's seconds.

    The placement of a weight is changed along one mesh axis, together with that of the weights at
    the same place of its block. All other weights stay. Ops run as planned where they still can, or
    all as propagation has them, whichever takes less. The seconds are infinite where an op cannot
    run, or where weights and activations would not fit into memory.

    Args:
        anchors, cost: the plan and its price; what stores more than it has to fit the device.
        deadline: when to leave out the weights that are left; the largest come first.
    """
    graph = model.prepared.graph
    segments = model.nodes.segments(graph, model.roles)
    pricer = Pricer(mesh, problem.cluster, model.roles)
    plans = [
        IncrementalPricer(model.prepared, mesh, laid, segments, pricer, problem.step.state_ratio)
        for laid in (anchors, dataclasses.replace(anchors, ops={}))
    ]
    limit = max(problem.memory_limit, cost.memory_bytes)
    plans[0].settle()
    limit += plans[0].cost().memory_bytes - cost.memory_bytes

    def seconds(group: Sequence[Variable], spec: Spec) -> float:
        """Return the least seconds of a step in which the variables `group` have `spec`."""
        least = math.inf
        for laid in plans:
            try:
                for variable in group:
                    laid.lay(variable, spec)
                if not laid.settle() and laid.cost().memory_bytes <= limit:
                    least = min(least, laid.cost().seconds)
            except SpecError:  # a strided split does not go with it
                pass
            for variable in group:
                laid.lay(variable, anchors.variables[variable.name])
        return least

    found: dict[str, list[SpecOption]] = {}
    known = {v.name: v for v in graph.variables}
    for members in sorted(model.folded.groups, key=lambda group: -group[0].num_bytes):
        if deadline.over():
            break
        group = [known[variable.name] for variable in members]
        if not group[0].trainable or any(v.name in problem.given.variables for v in group):
            continue
        spec = anchors.variables[group[0].name]
        if any(anchors.variables[v.name] != spec for v in group):
            continue  # ends of a chain of blocks that lie otherwise
        others = _others(group[0], spec, mesh)
        priced = [SpecOption(other, seconds(group, other)) for other in others]
        found.update((v.name, priced) for v in group)
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
