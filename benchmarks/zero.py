"""Memory and steps of a 12-layer GPT under data parallelism and ZeRO's stages.

    python -m benchmarks.zero [--ranks N ...] [--in-process] [--json FILE]

Each layout is trained by processes of its own (with `--in-process`, by ranks in one, whose memory
is then that of all). Of a rank's memory the prediction stands beside what the peak of its resident
memory grows by from a first step of a tiny model on; both are of the fullest rank. Steps are
medians over processes that share this machine's cores: ratios mean something, seconds little.
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
BATCH, STEPS = 8, 6
LAYOUTS = ("data", "stage 1", "stage 2", "stage 3", "stage 3, kept")
MARK = "zero: "
_TIMEOUT_S = 1800


# --- a rank ------------------------------------------------------------------------------------


def measure(layout: str, ranks: int) -> dict[str, Any]:
    """Train under one layout: what a rank stores and a step takes."""
    import keras
    import numpy as np

    import tfpar as tap
    from benchmarks import models
    from tfpar.cluster import Cluster, Device, Level
    from tfpar.cost.evaluation import evaluate
    from tfpar.ir.roles import Roles
    from tfpar.tf.keras.adapter import parallel_model

    keras.utils.set_random_seed(0)
    warm = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    warm.compile("adam", "mse", jit_compile=False)
    ones = np.ones((8, 8), "float32")
    warm.train_on_batch(ones, ones)  # what the libraries load on their first step
    before = resident("VmHWM")
    with tap.auto_parallel(tap.split({"data": ranks}), _constraints(layout), planner=None):
        model = models.compile_model(models.gpt(**SIZE))
    x, y = models.batch_of(model, BATCH)
    model.train_on_batch(x, y)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        model.train_on_batch(x, y)
        seconds.append(time.perf_counter() - start)
    grown = resident("VmHWM") - before
    step = parallel_model(model).executables["train"]
    gradients = [t for g in step.captured.gradients for t in g.tensors]
    laid = step.partitioned
    device = Device({"float32": 1e11}, 1e11, 1e11)
    machines = Cluster.regular("ranks", device, [Level(ranks, 1e9, 1e-5)])
    cost = evaluate(laid, machines, Roles.of(laid.graph, gradients))
    return {
        "predicted_bytes": cost.memory_bytes,
        "stored_bytes": cost.weight_bytes + cost.state_bytes,
        "grown_bytes": grown,
        "step_s": statistics.median(seconds),
        "collectives": len(laid.collectives()),
    }


def _constraints(layout: str) -> list[Any]:
    import tfpar as tap

    if layout == "data":
        return [tap.batch("data")]
    return [tap.fsdp("data", stage=int(layout.split()[1].strip(",")), keep="kept" in layout)]


# --- the run ---------------------------------------------------------------------------------


def run(layout: str, ranks: int, in_process: bool) -> dict[str, Any]:
    """The row of one layout: the most of all ranks."""
    worker = [sys.executable, "-m", "benchmarks.zero", "--worker", json.dumps([layout, ranks])]
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
            f"{row['step_ratio']:.2f}",
            str(row["collectives"]),
        )
        for row in rows
    ]
    columns = ("ranks", "layout", "weights, slots MB", "predicted MB", "grown MB", "step", "moves")
    return render_table("ZeRO", columns, cells, numeric=(0, 2, 3, 4, 5, 6))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append", help="default: 1, 2 and 4")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="default: all")
    parser.add_argument("--in-process", action="store_true", help="ranks in one process")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(f"{MARK}{json.dumps(measure(*json.loads(options.worker)))}", flush=True)
        return
    rows = []
    for ranks in options.ranks or (1, 2, 4):
        for layout in options.layout or (LAYOUTS if ranks > 1 else LAYOUTS[:1]):
            row = run(layout, ranks, options.in_process)
            beside = next((r for r in rows if r["ranks"] == ranks and r["layout"] == "data"), row)
            rows.append({**row, "step_ratio": row["step_s"] / beside["step_s"]})
            print(f"{ranks} ranks, {layout}", flush=True)
    print(report(rows))
    save(options.json, rows)


if __name__ == "__main__":
    main()
