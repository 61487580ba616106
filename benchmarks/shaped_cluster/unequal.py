"""Plans on unequal nodes, predicted and measured: one slow link, one node with a third of the CPU.

    sudo python -m benchmarks.shaped_cluster --unequal [--quick] [--json FILE] [--plan NAME ...]

Four nodes of one rank each: quotas of cores make the last one slow, and the second one has a slow
link. They are calibrated first, as a user would (`tap.calibrate`); then a GPT trains under a dozen
plans that the public API was asked for, each in a job of its own: by data parallelism, by
Megatron's layout, in pipelines, and as `pipeline="auto"` chooses. Told are the seconds of a step
that each plan is predicted to take and the median of those that the slowest rank took; how much
faster the choice is than data parallelism and Megatron's layout, how near to the best, and
Spearman's rank correlation of all. Linux, root, `ip` and `tc` (iproute2) and cgroup v1 are needed,
and two cores that nothing else uses.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.correlation import shown, spearman
from benchmarks.results import save
from benchmarks.shaped_cluster import cores, namespaces
from benchmarks.shaped_cluster.config import MARK
from benchmarks.shaped_cluster.job import run_module
from benchmarks.shaped_cluster.namespaces import ClusterError, Node
from benchmarks.shaped_cluster.unequal_config import CHOSEN, DATA, MEGATRON, NAMES, Config
from tfpar.observability.report.tables import render_table

CORES = (0.5, 0.5, 0.5, 0.5 / 3)
MBITS = (1000.0, 200.0, 1000.0, 1000.0)
SIZE = {"vocabulary": 8000, "length": 128, "hidden": 256, "heads": 4, "num_layers": 4}
QUICK_SIZE = {"vocabulary": 500, "length": 16, "hidden": 64, "heads": 4, "num_layers": 4}
QUICK = (DATA, CHOSEN)
TIMEOUT_S = 900.0
LOSS_TOLERANCE = 1e-3
GOOD_RHO, GOOD_CHOICE, GOOD_SPEED = 0.9, 1.05, 1.3
BACKENDS = ("tensorflow", "horovod")
WORKER = "benchmarks.shaped_cluster.unequal_worker"
NOT_POSSIBLE = 2  # exit code


def measure(
    config: Config, plans: Sequence[str], backend: str, path: str | None
) -> list[dict[str, Any]]:
    """A row for each plan; the first has the cluster that calibration found.

    Args:
        config: without a plan and places.
        backend: of `tfpar run`, which carries what ranks send each other.
        path: of a file for the rows, written after each.

    Raises:
        ClusterError: no cluster can be made, a rank has failed, or a plan computes something else
            than the others.
    """
    rows: list[dict[str, Any]] = []
    with (
        namespaces.cluster(len(config.cores)) as nodes,
        cores.groups(nodes, min(config.cores)) as groups,
        tempfile.TemporaryDirectory() as folder,
    ):
        for node, mbit in zip(nodes, MBITS, strict=True):
            namespaces.limit_link(node, mbit)
        config = config.at(machines=f"{folder}/machines.toml", groups=groups.folder)
        run = functools.partial(_ranks, nodes, first=groups.first, backend=backend)
        machines = run(config)[0]
        for plan in plans:
            row = _row(plan, run(config.at(plan=plan)))
            _check_loss(row, rows[0] if rows else row)
            rows.append(row if rows else {**row, "backend": backend, "cluster": machines})
            save(path, rows)
    return rows


def _ranks(nodes: Sequence[Node], config: Config, first: str, backend: str) -> list[dict[str, Any]]:
    """What each rank of a job has told."""
    what, start = config.plan or "calibration", time.monotonic()
    texts = run_module(nodes, 1, [WORKER, config.to_json()], TIMEOUT_S, first, backend)
    print(f"{what}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return [_result(text) for text in texts]


def _result(text: str) -> dict[str, Any]:
    for line in text.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise ClusterError(f"A rank has ended without a result: {text[-3000:]}")


def _row(plan: str, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the ranks' figures; the slowest rank's time is the step's."""
    seconds = [max(times) for times in zip(*(rank.pop("steps_s") for rank in ranks), strict=True)]
    return {
        "plan": plan,
        "measured_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        **ranks[0],
        "cpu_s": [rank["cpu_s"] for rank in ranks],
    }


