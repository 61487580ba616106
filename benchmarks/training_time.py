"""Predicted step of T5 that grows deeper and of ResNet50 with more classes (TAP, Figs. 6 and 7).

    python -m benchmarks.training_time [--quick] [--json FILE]

On 8 and 16 V100 (nodes of 8, 32 Gb/s Ethernet between them), batches of 16 for T5 and 1,024 for
ResNet50, as in the paper, which does not say how many GPUs there were: what TAP's planner finds, as
`tap.plan` asks it to, beside data parallelism and, for T5, Megatron's plan over all ranks. Sizes
are those of `benchmarks.search`, the seconds of the search CPU-seconds. Which plans do not fit is
said; all are priced alike.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import tfpar as tap
from benchmarks import models
from benchmarks.breakdown import PLANS, Split, placed
from benchmarks.captured import STATE, captured_step, constrained
from benchmarks.results import save
from benchmarks.search import CASES
from tfpar.cluster.description import Cluster
from tfpar.cluster.lookup import find_cluster
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.memory.limit import solve_under_memory_limit
from tfpar.planning.pricing.price import price_whole
from tfpar.planning.problems import state_problem
from tfpar.planning.request import PlanRequest
from tfpar.plans import Plan
from tfpar.tf.capture.step import CapturedStep

NODES = (1, 2)
FIGURES = {"t5": ("Fig. 6", 16), "resnet50": ("Fig. 7", 1024)}
"""By model: the paper's figure, and its batch."""
BY_HAND: dict[str, dict[str, Split]] = {
    "t5": {"data": PLANS["DP"], "megatron": PLANS["Megatron"]},
    "resnet50": {"data": ()},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="the smallest of both models")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| case | GPUs | plan | step ms | GiB | |\n|---|---|---|---|---|---|")
    chosen = [name for name, case in CASES.items() if case["model"] in FIGURES]
    for name in ("t5-6", "resnet50-1k") if options.quick else chosen:
        model, size = CASES[name]["model"], CASES[name]["size"]
        step = captured_step(functools.partial(getattr(models, model), **size), FIGURES[model][1])
        for row in plans_of(step, model):
            rows.append({"case": name, **row})
            print(
                f"| {name} | {row['devices']} | {row['plan']} | {1e3 * row['step_s']:.1f} | "
                f"{row['memory_bytes'] / 2**30:.1f} | {row.get('found', '')} |",
                flush=True,
            )
        save(options.json, rows)


def plans_of(step: CapturedStep, model: str) -> Iterator[dict[str, Any]]:
    """A row for each number of GPUs and plan."""
    batch = FIGURES[model][1]
    parameters = sum(math.prod(v.shape) for v in step.graph.variables if v.trainable)
    for nodes in NODES:
        grid = tap.Mesh.of([nodes, 8])
        cluster = find_cluster("v100-ethernet", grid)
        shared = {"parameters": parameters, "devices": grid.size, "batch": batch}
        problem = state_problem(step, PlanRequest(grid, cluster), batch, state_ratio=STATE)
        start = time.process_time()
        plan = solve_under_memory_limit(problem, TapPlanner())
        searched = {"search_cpu_s": time.process_time() - start}
        cost, _ = price_whole(plan, problem)  # as the others are
        plan = plan.with_findings(cost=cost)
        found = f"{plan.mesh}, batch over {' and '.join(plan.batch_axes)}"
        yield {**shared, "plan": "tap", **priced(plan, cluster), **searched, "found": found}
        for name, split in BY_HAND[model].items():
            by_hand, _ = constrained(step, batch, cluster, *placed(grid, split))
            yield {**shared, "plan": name, **priced(by_hand, cluster)}


def priced(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """What a plan costs, and whether it fits."""
    assert plan.cost is not None
    return {
        "step_s": plan.cost.seconds,
        "memory_bytes": plan.cost.memory_bytes,
        "fits": plan.cost.memory_bytes <= cluster.device.memory_bytes,
    }


if __name__ == "__main__":
    main()
