"""Where the time of a T5-Large step goes under expert plans and the searched one (TAP Fig. 3).

    python -m benchmarks.breakdown [--json FILE]

Predicted for 8 and 16 V100 (nodes of 8, 32 Gb/s Ethernet between them), batch 16: data parallelism,
attention split by heads (MHA), feed-forward layers split (FFN), both (Megatron), and what the
search chose among all layouts.
"""

from __future__ import annotations

import argparse
from typing import Any

import tfpar as tap
from benchmarks import models
from benchmarks.captured import STATE, captured_step, constrained
from benchmarks.results import save
from tfpar.cluster.lookup import find_cluster
from tfpar.constraints.constraint_types import Constraint
from tfpar.cost.cost import Cost
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.problems import state_problem
from tfpar.planning.request import PlanRequest

BATCH = 16
Split = tuple[tuple[str, int], ...]
"""(weights, the dim that is split) of a plan."""
MHA: Split = ((".*attention/(query|key|value)/kernel", 1), (".*attention/out/kernel", 0))
FFN: Split = ((".*wi/kernel", 1), (".*wo/kernel", 0))
PLANS: dict[str, Split] = {"DP": (), "MHA": MHA, "FFN": FFN, "Megatron": MHA + FFN}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    captured = captured_step(models.FULL["t5_large"], BATCH)
    print(
        "| plan | step ms | compute ms | waiting for collectives ms | gradients exposed ms | GiB |"
    )
    print("|---|---|---|---|---|---|")
    for nodes in (1, 2):
        grid = tap.Mesh.of([nodes, 8])
        cluster = find_cluster("v100-ethernet", grid)
        problem = state_problem(captured, PlanRequest(grid, cluster), BATCH, state_ratio=STATE)
        plan = TapPlanner().solve(problem)
        for name, split in PLANS.items():
            by_hand, _ = constrained(captured, BATCH, cluster, *placed(grid, split))
            assert by_hand.cost is not None
            rows.append(show(f"{grid.size}w-{name}", by_hand.cost))
        assert plan.cost is not None
        batch = " and ".join(plan.batch_axes)
        searched = f"{grid.size}w, searched: {plan.mesh}, batch over {batch}"
        rows.append(show(searched, plan.cost))
    save(options.json, rows)


def placed(grid: tap.Mesh, split: Split) -> tuple[tap.Mesh, tuple[Constraint, ...]]:
    """The mesh and the constraints of a plan by hand: all ranks split these weights, or the batch
    if there are none."""
    shape = (1, grid.size) if split else (grid.size, 1)
    weights = (tap.shard(pattern, dim=dim, axis="model") for pattern, dim in split)
    return tap.Mesh(("data", "model"), shape), (tap.batch("data"), *weights)


def show(name: str, cost: Cost) -> dict[str, Any]:
    """Print the row of a plan, and return it."""
    row = {
        "plan": name,
        "step_s": cost.seconds,
        "compute_s": sum(cost.compute_s),
        "waiting_s": sum(cost.communication_s) - cost.hidden_s,
        "exposed_s": cost.exposed_s,
        "memory_bytes": cost.memory_bytes,
    }
    parts = (row[key] for key in ("step_s", "compute_s", "waiting_s", "exposed_s"))
    cells = " | ".join(f"{1e3 * part:.0f}" for part in parts)
    print(f"| {name} | {cells} | {cost.memory_bytes / 2**30:.1f} |", flush=True)
    return row


if __name__ == "__main__":
    main()
