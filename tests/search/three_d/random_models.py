"""Random small models on random small clusters, of one or two kinds of machines."""

from __future__ import annotations

import random

from tests.search.three_d.tables import cluster, kind
from tfpar.search.three_d.price import Model
from tfpar.search.three_d.table import LayerTable


def some(seed: int) -> Model:
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
    kinds = {
        f"kind {number}": kind(
            speeds,
            seconds=rng.choice([0.5, 1.0, 3.0]),
            fixed_bytes=rng.choice([50.0, 100.0]),
            gradient_bytes=rng.choice([5.0, 50.0]),
            kept_bytes=rng.choice([1.0, 10.0]),
            reduced_bytes=rng.choice([0.0, 5.0]),
            sent_bytes=rng.choice([1.0, 10.0]),
        )
        for number in range(2)
    }
    layers = tuple(rng.choice(list(kinds)) for _ in range(rng.randint(2, 6)))
    memory_bytes = rng.choice([1e12, 1e12, 400.0])
    return Model(LayerTable(kinds, layers), cluster(*nodes, memory_bytes=memory_bytes), 8)
