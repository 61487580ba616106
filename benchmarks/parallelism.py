"""Memory and steps of one GPT under every kind of parallelism: ZeRO's stages, tensor, sequence,
context and pipeline parallelism, and what the planner takes.

    python -m benchmarks.parallelism [--ranks N] [--layout NAME] [--in-process] [--json FILE]
    python -m benchmarks.parallelism --long 16384 [--ranks N] [--json FILE]

Each layout is trained by processes of its own (with `--in-process`, by ranks in one, whose memory
is then that of all). Of a rank's memory the prediction stands beside what the peak of its resident
memory grows by from a first step of a tiny model on; both are of the fullest rank. Steps are
medians over processes that share this machine's cores: ratios mean something, seconds little.
`--long` trains one layer on one sequence of so many tokens: whole and on blocks on one device, and
under context parallelism.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.pipeline.resident import resident
from benchmarks.results import save
from benchmarks.workers import ROOT

SIZE = {"vocabulary": 2000, "length": 64, "hidden": 512, "heads": 8, "num_layers": 12}
LONG = {"vocabulary": 100, "hidden": 64, "heads": 1, "num_layers": 1}
BATCH, STEPS = 8, 6
LAYOUTS = (
    "data",
    "stage 1",
    "stage 2",
    "stage 3",
    "stage 3, kept",
    "tensor",
    "tensor and sequence",
    "context",
    "pipeline",
    "auto",
)
"""Kinds of parallelism; in "tensor and sequence", norms are split along the sequence."""
MARK = "parallelism: "
_TIMEOUT_S = 1800


# --- a rank ------------------------------------------------------------------------------------


def measure(layout: str, ranks: int, length: int | None = None) -> dict[str, Any]:
    """Train under one layout: what a rank stores and a step takes.

    Args:
        length: of the one sequence of a long training.
    """
    import keras
    import numpy as np

    import tfpar as tap
    from benchmarks import models
    from tfpar.tf.keras.adapter import parallel_model

    keras.utils.set_random_seed(0)
    warm = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    warm.compile("adam", "mse", jit_compile=False)
    ones = np.ones((8, 8), "float32")
    warm.train_on_batch(ones, ones)  # what the libraries load on their first step
    before = resident("VmHWM")
    size, batch, steps = SIZE, BATCH, STEPS
    if length is not None:
        size, batch, steps = {**LONG, "length": length}, 1, 1
    mesh, constraints, options = _laid_out(layout, ranks)
    with tap.auto_parallel(tap.split(mesh), constraints, **options):
        model = models.compile_model(models.gpt(**size))
    x, y = models.batch_of(model, batch)
    model.train_on_batch(x, y)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        model.train_on_batch(x, y)
        seconds.append(time.perf_counter() - start)
    grown = resident("VmHWM") - before
    cost = _cost(tap.plan_of(model), parallel_model(model).executables["train"], ranks)
    return {
        "predicted_bytes": cost.memory_bytes,
        "stored_bytes": cost.weight_bytes + cost.state_bytes,
        "grown_bytes": grown,
        "predicted_s": cost.seconds,
        "step_s": statistics.median(seconds),
    }


def _machines(ranks: int) -> Any:
    from tfpar.cluster import Cluster, Device, Level

    device = Device({"float32": 1e11}, 2**36, 1e11)
    return Cluster.regular("ranks", device, [Level(ranks, 1e9, 1e-5)])


def _cost(plan: Any, step: Any, ranks: int) -> Any:
    """The cost of the step that ran; of a pipeline, what was planned."""
    from tfpar.cost.evaluation import evaluate
    from tfpar.ir.roles import Roles

    if plan.stages is not None:
        return plan.cost
    gradients = [t for g in step.captured.gradients for t in g.tensors]
    laid = step.partitioned
    return evaluate(laid, _machines(ranks), Roles.of(laid.graph, gradients))


def _laid_out(layout: str, ranks: int) -> tuple[dict[str, int], Sequence[Any], dict[str, Any]]:
    """The mesh, the constraints and the options of a layout."""
    import tfpar as tap
    from benchmarks.models.layouts import GPT_MEGATRON

    options: dict[str, Any] = {"planner": None, "cluster": _machines(ranks)}
    megatron = tap.from_layout_map(GPT_MEGATRON)
    if layout in ("data", "whole"):
        return {"data": ranks}, [tap.batch("data")], options
    if layout == "blocks":
        return {"data": ranks}, [tap.batch("data")], {**options, "attention": "blockwise"}
    if layout == "tensor":
        return {"model": ranks}, [*megatron, tap.batch()], options
    if layout == "tensor and sequence":
        norms = tap.shard_output(".*_ln[12]", 1, "model")
        return {"model": ranks}, [*megatron, norms, tap.batch()], options
    if layout == "context":
        return {"context": ranks}, [tap.context_parallel("context")], options
    if layout == "pipeline":
        pipeline = tap.Pipeline(stages=ranks, microbatches=4)
        return {"data": ranks}, [], {**options, "pipeline": pipeline}
    if layout == "auto":
        return {"data": ranks}, [], {**options, "planner": "auto"}
    stage = tap.fsdp("data", stage=int(layout.split()[1].strip(",")), keep="kept" in layout)
    return {"data": ranks}, [stage], options


# --- the run ---------------------------------------------------------------------------------


def run(layout: str, ranks: int, in_process: bool, length: int | None = None) -> dict[str, Any]:
    """The row of one layout: the most of all ranks."""
    worker = [sys.executable, "-m", "benchmarks.parallelism", "--worker"]
    worker.append(json.dumps([layout, ranks, length]))
    if ranks > 1 and not in_process:
        worker = [sys.executable, "-m", "tfpar", "run", "-np", str(ranks), *worker]
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    done = subprocess.run(
        worker, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=_TIMEOUT_S
    )
    found = [
        json.loads(line.partition(MARK)[2]) for line in done.stdout.splitlines() if MARK in line
    ]
    if done.returncode or not found:
        raise SystemExit(f"{layout} on {ranks} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    most = {name: max(row[name] for row in found) for name in found[0]}
    return {"ranks": ranks, "layout": layout, "in_process": in_process, **most}


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    from tfpar.observability.report.tables import render_table

    cells = [
        (
            str(row["ranks"]),
            row["layout"],
            f"{row['stored_bytes'] / 1e6:.0f}",
            f"{row['predicted_bytes'] / 1e6:.0f}",
            f"{row['grown_bytes'] / 1e6:.0f}",
            f"{row['predicted_ratio']:.2f}",
            f"{row['step_ratio']:.2f}",
        )
        for row in rows
    ]
    columns = (
        "ranks",
        "layout",
        "weights, slots MB",
        "predicted MB",
        "grown MB",
        "predicted",
        "step",
    )
    return render_table("Parallelism", columns, cells, numeric=(0, 2, 3, 4, 5, 6))


def main() -> None:
    parser = argparse.ArgumentParser(description="memory and steps of one GPT")
    parser.add_argument("--ranks", type=int, action="append", help="default: 1, 2 and 4")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="default: all")
    parser.add_argument("--in-process", action="store_true", help="ranks in one process")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--long", type=int, help="tokens of one sequence, on one layer")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(f"{MARK}{json.dumps(measure(*json.loads(options.worker)))}", flush=True)
        return
    if options.long:
        cases = [("whole", 1), ("blocks", 1), *(("context", n) for n in options.ranks or (2, 4))]
    else:
        names = options.layout or LAYOUTS
        cases = [
            (n, k) for k in options.ranks or (1, 2, 4) for n in (names if k > 1 else names[:1])
        ]
    rows: list[dict[str, Any]] = []
    for layout, ranks in cases:
        row = run(layout, ranks, options.in_process, options.long)
        like = [r for r in rows if options.long or r["ranks"] == ranks]
        beside = next(iter(like), row)
        ratios = {f"{n}_ratio": row[f"{n}_s"] / beside[f"{n}_s"] for n in ("predicted", "step")}
        memory = {
            f"{n}_part": row[f"{n}_bytes"] / beside[f"{n}_bytes"] for n in ("predicted", "grown")
        }
        rows.append({**row, **ratios, **memory})
        print(f"{ranks} ranks, {layout}", flush=True)
    print(report(rows))
    save(options.json, rows)


if __name__ == "__main__":
    main()
