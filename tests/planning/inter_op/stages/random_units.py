"""Small random models as units, and the best assignment of all."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from tfpar.planning.inter_op.stages.units import Flow, TiedWeight, Unit, UnitGraph


def random_graph(seed: int, fixed: bool = False) -> tuple[UnitGraph, int]:
    """A DAG of up to seven units with sends, skips and ties, and a number of stages."""
    rng = random.Random(seed)
    count = rng.randint(1, 7)
    num_stages = rng.randint(1, min(count, 4))
    stages = sorted(rng.randrange(num_stages) for _ in range(count))
    units = tuple(
        Unit(
            f"unit {i}",
            rng.choice([0, 1, 1, 2, 3, 5]),
            stage=stages[i] if fixed and rng.random() < 0.3 else None,
        )
        for i in range(count)
    )
    flows = []
    for source in range(count - 1):
        for _ in range(rng.choice([0, 1, 1, 2])):
            later = range(source + 1, count)
            readers = rng.sample(later, rng.randint(1, min(3, len(later))))
            flows.append(Flow(source, tuple(sorted(readers)), rng.choice([0, 1, 2, 3, 7])))
    ties = tuple(
        TiedWeight(
            tuple(sorted(rng.sample(range(count), rng.randint(1, count)))), rng.randint(0, 5)
        )
        for _ in range(rng.choice([0, 0, 1, 2]))
    )
    return UnitGraph(units, tuple(flows), tuple(ties)), num_stages


def assignments(graph: UnitGraph, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All that the edges and what is fixed allow, and that leave no stage empty."""
    for stages in itertools.product(range(num_stages), repeat=len(graph.units)):
        if (
            len({*stages}) == num_stages
            and all(stages[f.source] <= stages[r] for f in graph.flows for r in f.readers)
            and all(u.stage in (None, s) for u, s in zip(graph.units, stages, strict=True))
        ):
            yield stages


def random_paces(seed: int, num_stages: int) -> tuple[float, ...]:
    """Of stages, some of them alike."""
    return tuple(random.Random(seed).choices((0.25, 0.5, 1.0, 1.5, 3.0), k=num_stages))


def least_sent_of_all(
    graph: UnitGraph,
    num_stages: int,
    most_seconds: float,
    paces: Sequence[float] | None = None,
) -> float:
    """The least that is sent by an assignment whose stages take no more than that."""
    return min(
        sent(graph, stages)
        for stages in assignments(graph, num_stages)
        if max(taken(graph, stages, num_stages, paces)) <= most_seconds * (1 + 1e-6)
    )


def sent(graph: UnitGraph, stages: tuple[int, ...]) -> float:
    """By the book: (tensor, stage) of every reader elsewhere, each pair once."""
    pairs = {
        (number, stages[r])
        for number, f in enumerate(graph.flows)
        for r in f.readers
        if stages[r] != stages[f.source]
    }
    tied = (t.num_bytes * (len({stages[r] for r in t.readers}) - 1) for t in graph.ties)
    return sum(graph.flows[number].num_bytes for number, _ in pairs) + sum(tied)


def taken(
    graph: UnitGraph,
    stages: tuple[int, ...],
    num_stages: int,
    paces: Sequence[float] | None = None,
) -> list[float]:
    """Seconds of each stage, by default all of one pace."""
    paces = paces or [1.0] * num_stages
    return [
        sum(u.seconds for u, s in zip(graph.units, stages, strict=True) if s == stage)
        * paces[stage]
        for stage in range(num_stages)
    ]