def _check_loss(row: dict[str, Any], other: dict[str, Any]) -> None:
    mine, theirs = row["first_loss"], other["first_loss"]
    if abs(mine - theirs) > LOSS_TOLERANCE * abs(theirs):
        raise ClusterError(
            f"The first loss is {mine:g} with the plan {row['plan']!r}, but {theirs:g} with "
            f"{other['plan']!r}."
        )


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """What the rows come to: Spearman's `rho`; how many times as fast as `data` parallelism and as
    `megatron` the chosen plan is, and how many times as long as the `best` measured it takes."""
    took = {row["plan"]: row["measured_s"] for row in rows}
    found: dict[str, float | None] = {
        "rho": spearman([row["predicted_s"] for row in rows], [*took.values()])
    }
    if CHOSEN in took:
        found |= {name: took[name] / took[CHOSEN] for name in (DATA, MEGATRON) if name in took}
        found["best"] = took[CHOSEN] / min(took.values())
    return found


def layout(row: dict[str, Any]) -> str:
    """What a plan is, in words."""
    if "stages" in row:
        order = row["ranks"] or [*range(len(CORES))]
        size = len(order) // row["stages"]
        sets = [order[i : i + size] for i in range(0, len(order), size)]
        ranks = ", ".join("+".join(map(str, some)) for some in sets)
        return f"ranks {ranks}; {row['microbatches']} microbatches"
    shares = "".join(f", shares {'/'.join(map(str, some))}" for some in row["shares"].values())
    return row["mesh"] + shares


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table, and what it comes to."""
    best = min(row["measured_s"] for row in rows)
    cells = [
        (
            row["plan"],
            layout(row),
            f"{row['predicted_s']:.2f}",
            f"{row['measured_s']:.2f}",
            f"{row['min_s']:.2f}-{row['max_s']:.2f}",
            f"{row['predicted_s'] / row['measured_s']:.2f}",
            "*" if row["measured_s"] == best else "",
        )
        for row in rows
    ]
    columns = ("plan", "layout", "predicted s", "s/step", "min-max", "ratio", "")
    text = [render_table("A step (* the fastest)", columns, cells, numeric=(2, 3, 4, 5))]
    found = summary(rows)
    rho = shown(found["rho"])
    text.append(f"Spearman's rho over {len(rows)} plans: {rho} (wanted {GOOD_RHO})")
    for name in (DATA, MEGATRON):
        if found.get(name) is not None:
            text.append(
                f"chosen is {found[name]:.2f} times as fast as {name} (wanted {GOOD_SPEED})"
            )
    if found.get("best") is not None:
        text.append(f"chosen / best measured: {found['best']:.3f} (wanted {GOOD_CHOICE})")
    return "\n".join(text)


def add_options(parser: argparse._ArgumentGroup) -> None:
    """Those that are of this benchmark alone."""
    parser.add_argument("--plan", choices=NAMES, action="append", help="default: all")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0])
    parser.add_argument(
        "--calibration", type=float, default=90.0, metavar="SECONDS", help="default: 90"
    )


def run(options: argparse.Namespace) -> int:
    """Measure and report; the exit code."""
    why = cores.obstacle()
    if why is not None:
        print(why, file=sys.stderr)
        return NOT_POSSIBLE
    config = Config(
        size=QUICK_SIZE if options.quick else SIZE,
        cores=CORES,
        batch=16,
        microbatches=8,
        steps=options.steps,
        calibration_s=options.calibration / (3 if options.quick else 1),
    )
    plans = options.plan or (QUICK if options.quick else NAMES)
    print(report(measure(config, plans, options.backend, options.json)))
    return 0
