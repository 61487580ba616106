"""Random small models on random small clusters, of one to three kinds of machines."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from tests.planning.inter_op.three_d.tables import cluster, kind
from tfpar.planning.inter_op.three_d.cost_table import Experts, LayerCostTable, LayerType
from tfpar.planning.inter_op.three_d.problem import StrategyProblem


def _kind(rng: random.Random, speeds: Mapping[str, float]) -> LayerType:
    return kind(
        speeds,
        seconds=rng.choice([0.5, 1.0, 3.0]),
        fixed_bytes=rng.choice([50.0, 100.0]),
        gradient_bytes=rng.choice([5.0, 50.0]),
        kept_bytes=rng.choice([1.0, 10.0]),
        reduced_bytes=rng.choice([0.0, 5.0]),
        sent_bytes=rng.choice([1.0, 10.0]),
    )


def some(seed: int) -> StrategyProblem:
    """Sometimes with too little memory for some strategies."""
    rng = random.Random(seed)
    names = "ab"[: rng.choice([1, 2, 2])]
    speeds = {name: rng.choice([1.0, 2.0, 0.5]) for name in names}
    each = rng.choice([1, 2, 4])
    count = rng.choice([1, 2] if each == 4 else [2, 4])
    nodes = []
    for name in names:
        inside, outside = rng.choice([50.0, 400.0]), rng.choice([5.0, 20.0])
        nodes += [(name, each, inside, outside)] * count
    kinds = {f"kind {number}": _kind(rng, speeds) for number in range(2)}
    layers = tuple(rng.choice(list(kinds)) for _ in range(rng.randint(2, 6)))
    memory_bytes = rng.choice([1e12, 1e12, 400.0])
    return StrategyProblem(
        LayerCostTable(kinds, layers), cluster(*nodes, memory_bytes=memory_bytes), 8
    )


def mixed(seed: int) -> StrategyProblem:
    """Of two or three kinds of machines of unequal size; layers can be computed again, and slots
    sharded."""
    rng = random.Random(seed)
    names = "abc"[: rng.choice([2, 3])]
    speeds = {name: rng.choice([0.25, 0.5, 1.0, 2.0, 3.0]) for name in names}
    nodes = []
    for name in names:
        each, inside = rng.choice([1, 2, 4]), rng.choice([20.0, 50.0, 400.0])
        nodes += [(name, each, inside, rng.choice([2.0, 5.0, 20.0]))] * rng.choice([2, 2, 4])
    kinds = {}
    for number in range(3):
        found = _kind(rng, speeds)
        kinds[f"kind {number}"] = dataclasses.replace(
            found,
            input_bytes=rng.choice([0.5, 1.0]),
            slot_bytes=0.75 * found.fixed_bytes,
            weight_bytes=found.gradient_bytes / rng.choice([1, 2]),
        )
    layers = tuple(rng.choice(list(kinds)) for _ in range(rng.randint(4, 12)))
    memory_bytes = rng.choice([1e12, 400.0, 800.0])
    return StrategyProblem(
        LayerCostTable(kinds, layers), cluster(*nodes, memory_bytes=memory_bytes), 24
    )


def with_experts(seed: int) -> StrategyProblem:
    """Of two kinds of layers, one of them with experts, on machines of one or two kinds."""
    rng = random.Random(seed)
    names = "ab"[: rng.choice([1, 2])]
    speeds = {name: rng.choice([0.5, 1.0, 2.0]) for name in names}
    each = rng.choice([1, 2, 4])
    nodes = [(name, each, rng.choice([50.0, 400.0]), rng.choice([5.0, 20.0])) for name in names]
    dense = _kind(rng, speeds)
    experts = Experts(
        fixed_bytes=rng.choice([100.0, 400.0]),
        gradient_bytes=rng.choice([10.0, 80.0]),
        routed_bytes=rng.choice([1.0, 10.0]),
    )
    sparse = kind(
        speeds,
        seconds=rng.choice([0.5, 1.0, 3.0]),
        fixed_bytes=50.0 + experts.fixed_bytes,
        gradient_bytes=10.0 + experts.gradient_bytes,
        kept_bytes=rng.choice([1.0, 10.0]),
        sent_bytes=5.0,
        experts=experts,
    )
    on = cluster(
        *nodes * 2, memory_bytes=rng.choice([1e12, 1000.0]), overlap=rng.choice([0.5, 1.0])
    )
    table = LayerCostTable(
        {"dense": dense, "sparse": sparse}, ("dense", "sparse") * rng.choice([1, 2])
    )
    return StrategyProblem(table, on, 8)
