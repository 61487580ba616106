"""One rank: all contenders train in turns, over links of each bandwidth.

python -m benchmarks.pipeline.links_worker CONFIG    # started by `tfpar run`
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from benchmarks.pipeline.config import MARK
from benchmarks.shaped_cluster.config import Config
from benchmarks.shaped_cluster.namespaces import limit
from benchmarks.shaped_cluster.worker import Training, idle_rate, machines_of, meet
from tfpar.tf.distributed.world import World, this_world

LAYOUTS = ("data", "megatron", "pipeline")


def measure(config: Config) -> list[dict[str, Any]]:
    """A row for each bandwidth and contender; a pipeline is searched for each bandwidth."""
    machines, world = machines_of(config), this_world()
    assert world is not None
    fixed = {
        layout: Training(dataclasses.replace(config, layout=layout), machines)
        for layout in LAYOUTS[:2]
    }
    rows = []
    for mbit in config.mbits:
        own = dataclasses.replace(config, layout="pipeline", mbits=(mbit,))
        trainings = {**fixed, "pipeline": Training(own, machines)}
        steps, idle = take_turns(trainings, mbit, config.steps, world)
        rows += [
            {
                "layout": layout,
                "mbit": mbit,
                "steps": steps[layout],
                "idle_rate": idle,
                "first_loss": training.first_loss,
                "plan": training.plan(mbit),
            }
            for layout, training in trainings.items()
        ]
    return rows


def take_turns(
    trainings: dict[str, Training], mbit: float | None, steps: int, world: World
) -> tuple[dict[str, list[dict[str, float]]], float]:
    """The steps of each, over limited links; the first turn is not counted. And what the node
    sends in a second in which nothing trains."""
    if world.job.local_rank == 0:
        limit(mbit)
    idle = idle_rate(world)
    found: dict[str, list[dict[str, float]]] = {layout: [] for layout in trainings}
    for turn in range(1 + steps):
        for layout, training in trainings.items():
            step = training.timed_step(world)
            found[layout] += [step] if turn else []
    meet(world)
    if world.job.local_rank == 0:
        limit(None)
    return found, idle


if __name__ == "__main__":
    print(f"{MARK}{json.dumps(measure(Config.from_json(sys.argv[1])))}", flush=True)
