"""How far from the best the plans of saved graphs can be, as their searches know it (`plan.bound`).

    python -m benchmarks.bounds [--graph gpt] [--mesh 2x8] [--cluster v100-ethernet] [--json FILE]

The steps of `tests/graphs`, on level 3 of Rhino's planner; of plans that are near each other the
fastest is taken. CPU-seconds are those of the search. No TensorFlow is needed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.results import save
from tests.graphs import saved_names
from tests.planning.problems import Captured
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.lower_bound import attach_bound

NEAR = 0.05
"""The gap within which a plan is counted as near the best."""


def measure(name: str, mesh: Sequence[int], cluster: str) -> dict[str, Any]:
    """Seconds of the step of graph `name` by the plan that is found, and by its bounds."""
    problem = Captured.saved(name).problem(mesh, cluster)
    start = time.process_time()
    plan = RhinoPlanner().solve(problem)
    search_cpu_s = time.process_time() - start
    known = attach_bound(plan, problem, problem.cluster).bound
    compute = attach_bound(plan.with_findings(bound_s=None), problem, problem.cluster).bound
    assert plan.cost is not None and known is not None and compute is not None, "it was priced"
    return {
        "graph": name,
        "cluster": cluster,
        "ranks": plan.mesh.size,
        "plan": str(plan.mesh),
        "step_s": plan.cost.seconds,
        "bound_s": known.seconds,
        "gap": known.gap,
        "compute_gap": compute.gap,
        "skipped_meshes": sum(one.memory_bytes is None for one in plan.findings.layouts),
        "search_cpu_s": search_cpu_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--graph", action="append", choices=saved_names(), help="only this one")
    parser.add_argument("--mesh", default="4", help="sizes of its axes, as 2x8")
    parser.add_argument("--cluster", default="rhino-m8")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    mesh = [int(size) for size in options.mesh.split("x")]
    rows = []
    for name in options.graph or saved_names():
        rows.append(measure(name, mesh, options.cluster))
        print(rows[-1], flush=True)
    gaps = np.array([row["gap"] for row in rows])
    print(f"{np.mean(gaps <= NEAR):.0%} within {NEAR:.0%}, {np.median(gaps):.1%} in the middle")
    save(options.json, rows)


if __name__ == "__main__":
    main()
