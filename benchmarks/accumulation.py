"""Gradient accumulation: peak memory and CPU time of a step by the number of microbatches.

    python -m benchmarks.accumulation [--microbatches 1 2 4 8 16] [--json FILE]

A deep MLP whose activations are most of its memory, on one rank, each number in a process of its
own. Peaks are what the operating system says that the process had resident beyond what it had
before its first step, TensorFlow's own buffers included; under tfpar no weight is stored before.
Predicted ones are the plan's (`Cost.memory_bytes`). CPU time is that of the second step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from benchmarks.results import save
from benchmarks.workers import Worker, serve

WIDTH, LAYERS, BATCH = 1024, 12, 8192


def _model() -> Any:
    import keras

    h = inputs = keras.Input((WIDTH,))
    for i in range(LAYERS):
        h = keras.layers.Dense(WIDTH, "gelu", name=f"fc{i}")(h)
    model = keras.Model(inputs, keras.layers.Dense(8, name="head")(h))
    model.compile("adam", "mse", jit_compile=False)
    return model


def _resident(key: str) -> int:
    """`VmHWM` (the most so far) or `VmRSS` (now) of this process, in bytes."""
    with open("/proc/self/status", encoding="utf-8") as status:
        (line,) = (line for line in status if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def measured(microbatches: int) -> dict[str, Any]:
    """Train two steps; 0 microbatches are plain Keras."""
    import keras
    import numpy as np

    import tfpar as tap

    keras.utils.set_random_seed(0)
    if microbatches:
        pipeline = tap.Pipeline(microbatches=microbatches)
        with tap.auto_parallel([1], pipeline=pipeline, verbose=0):
            model = _model()
    else:
        model = _model()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, WIDTH), "float32")
    y = rng.standard_normal((BATCH, 8), "float32")
    before = _resident("VmRSS")
    losses = model.fit(x, y, batch_size=BATCH, verbose=0).history["loss"]
    began = os.times()
    losses += model.fit(x, y, batch_size=BATCH, verbose=0).history["loss"]
    ended = os.times()
    cost = tap.plan_of(model).cost if microbatches else None
    return {
        "microbatches": microbatches,
        "peak_bytes": _resident("VmHWM") - before,
        "predicted_bytes": cost and cost.memory_bytes,
        "cpu_s": ended.user + ended.system - began.user - began.system,
        "losses": losses,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| microbatches | peak MiB | predicted MiB | CPU s | loss |", "|---" * 5 + "|"]
    for row in rows:
        predicted = f"{row['predicted_bytes'] / 2**20:.0f}" if row["predicted_bytes"] else "-"
        lines.append(
            f"| {row['microbatches'] or 'plain Keras'} | {row['peak_bytes'] / 2**20:.0f} "
            f"| {predicted} | {row['cpu_s']:.2f} | {row['losses'][-1]:.6f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(lambda request: measured(**request))
        return
    rows = []
    for microbatches in [0, *args.microbatches]:
        worker = Worker("benchmarks.accumulation", {"microbatches": microbatches})
        rows.append(worker.ask({"microbatches": microbatches}))
        worker.close()
        print(json.dumps(rows[-1]), file=sys.stderr)
    print(table(rows))
    save(args.json, rows)


if __name__ == "__main__":
    main()
