"""Predicted against measured memory of a rank: what `benchmarks.prediction --memory` shows.

A plan is trained twice, in processes of their own, with small and with large tensors: the graph,
and so what compiling it takes, is the same. What the peak of the resident memory grows by, from
the one to the other, is held against what the predictions differ by. The allocator is told to
return what is freed, so that tensors are measured and not what it keeps for later.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.workers import ROOT

MARK = "@growth "
STEPS = 4
SIZES: dict[str, dict[str, tuple[dict[str, int], int]]] = {
    "gpt": {
        "small": ({"vocabulary": 512, "length": 128, "hidden": 64, "num_layers": 2}, 8),
        "large": ({"vocabulary": 8192, "length": 128, "hidden": 768, "num_layers": 2}, 16),
    },
    "wide": {"small": ({"classes": 500}, 64), "large": ({"classes": 50_000}, 256)},
}
"""By model: arguments of its builder, and a batch size."""
PLANS = {"gpt": ("data", "zero", "megatron"), "wide": ("data", "zero", "classes")}


def compare(ranks: int) -> list[dict[str, Any]]:
    """A row for each plan of each model.

    Raises:
        RuntimeError: a job has failed.
    """
    rows = []
    for model, names in PLANS.items():
        for name in names:
            small, large = (_job(model, name, ranks, size) for size in ("small", "large"))
            rows.append(
                {
                    "model": model,
                    "plan": name,
                    "predicted": large["predicted"] - small["predicted"],
                    "measured": large["peak"] - small["peak"],
                    "parts": {k: large["parts"][k] - v for k, v in small["parts"].items()},
                }
            )
    return rows


def _job(model: str, plan: str, ranks: int, size: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "-1",
        "MALLOC_MMAP_THRESHOLD_": str(64 * 1024),
        "MALLOC_TRIM_THRESHOLD_": str(64 * 1024),
    }
    command = [sys.executable, "-m", "tfpar", "run", "-np", str(ranks), sys.executable, "-m"]
    command += ["benchmarks.growth", model, plan, str(ranks), size]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=900
    )
    found = [line for line in done.stdout.splitlines() if MARK in line]
    if not found:
        raise RuntimeError(f"{model} {plan} {size}:\n{(done.stdout + done.stderr)[-3000:]}")
    return json.loads(found[0].partition(MARK)[2])


def _rank(model: str, plan: str, ranks: int, size: str) -> None:
    from benchmarks.prediction import Config, Training
    from tfpar.spec import Mesh
    from tfpar.tf.distributed.world import this_world
    from tfpar.tf.runtime.detect import detect_cluster

    arguments, batch = SIZES[model][size]
    config = Config("loopback", ranks)
    training = Training(model, plan, config, detect_cluster(Mesh.of([ranks])), arguments, batch)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew
    for _ in range(STEPS):
        training.step()
    peak = _status("VmHWM")
    world = this_world()
    if world is None or world.rank == 0:
        cost = dataclasses.asdict(training.cost)
        parts = {k: cost[k] for k in ("weight_bytes", "state_bytes", "activation_bytes")}
        row = {"peak": peak, "predicted": training.cost.memory_bytes, "parts": parts}
        print(f"{MARK}{json.dumps(row)}", flush=True)


def _status(key: str) -> int:
    """Bytes, of this process."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
