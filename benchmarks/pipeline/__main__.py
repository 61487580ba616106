"""The command: which part, and its table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.pipeline.config import Memory
from benchmarks.results import save
from benchmarks.shaped_cluster.namespaces import ClusterError, obstacle
from scripts.benchmark_columns import cells, pipelines
from scripts.tables import markdown_table

NOT_POSSIBLE = 2  # exit code
LAYERS = 24
STEPS = 3

Rows = list[dict[str, Any]]


def links() -> Rows:
    from benchmarks.pipeline.links import measure

    return measure(STEPS)


def in_process() -> Rows:
    from benchmarks.pipeline.in_process import measure

    return measure(STEPS)


def memory() -> Rows:
    from benchmarks.pipeline.memory import measure

    return measure(Memory())


def first_step() -> Rows:
    """From `fit` to the end of the first step; without a search, each alone in a process."""
    from benchmarks.step import measure

    rows = []
    for layout in ("data", "pipeline"):
        contender = {"system": "tfpar", "ranks": 4, "layout": layout}
        rows += measure("gpt", 0, 1, [contender], {"num_layers": LAYERS})
    return [
        {
            "layout": row["layout"],
            "layers": LAYERS,
            "cpu_s": row["first_step_cpu_s"],
            "ratio": row["first_step_cpu_s"] / rows[0]["first_step_cpu_s"],
        }
        for row in rows
    ]


PARTS: dict[str, tuple[Callable[[], Rows], list[cells.Column]]] = {
    "links": (links, pipelines.PIPELINE_LINKS),
    "in-process": (in_process, pipelines.PIPELINE_IN_PROCESS),
    "memory": (memory, pipelines.PIPELINE_MEMORY),
    "first-step": (first_step, pipelines.PIPELINE_FIRST_STEP),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline",
        description="Pipelines: time of a step, memory, and the first step.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    for name in PARTS:
        which.add_argument(f"--{name}", action="store_const", const=name, dest="part")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    why = obstacle() if options.part == "links" else None
    if why is not None:
        print(why, file=sys.stderr)
        return NOT_POSSIBLE
    measure, columns = PARTS[options.part]
    try:
        rows = measure()
    except (ClusterError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    heads = [name for name, _ in columns]
    print(markdown_table(heads, [[cell(row) for _, cell in columns] for row in rows]))
    save(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
