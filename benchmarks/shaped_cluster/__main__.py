"""The command: which clusters, models and bandwidths, and the table."""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.results import save
from benchmarks.shaped_cluster import unequal
from benchmarks.shaped_cluster.config import MODELS, Config
from benchmarks.shaped_cluster.job import run_ranks
from benchmarks.shaped_cluster.namespaces import ClusterError, Node, cluster, obstacle
from tfpar.observability.report.tables import render_table

CLUSTERS = ((2, 2), (4, 1))
QUICK_CLUSTERS = ((2, 1),)
MBITS = (None, 1000.0, 200.0, 50.0)
TIMEOUT_S = 1200.0
LOSS_TOLERANCE = 1e-3
NOT_POSSIBLE = 2  # exit code

COLUMNS = (
    "ranks",
    "Mbit/s",
    "layout",
    "s/step",
    "min-max",
    "plan s",
    "sent MB",
    "plan MB",
    "ratio",
    "idle MB",
    "",
)


def measure(
    model: str, nodes: int, ranks_per_node: int, mbits: Sequence[float | None], steps: int
) -> list[dict[str, Any]]:
    """A row for each bandwidth and layout; bytes are those that a node sends in a step.

    Every plan has a job of its own: data parallelism, Megatron's, and one searched for each
    bandwidth.

    Raises:
        ClusterError: no cluster can be made, a rank has failed, or a layout computes something
            else than the others.
    """
    plans = [("data", tuple(mbits)), ("megatron", tuple(mbits)), *(("chosen", (m,)) for m in mbits)]
    rows: list[dict[str, Any]] = []
    with cluster(nodes) as hosts, tempfile.TemporaryDirectory() as folder:
        for layout, at in plans:
            config = Config(
                model=model,
                layout=layout,
                nodes=nodes,
                ranks_per_node=ranks_per_node,
                mbits=at,
                machines=f"{folder}/machines.toml",
                steps=steps,
            )
            rows += measure_layout(hosts, config)
    for row in rows:
        _check_loss(row, rows[0])
    return sorted(rows, key=lambda row: mbits.index(row["mbit"]))


def measure_layout(nodes: Sequence[Node], config: Config) -> list[dict[str, Any]]:
    """A row for each bandwidth.

    Raises:
        ClusterError: a rank has failed.
    """
    ranks = run_ranks(nodes, config, TIMEOUT_S)
    return [_row(config, mbit, [rank[i] for rank in ranks]) for i, mbit in enumerate(config.mbits)]


def _row(config: Config, mbit: float | None, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the ranks' figures at one bandwidth; the slowest rank's time is the step's."""
    nodes, plan = ranks[:: config.ranks_per_node], ranks[0]["plan"]
    steps = range(config.steps)
    seconds = [max(rank["steps"][i]["seconds"] for rank in ranks) for i in steps]
    sent = [statistics.mean(node["steps"][i]["sent"] for node in nodes) for i in steps]
    sent_bytes, planned_bytes = statistics.median(sent), statistics.mean(plan["bytes"])
    step_s = statistics.median(seconds)
    return {
        "model": config.model,
        "cluster": config.cluster,
        "mbit": mbit,
        "layout": config.layout,
        "step_s": step_s,
        "min_s": min(seconds),
        "max_s": max(seconds),
        "planned_s": plan["seconds"],
        "sent_bytes": sent_bytes,
        "planned_bytes": planned_bytes,
        "ratio": sent_bytes / planned_bytes if planned_bytes else None,
        "idle_bytes": step_s * statistics.mean(node["idle_rate"] for node in nodes),
        "first_loss": ranks[0]["first_loss"],
        "plan": plan,
    }


def _check_loss(row: dict[str, Any], other: dict[str, Any]) -> None:
    mine, theirs = row["first_loss"], other["first_loss"]
    if abs(mine - theirs) > LOSS_TOLERANCE * abs(theirs):
        raise ClusterError(
            f"{_place(row)}: the first loss is {mine:g} with the layout {row['layout']!r}, but "
            f"{theirs:g} with {other['layout']!r}."
        )


def fastest(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> bool:
    """Whether no other layout has a shorter step at the same place."""
    place = [row[key] for key in ("model", "cluster", "mbit")]
    rivals = [r for r in rows if [r[key] for key in ("model", "cluster", "mbit")] == place]
    return row["step_s"] == min(r["step_s"] for r in rivals)


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table, and what was chosen."""
    cells = [
        (
            f"{row['model']} {row['cluster']}",
            "no limit" if row["mbit"] is None else f"{row['mbit']:g}",
            row["layout"],
            f"{row['step_s']:.2f}",
            f"{row['min_s']:.2f}-{row['max_s']:.2f}",
            f"{row['planned_s']:.2f}",
            f"{row['sent_bytes'] / 1e6:.2f}",
            f"{row['planned_bytes'] / 1e6:.2f}",
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"{row['idle_bytes'] / 1e6:.2f}",
            "*" if fastest(rows, row) else "",
        )
        for row in rows
    ]
    title = "A step (* the fastest), and what each node sends (idle: what Horovod sends anyway)"
    table = render_table(title, COLUMNS, cells, numeric=(1, 3, 4, 5, 6, 7, 8, 9))
    return "\n".join([table, "Chosen:", *_choices(rows)])


def _choices(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if row["layout"] == "chosen":
            plan = row["plan"]
            yield (
                f"  {_place(row)}: {plan['mesh']}, batch over "
                f"{' and '.join(plan['batch_axes']) or 'nothing'}, {len(plan['split'])} of "
                f"{plan['weights']} weights split, {plan['collectives']} collectives"
            )


def _place(row: dict[str, Any]) -> str:
    link = "without a limit" if row["mbit"] is None else f"at {row['mbit']:g} Mbit/s"
    return f"{row['model']} on {row['cluster']} {link}"


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shaped_cluster",
        description="Ranks in network namespaces with shaped links: time and bytes of a step.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="under 3 minutes: a model, 2 ranks, a bandwidth"
    )
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument(
        "--mbit", type=float, action="append", help="0: no limit; default: 0, 1000, 200, 50"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed at each bandwidth (default: 3)")
    parser.add_argument(
        "--unequal", action="store_true", help="nodes of unequal speed and links, plan by plan"
    )
    unequal.add_options(parser.add_argument_group("with --unequal"))
    return parser.parse_args()


def main() -> int:
    options = _options()
    why = obstacle()
    if why is not None:
        print(why, file=sys.stderr)
        return NOT_POSSIBLE
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        return unequal.run(options) if options.unequal else run(options)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run(options: argparse.Namespace) -> int:
    """Measure and report, layout by layout at several bandwidths; the exit code."""
    clusters = QUICK_CLUSTERS if options.quick else CLUSTERS
    given = tuple(mbit or None for mbit in options.mbit or ())
    mbits = given or (MBITS[2:3] if options.quick else MBITS)
    rows: list[dict[str, Any]] = []
    for model in options.model or (MODELS[1:] if options.quick else MODELS):
        for nodes, each in clusters:
            found = measure(model, nodes, each, mbits, options.steps)
            print(report(found), flush=True)
            rows += found
            save(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
