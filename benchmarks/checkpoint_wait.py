"""How long a step waits for a checkpoint: written at once, and behind the steps that come next.

    python -m benchmarks.checkpoint_wait [--mb 100] [--folder DIR] [--json FILE]

An MLP under Adam, in one process and split over two. Fits with either kind of checkpoint take
turns. What a step waits is the time in the callback after steps that save. The step after that is
shown beside: it copies what it updates, as long as the checkpoint is not written, and shares the
cores and the memory with the thread that writes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import save
from benchmarks.workers import ROOT

EVERY, SAVES, TURNS = 20, 3, 2
KINDS = ("none", "at once", "behind")
_WIDTH, _BATCH = 1024, 64
_TIMEOUT_S = 900


# --- a process that is measured ------------------------------------------------------


def _model(mb: int, processes: int) -> Any:
    """An MLP with so many MB of weights; over two processes, each kernel is split."""
    import keras

    import tfpar as tap

    keras.utils.set_random_seed(0)
    blocks = max(1, mb * 1_000_000 // (2 * 4 * _WIDTH**2))
    split = [
        tap.shard(r"up_\d+/kernel", dim=1, axis="model"),
        tap.shard(r"down_\d+/kernel", dim=0, axis="model"),
    ]
    with tap.auto_parallel(tap.Mesh.of({"model": processes}), split, planner=None):
        x = inputs = keras.Input((_WIDTH,))
        for i in range(blocks):
            h = keras.layers.Dense(_WIDTH, "relu", name=f"up_{i}")(x)
            x = x + keras.layers.Dense(_WIDTH, name=f"down_{i}")(h)
        model = keras.Model(inputs, x)
        model.compile("adam", "mse", jit_compile=False)
    return model


def measured(mb: int, processes: int, folder: str) -> list[dict[str, Any]]:
    """For each kind, what steps took and waited, in seconds; and what a checkpoint holds."""
    import keras
    import numpy as np

    import tfpar as tap

    class Steps(keras.callbacks.Callback):
        """When each step begins."""

        def __init__(self) -> None:
            super().__init__()
            self.begun: list[float] = []

        def on_train_batch_begin(self, batch, logs=None):
            self.begun.append(time.perf_counter())

    class Timed(tap.Checkpoint):
        """What it takes after each step that saves."""

        waited: list[float]

        def on_train_batch_end(self, batch, logs=None):
            begin = time.perf_counter()
            super().on_train_batch_end(batch, logs)
            if self._saved == self.position.step:
                self.waited.append(time.perf_counter() - begin)

    model = _model(mb, processes)
    rng = np.random.default_rng(0)
    steps = EVERY * SAVES + EVERY - 1
    x = rng.normal(size=(_BATCH * steps, _WIDTH)).astype("float32")
    model.fit(x[: 2 * _BATCH], x[: 2 * _BATCH], batch_size=_BATCH, verbose=0)
    found: dict[str, dict[str, list[float]]] = {
        kind: {"step": [], "waited": [], "next": []} for kind in KINDS
    }
    stored = 0
    for turn in range(TURNS):
        for kind in KINDS:
            watch, callbacks = Steps(), []
            place = os.path.join(folder, f"{kind}-{turn}")
            if kind != "none":
                kept = Timed(place, every=EVERY, keep=1, background=kind == "behind")
                kept.waited = found[kind]["waited"]
                callbacks = [kept]
            model.fit(x, x, batch_size=_BATCH, verbose=0, callbacks=[watch, *callbacks])
            took = np.diff(watch.begun).tolist()
            found[kind]["step"] += took
            found[kind]["next"] += took[EVERY::EVERY]
            if kind != "none" and not stored:
                stored = sum(f.stat().st_size for f in Path(place).rglob("*") if f.is_file())
    return [{"kind": kind, "bytes": stored, **found[kind]} for kind in KINDS]


# --- the run -------------------------------------------------------------------------


def run(mb: int, processes: int, folder: str | None) -> list[dict[str, Any]]:
    """A row for each kind of checkpoint."""
    env = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    with tempfile.TemporaryDirectory(dir=folder) as place:
        config = {"mb": mb, "processes": processes, "folder": place}
        worker = [sys.executable, "-m", "benchmarks.checkpoint_wait", "--worker"]
        launcher = [sys.executable, "-m", "tfpar", "run", "-np", str(processes)]
        command = [*(launcher if processes > 1 else []), *worker, json.dumps(config)]
        subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=_TIMEOUT_S)
        measured = json.loads(Path(place, "measured.json").read_text())
    rows = []
    for kind in measured:
        waited = kind["waited"]
        rows.append(
            {
                "processes": processes,
                "kind": kind["kind"],
                "bytes": kind["bytes"],
                "step_s": statistics.median(kind["step"]),
                "next_s": statistics.median(kind["next"]),
                "saves": len(waited),
                "waited_s": statistics.median(waited) if waited else None,
                "longest_s": max(waited) if waited else None,
            }
        )
    at_once = next(row["waited_s"] for row in rows if row["kind"] == "at once")
    for row in rows:
        if row["waited_s"] is not None:
            row["share"] = row["waited_s"] / at_once
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, default=100, help="of weights; Adam adds twice that")
    parser.add_argument("--folder", help="where checkpoints are written; by default /tmp or so")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        config = json.loads(options.worker)
        found = measured(**config)
        if int(os.environ.get("TFPAR_RANK") or os.environ.get("HOROVOD_RANK") or 0) == 0:
            Path(config["folder"], "measured.json").write_text(json.dumps(found))
        return 0
    rows = []
    for processes in (1, 2):
        for row in run(options.mb, processes, options.folder):
            rows.append(row)
            print(json.dumps(row), flush=True)
    save(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
