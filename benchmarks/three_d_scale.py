"""How long the search for a 3-D strategy takes, over devices and layers.

A GPT of hidden size 4,096 on `dgx-a100` machines of 8 devices, in batches of as many samples as
there are devices, 64 at least; layer times are those of `benchmarks.gpt_layers`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpt_layers import Gpt, gpt_table
from benchmarks.plots import save_plot
from tfpar.cluster.lookup import find_cluster
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.searches import find
from tfpar.spec import Mesh

GPT = Gpt(layers=12, hidden=4096, heads=32, length=2048, vocabulary=51_200)
DEVICES, LAYERS = (16, 128, 1024, 4096), (12, 48, 192)
MICROBATCHES, TENSOR = (1, 2, 4), (1, 2, 4, 8)


def measured(devices: int, layers: int) -> dict[str, Any]:
    """A row: what is found, and the CPU-seconds of the search."""
    cluster = find_cluster("dgx-a100", Mesh.of([devices // 8, 8]))
    table = gpt_table(cluster, MICROBATCHES, TENSOR, dataclasses.replace(GPT, layers=layers))
    start = time.process_time()
    found = find(StrategyProblem(table, cluster, max(64, devices)))
    return {
        "devices": devices,
        "layers": layers,
        "search_cpu_s": time.process_time() - start,
        "evaluated": found.evaluated,
        "simulated": len(found.finalists),
        "seconds": found.best.simulated_s,
        "strategy": str(found.best.strategy),
    }


def plot(rows: Iterable[dict[str, Any]], path: str) -> None:
    """Draw the seconds of searches over layers, a line for each number of devices; where it is
    known how slow the machine was, those of the reference machine."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_devices: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        points = by_devices.setdefault(row["devices"], [])
        points.append((row["layers"], row["search_cpu_s"] / (row.get("machine") or 1.0)))
    figure, axes = plt.subplots(figsize=(6, 4))
    for devices, points in sorted(by_devices.items()):
        axes.plot(*_columns(sorted(points)), marker="o", label=f"{devices:,} devices")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(LAYERS, labels=[str(layers) for layers in LAYERS])
    axes.set_xlabel("layers")
    axes.set_ylabel("search, CPU s")
    axes.legend()
    save_plot(figure, path)


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [layers for layers, _ in points], [seconds for _, seconds in points]
