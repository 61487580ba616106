"""Write the figures that the documentation quotes from the results of benchmarks.

    python -m scripts.benchmark_tables [--check]

A page has `<!-- begin NAME -->` and `<!-- end NAME -->` around what is written here, tables and
sentences alike, from `benchmarks/results/*.json`. To measure anew, run a benchmark with
`--json benchmarks/results/NAME.json` (`make bench-tables` runs those that take minutes), then
this. `--check` writes nothing, and fails if a page is not in step.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import sys
from collections.abc import Callable

from benchmarks.results import Result
from scripts.benchmark_columns.cells import table
from scripts.benchmark_columns.meshes import ATP_MESHES, BREAKDOWN, TRAINING_TIME, atp_selected
from scripts.benchmark_columns.mutations import caught_in_words
from scripts.benchmark_columns.pipelines import (
    ACCUMULATION,
    PIPELINE_FIRST_STEP,
    PIPELINE_IN_PROCESS,
    PIPELINE_LINKS,
    PIPELINE_MEMORY,
)
from scripts.benchmark_columns.planners import critical, depth, planners, staged
from scripts.benchmark_columns.planning import (
    LAYOUT_MAPS,
    SEARCH,
    SUBGRAPH_COLUMNS,
    before_and_after,
    planning_in_words,
)
from scripts.benchmark_columns.steps import (
    CHECKING,
    CHECKPOINT_WAIT,
    GPU,
    LONG_SEQUENCES,
    MEMORY,
    PARALLELISM,
    PREDICTION,
    PROCESSES,
    PROPAGATION,
    STEP,
    shaped,
    unequal,
)
from scripts.benchmark_columns.three_d import (
    LARGE,
    LARGE_PLANNED,
    MEASURED_STEPS,
    PLANNED_SCALE,
    PUBLISHED,
    SCALE,
    THREE_D,
    TRIALS,
    annealing,
    near_pipelines,
    tables_of_paper,
)
from scripts.benchmark_columns.throughput import chunks, contenders

_BENCHMARKS, _RHINO = "docs/benchmarks.md", "docs/rhino.md"
_TAP, _ATP, _AUTO3D = "docs/tap.md", "docs/atp.md", "docs/auto3d.md"

ROOT = pathlib.Path(__file__).parent.parent
MARKED = re.compile(r"<!-- begin ([\w-]+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a page.

    Attributes:
        page: which, from the root of the repository.
        source: the result that it is made from.
        text: what is written.
    """

    page: str
    source: str
    text: Callable[[Result], str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = False
    for name in sorted({block.page for block in BLOCKS.values()}):
        page = ROOT / name
        written = page.read_text(encoding="utf-8")
        current = in_step(written)
        if current != written:
            stale = True
            print(f"{name} is not in step" if check else name)
            if not check:
                page.write_text(current, encoding="utf-8")
    return int(check and stale)


def in_step(page: str) -> str:
    """The text of a page with every marked part written anew."""

    def written(match: re.Match[str]) -> str:
        block = BLOCKS[match[1]]
        text = block.text(Result.load(block.source))
        return f"<!-- begin {match[1]} -->\n{text}\n<!-- end {match[1]} -->"

    return MARKED.sub(written, page)


BLOCKS = {
    "mutations": Block("CONTRIBUTING.md", "mutations", caught_in_words),
    "mutations-fast": Block("CONTRIBUTING.md", "mutations_fast", caught_in_words),
    "planning-in-words": Block(_TAP, "search", planning_in_words),
    "search": Block(_TAP, "search", table(SEARCH)),
    "search-wanted": Block(_TAP, "search", before_and_after),
    "layout-maps": Block("docs/howto/keras_hub.md", "layout_maps", table(LAYOUT_MAPS)),
    "training-time": Block(_TAP, "training_time", table(TRAINING_TIME)),
    "subgraphs": Block("docs/shared_subgraphs.md", "subgraphs", table(SUBGRAPH_COLUMNS)),
    "step": Block(_BENCHMARKS, "step", table(STEP)),
    "step-searched": Block(_BENCHMARKS, "step_searched", table(STEP)),
    "step-xla": Block(_BENCHMARKS, "step_xla", table(STEP)),
    "step-processes": Block(_BENCHMARKS, "step_processes", table(PROCESSES)),
    "gpu": Block(_BENCHMARKS, "gpu", table(GPU, lambda row: "step_s" in row)),
    "propagation": Block(_BENCHMARKS, "propagation", table(PROPAGATION)),
    "checkpoint-wait": Block(
        _BENCHMARKS, "checkpoint_wait", table(CHECKPOINT_WAIT, lambda row: row["saves"] > 0)
    ),
    "parallelism": Block("docs/howto/fit_a_larger_model.md", "parallelism", table(PARALLELISM)),
    "long-sequences": Block(
        "docs/howto/train_on_long_sequences.md", "long_sequences", table(LONG_SEQUENCES)
    ),
    "checking": Block(_BENCHMARKS, "checking", table(CHECKING)),
    "shaped": Block(_BENCHMARKS, "shaped_cluster", shaped),
    "unequal": Block(_BENCHMARKS, "shaped_unequal", unequal),
    "atp-meshes": Block(_ATP, "atp", table(ATP_MESHES, lambda row: row["model"] == "M2")),
    "atp-selected": Block(_ATP, "atp", atp_selected),
    "atp-chunks": Block(_ATP, "atp_throughput", chunks),
    "atp-contenders": Block(_ATP, "atp_throughput", contenders),
    "breakdown": Block(_TAP, "breakdown", table(BREAKDOWN)),
    "accumulation": Block(_BENCHMARKS, "accumulation", table(ACCUMULATION)),
    "auto3d-tables": Block(_AUTO3D, "three_d", tables_of_paper),
    "three-d": Block(_AUTO3D, "three_d", table(THREE_D)),
    "three-d-large": Block(_AUTO3D, "three_d_large", table(LARGE)),
    "annealing": Block(_AUTO3D, "three_d_random", annealing),
    "three-d-scale": Block(_AUTO3D, "three_d_scale", table(SCALE)),
    "large-planned-16": Block(_AUTO3D, "large_planned_16", table(LARGE_PLANNED)),
    "large-planned": Block(_AUTO3D, "large_planned", table(LARGE_PLANNED)),
    "planned-scale": Block(_AUTO3D, "planned_scale", table(PLANNED_SCALE)),
    "three-d-published": Block(_AUTO3D, "three_d_published", table(PUBLISHED)),
    "measured-steps": Block(_AUTO3D, "measured_steps", table(MEASURED_STEPS)),
    "three-d-trials": Block(_AUTO3D, "three_d_trials", table(TRIALS)),
    "near-pipelines": Block(_AUTO3D, "three_d_trials", near_pipelines),
    "pipeline-links": Block(_BENCHMARKS, "pipeline_links", table(PIPELINE_LINKS)),
    "pipeline-in-process": Block(_BENCHMARKS, "pipeline_in_process", table(PIPELINE_IN_PROCESS)),
    "pipeline-memory": Block(_BENCHMARKS, "pipeline_memory", table(PIPELINE_MEMORY)),
    "pipeline-first-step": Block(_BENCHMARKS, "pipeline_first_step", table(PIPELINE_FIRST_STEP)),
    "prediction": Block(_BENCHMARKS, "prediction", table(PREDICTION)),
    "memory": Block(_BENCHMARKS, "prediction_memory", table(MEMORY)),
    "depth": Block(_RHINO, "planners_depth", depth),
    "critical": Block(_RHINO, "planners_critical", critical),
    "planners-m8": Block(_RHINO, "planners", planners("rhino-m8")),
    "planners-s1": Block(_RHINO, "planners", planners("rhino-s1")),
    "planners-stages": Block(_RHINO, "planners_stages", staged),
}

if __name__ == "__main__":
    sys.exit(main())
