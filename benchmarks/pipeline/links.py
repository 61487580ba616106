"""A GPT of large weights and small activations on four nodes: which layout is fastest?"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.pipeline.config import MARK
from benchmarks.shaped_cluster.config import Config
from benchmarks.shaped_cluster.job import run_module
from benchmarks.shaped_cluster.namespaces import ClusterError, cluster

NODES = 4
MBITS = (100.0, 1000.0)
GPT = {"vocabulary": 1000, "length": 64, "hidden": 384, "heads": 8, "num_layers": 8}
"""60 MB of weights; 0.8 MB of activations of a batch lie between two layers."""
TIMEOUT_S = 900.0
LOSS_TOLERANCE = 1e-3


def measure(steps: int) -> list[dict[str, Any]]:
    """A row for each bandwidth and layout, the slowest rank's time; bytes are each node's.

    Raises:
        ClusterError: no cluster can be made, a rank has failed, or a layout computes something
            else than the others.
    """
    with cluster(NODES) as hosts, tempfile.TemporaryDirectory() as folder:
        config = Config(
            model="gpt",
            layout="pipeline",
            nodes=NODES,
            ranks_per_node=1,
            mbits=MBITS,
            machines=f"{folder}/machines.toml",
            steps=steps,
            size=GPT,
        )
        command = ["benchmarks.pipeline.links_worker", config.to_json()]
        texts = run_module(hosts, 1, command, TIMEOUT_S)
    ranks = [_result(text) for text in texts]
    rows = [_row([rank[i] for rank in ranks]) for i in range(len(ranks[0]))]
    for row in rows:
        if abs(row["first_loss"] - rows[0]["first_loss"]) > LOSS_TOLERANCE * rows[0]["first_loss"]:
            raise ClusterError(f"{row['layout']} trains otherwise than {rows[0]['layout']}")
    return rows


def _result(text: str) -> list[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise ClusterError(f"A rank has ended without a result: {text[-3000:]}")


def _row(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the figures of all ranks, for one contender at one bandwidth."""
    first, plan = ranks[0], ranks[0]["plan"]
    seconds = [max(step["seconds"] for step in steps) for steps in _turns(ranks)]
    return {
        "mbit": first["mbit"],
        "layout": first["layout"],
        "step_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "planned_s": plan["seconds"],
        "sent_bytes": [statistics.median(s["sent"] for s in rank["steps"]) for rank in ranks],
        "idle_bytes": statistics.median(seconds) * statistics.mean(r["idle_rate"] for r in ranks),
        "planned_bytes": plan["bytes"],
        "first_loss": first["first_loss"],
        "bubble": plan.get("bubble"),
    }


def _turns(ranks: Sequence[dict[str, Any]]) -> list[tuple[dict[str, float], ...]]:
    return list(zip(*(rank["steps"] for rank in ranks), strict=True))
