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
from benchmarks.results import save
from tfpar.capture.step import argument_specs
from tfpar.cluster.named import find_cluster
from tfpar.compile import simplify_step
from tfpar.cost.cost import Cost
from tfpar.cost.evaluate import evaluate
from tfpar.ir.roles import Roles
from tfpar.keras.adapter import parallel_model
from tfpar.planning import Request, state_problem
from tfpar.plans import plan_from_constraints
from tfpar.search.laid import lay_out
from tfpar.search.tap.planner import TapPlanner

BATCH = 16
MHA = ((".*attention/(query|key|value)/kernel", 1), (".*attention/out/kernel", 0))
FFN = ((".*wi/kernel", 1), (".*wo/kernel", 0))
PLANS = {"DP": (), "MHA": MHA, "FFN": FFN, "Megatron": MHA + FFN}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tap.auto_parallel([1], planner=None):
        model = models.compile_model(models.FULL["t5_large"]())
    captured = parallel_model(model).capture_gradients(
        argument_specs((models.batch_of(model, BATCH),))
    )
    simplify_step(captured)
    print(
        "| plan | step ms | compute ms | waiting for collectives ms | gradients exposed ms | GiB |"
    )
    print("|---|---|---|---|---|---|")
    for nodes in (1, 2):
        grid = tap.Mesh.of([nodes, 8])
        cluster = find_cluster("v100-ethernet", grid)
        problem = state_problem(captured, Request(grid, cluster), BATCH, state_ratio=2.0)
        plan = TapPlanner().solve(problem)
        for name, split in PLANS.items():
            shape = (1, grid.size) if split else (grid.size, 1)
            mesh = tap.Mesh(("data", "model"), shape)
            constraints = (
                tap.batch("data"),
                *(tap.shard(p, dim=d, axis="model") for p, d in split),
            )
            given = state_problem(
                captured, Request(mesh, cluster, constraints), BATCH, state_ratio=2.0
            )
            by_hand = plan_from_constraints(
                captured.graph, mesh, constraints, gradients=captured.gradients
            )
            laid = lay_out(by_hand, given)
            roles = Roles.of(laid.graph, times=dict.fromkeys(given.stand_ins, 0))
            rows.append(show(f"{grid.size}w-{name}", evaluate(laid, cluster, roles, 2.0)))
        assert plan.cost is not None
        batch = " and ".join(plan.batch_axes)
        searched = f"{grid.size}w, searched: {plan.mesh}, batch over {batch}"
        rows.append(show(searched, plan.cost))
    save(options.json, rows)


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
