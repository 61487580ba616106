"""Plans of a GPT for four unequal nodes, each as it is asked for by the public API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tfpar as tap
from benchmarks import models
from benchmarks.shaped_cluster.unequal_config import CHOSEN, DATA, MEGATRON, NAMES

RANKS = 4
Context = Callable[[], tap.auto_parallel]


def contexts(cluster: tap.Cluster, num_layers: int, microbatches: int) -> dict[str, Context]:
    """Where the model is made, for each of `NAMES`.

    What knows nothing of the machines is given them all the same, to be priced.

    Args:
        num_layers: blocks of the model.
        microbatches: of pipelines of as many as are of use.
    """
    alone = [tap.replicate(".*"), tap.batch("data")]
    zero = [tap.shard(r".*(kernel|embeddings)", dim=0, axis="data"), tap.batch("data")]
    megatron = [*models.layout("gpt"), tap.batch("data")]

    def laid(data: int, constraints: Sequence[Any], **options: Any) -> Context:
        mesh = {"data": data, "model": RANKS // data}
        return lambda: tap.auto_parallel(mesh, constraints, cluster=cluster, **options)

    def staged(
        stages: int, micro: int, schedule: str = "1f1b", constraints: Sequence[Any] = ()
    ) -> Context:
        pipeline = tap.Pipeline(stages, micro, schedule)
        return lambda: tap.auto_parallel([RANKS], constraints, pipeline=pipeline, cluster=cluster)

    found = {
        DATA: laid(RANKS, (), planner=None),
        "data, unequal shares": laid(RANKS, alone),
        "zero": laid(RANKS, zero, planner=None),
        MEGATRON: laid(1, megatron, planner=None),
        "megatron 2x2": laid(2, megatron, planner=None),
        "2 stages, equal layers": staged(2, microbatches, "1f1b", equal_layers(num_layers, 2)),
        "2 stages": staged(2, microbatches),
        "2 stages, gpipe": staged(2, microbatches, "gpipe"),
        "4 stages, equal layers": staged(4, microbatches, "1f1b", equal_layers(num_layers, 4)),
        "4 stages": staged(4, microbatches),
        "4 stages, few microbatches": staged(4, 4),
        "4 stages, gpipe": staged(4, microbatches, "gpipe"),
        CHOSEN: lambda: tap.auto_parallel([RANKS], cluster=cluster, pipeline="auto"),
    }
    assert tuple(found) == NAMES
    return found


def equal_layers(num_layers: int, stages: int) -> list[Any]:
    """As many blocks in each stage, in order, as is done by hand on machines that are alike."""
    each = num_layers // stages
    found = [tap.stage("tokens|positions", 0), tap.stage("head", stages - 1)]
    for block in range(num_layers):
        stage = min(block // each, stages - 1)
        found.append(tap.stage(rf"block_{block}_\w+", stage))
    return found
