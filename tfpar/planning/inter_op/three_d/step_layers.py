"""The layers of a captured step, as searches of pipelines cut it: the blocks of its folded graph.

A block that repeats is a layer, once for each of its instances. What lies between blocks is cut
into layers no longer than the longest of all, so that a stage may begin wherever that can pay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence

from tfpar.ir.graph import Graph, Op
from tfpar.ir.graph_nodes import cluster
from tfpar.ir.roles import UPDATE, Roles
from tfpar.pipeline.colocation import together
from tfpar.pipeline.step_stages import assignable, stages_of_step
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.inter_op.stages.unit_builder import parts_in_order
from tfpar.spec import PlanError


@dataclasses.dataclass(frozen=True, eq=False)
class StepLayers:
    """The layers of a folded step, in an order in which each reads of earlier ones only.

    Attributes:
        layer_of: the layer of every op of the prepared graph.
        times: how many layers of the model each stands for.
    """

    layer_of: Mapping[Op, int]
    times: Sequence[int]

    @classmethod
    def of(cls, model: FoldedModel, seconds: Callable[[Op], float]) -> StepLayers:
        """Cut a folded model.

        Args:
            seconds: of an op on one device.

        Raises:
            PlanError: the step computes nothing of what it is fed.
        """
        graph, roles = model.prepared.graph, model.roles
        ops = assignable(graph, roles)
        if not ops:
            raise PlanError("The step computes nothing of what it is fed: it has no layers.")
        instance = {
            op.name: number
            for number, members in enumerate(model.folded.instances)
            for op in members
        }
        levels = _levels(graph, roles, ops, instance)
        depth = dict.fromkeys(ops, 0)
        parts = parts_in_order(ops, together(graph, ops), levels, {}, depth)
        stood_for = {op.name: count for op, count in model.folded.times.items()}
        times = [max(stood_for.get(op.name, 1) for op in part) for part in parts]
        repeats = [any(op.name in instance for op in part) for part in parts]
        layer_of = _of_all(graph, roles, parts)
        taken = _taken(roles, layer_of, seconds, len(parts))
        merged = _merged(taken, times, repeats)
        counts = [1] * (max(merged) + 1)
        for part, layer in enumerate(merged):
            counts[layer] = max(counts[layer], times[part])
        return cls({op: merged[part] for op, part in layer_of.items()}, counts)


def _levels(
    graph: Graph, roles: Roles, ops: Sequence[Op], instance: Mapping[str, int]
) -> list[Mapping[Op, Hashable]]:
    """Instances of blocks, and GraphNodes elsewhere; GraphNodes; single ops."""
    nodes = cluster(graph, roles)
    by_node: dict[Op, Hashable] = {op: nodes.node_of.get(op, op) for op in ops}
    by_block: dict[Op, Hashable] = {op: instance.get(op.name, by_node[op]) for op in ops}
    return [by_block, by_node, {op: op for op in ops}]


def _of_all(graph: Graph, roles: Roles, parts: Sequence[Sequence[Op]]) -> dict[Op, int]:
    """The part of every op: what no part computes lies where it is read."""
    found = stages_of_step(graph, roles, {op: i for i, part in enumerate(parts) for op in part})
    readers = graph.consumers()
    for op in reversed(graph.ops):
        if op not in found:
            reading = (found[r] for t in op.outputs for r in readers.get(t, ()))
            found[op] = max(reading, default=0)
    return found


def _taken(
    roles: Roles, layer_of: Mapping[Op, int], seconds: Callable[[Op], float], count: int
) -> list[float]:
    taken = [0.0] * count
    for op, layer in layer_of.items():
        if roles.phase[op] != UPDATE:
            taken[layer] += seconds(op)
    return taken


def _merged(taken: Sequence[float], times: Sequence[int], repeats: Sequence[bool]) -> list[int]:
    """The layer of each part: what follows each other and is no block becomes one, as long as it
    takes no longer than the longest part. What lies between instances that stand for several goes
    with them."""
    most = max(taken)
    found: list[int] = []
    layer, own = -1, 0.0
    before: tuple[bool, int] | None = None
    for seconds, count, repeat in zip(taken, times, repeats, strict=True):
        stays = before is not None and (
            (count > 1 and before[1] == count)
            or (not repeat and not before[0] and own + seconds <= most)
        )
        if not stays:
            layer, own = layer + 1, 0.0
        own += seconds
        before = repeat, count
        found.append(layer)
    return found
