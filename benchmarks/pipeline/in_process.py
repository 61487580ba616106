"""The contenders of `links` with four ranks in one process: no links, and cores that are shared."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from typing import Any

from benchmarks.pipeline.links import GPT
from benchmarks.shaped_cluster.config import Config

LAYOUTS = ("data", "megatron", "pipeline")
RANKS = 4


def measure(steps: int) -> list[dict[str, Any]]:
    """A row for each layout: medians over turns of CPU and wall seconds of a step."""
    from benchmarks.shaped_cluster.worker import Training, machines_of

    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            model="gpt",
            layout="data",
            nodes=1,
            ranks_per_node=RANKS,
            mbits=(None,),
            machines=f"{folder}/machines.toml",
            size=GPT,
        )
        machines = machines_of(config)
        trainings = {
            layout: Training(dataclasses.replace(config, layout=layout), machines)
            for layout in LAYOUTS
        }
        taken: dict[str, list[tuple[float, float]]] = {layout: [] for layout in LAYOUTS}
        for _ in range(steps):
            for layout, training in trainings.items():
                cpu, wall = time.process_time(), time.perf_counter()
                training.step()
                taken[layout].append((time.process_time() - cpu, time.perf_counter() - wall))
        return [
            {
                "layout": layout,
                "cpu_s": statistics.median(cpu for cpu, _ in taken[layout]),
                "wall_s": statistics.median(wall for _, wall in taken[layout]),
                "planned_s": training.plan(None)["seconds"],
                "first_loss": training.first_loss,
            }
            for layout, training in trainings.items()
        ]
