"""Memory of building a large model and taking its first step: each rank's peak beside the whole.

    python -m benchmarks.initialisation [--parameters N] [--ranks N] [--load FILE] [--json FILE]

A residual MLP in float32 under SGD without momentum, on one device with plain Keras and on many
processes, each weight split over all. Peaks are what the operating system says that a process had
resident (VmHWM) after each phase; TensorFlow alone takes over half a gigabyte. With `--load`,
weights come from that `.weights.h5` file; the ranks write it first if it is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import save
from benchmarks.workers import ROOT

BLOCKS, BATCH = 8, 2
PHASES = ("imported", "built", "loaded", "stepped", "saved")
_TIMEOUT_S = 1800


# --- a process that is measured ------------------------------------------------------


class Phases:
    """Peak resident memory and seconds at the end of each phase."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self.rows: list[dict[str, Any]] = []

    def end(self, name: str) -> None:
        seconds = time.perf_counter() - self._begin
        self.rows.append({"phase": name, "peak_bytes": _peak_bytes(), "seconds": seconds})


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: this benchmark needs Linux")


def _width(parameters: int) -> int:
    """Of a model with at least so many parameters: a block has 8 width^2 in its kernels."""
    return 64 * -int(-((parameters / 8 / BLOCKS) ** 0.5) // 64)


def _model(width: int) -> Any:
    import keras
    from keras import layers

    x = inputs = keras.Input((width,))
    for i in range(BLOCKS):
        h = layers.Dense(4 * width, activation="relu", name=f"up_{i}")(x)
        x = x + layers.Dense(width, name=f"down_{i}")(h)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=False)
    return model


def measured(width: int, ranks: int, load: str | None, save: str | None) -> dict[str, Any]:
    """Build, load, take a step, save: what this process needed for it."""
    phases = Phases()
    import keras
    import numpy as np

    if ranks > 1:
        import tfpar as tap

        split = [tap.shard(r"up_\d+/kernel", dim=1, axis="model")]
        tap.auto_parallel(tap.Mesh.of({"model": ranks}), split, planner=None)
    keras.utils.set_random_seed(0)
    phases.end("imported")
    model = _model(width)
    phases.end("built")
    if load is not None:
        model.load_weights(load)
        phases.end("loaded")
    x = np.linspace(-1, 1, BATCH * width, dtype="float32").reshape(BATCH, width)
    loss = float(model.train_on_batch(x, 0.5 * x))
    phases.end("stepped")
    if save is not None:
        model.save_weights(save)
        phases.end("saved")
    return {"parameters": model.count_params(), "loss": loss, "phases": phases.rows}


# --- the run -------------------------------------------------------------------------


def run(
    width: int, ranks: int, *, load: str | None = None, save: str | None = None
) -> list[dict[str, Any]]:
    """What each process says: one for plain Keras, else `ranks`."""
    env = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "-1"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    with tempfile.TemporaryDirectory() as folder:
        config = {"width": width, "ranks": ranks, "load": load, "save": save}
        worker = [
            sys.executable,
            "-m",
            "benchmarks.initialisation",
            "--worker",
            json.dumps(config),
            "--json",
            folder,
        ]
        launcher = [sys.executable, "-m", "tfpar", "run", "-np", str(ranks)] if ranks > 1 else []
        subprocess.run([*launcher, *worker], check=True, cwd=ROOT, env=env, timeout=_TIMEOUT_S)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]


def row(system: str, said: list[dict[str, Any]]) -> dict[str, Any]:
    """The process that needed most, phase by phase."""
    by_phase = {
        name: max(p["peak_bytes"] for s in said for p in s["phases"] if p["phase"] == name)
        for name in (p["phase"] for p in said[0]["phases"])
    }
    seconds = max(p["seconds"] for s in said for p in s["phases"] if p["phase"] == "stepped")
    return {
        "system": system,
        "processes": len(said),
        "parameters": said[0]["parameters"],
        "whole_bytes": 4 * said[0]["parameters"],
        "peak_bytes": by_phase,
        "first_step_s": seconds,
        "loss": said[0]["loss"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    names = [p for p in PHASES if any(p in r["peak_bytes"] for r in rows)]
    lines = [
        f"{rows[0]['parameters']:,} parameters, {rows[0]['whole_bytes'] / 1e9:.2f} GB; the peak "
        f"of a process after each phase, GB",
        f"| system | {' | '.join(names)} | over imports / whole | first step, s | loss |",
        "|---" * (len(names) + 4) + "|",
    ]
    for r in rows:
        peaks = [f"{r['peak_bytes'][n] / 1e9:.2f}" if n in r["peak_bytes"] else "" for n in names]
        share = (r["peak_bytes"]["stepped"] - r["peak_bytes"]["imported"]) / r["whole_bytes"]
        lines.append(
            f"| {r['system']} | {' | '.join(peaks)} | {share:.2f} | {r['first_step_s']:.1f} "
            f"| {r['loss']:.6g} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--load", metavar="FILE", help="a .weights.h5 file, written if not there")
    parser.add_argument("--no-whole", action="store_true", help="leave out plain Keras")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        said = measured(**json.loads(args.worker))
        Path(args.json, f"{os.getpid()}.json").write_text(json.dumps(said))
        return
    width = _width(int(args.parameters))
    rows = []
    load = None if args.load is None else os.path.abspath(args.load)
    if load is not None and not os.path.exists(load):
        rows.append(row("ranks that save", run(width, args.ranks, save=load)))
    rows.append(row(f"tfpar, {args.ranks} ranks", run(width, args.ranks, load=load)))
    if not args.no_whole:
        rows.append(row("plain Keras", run(width, 1, load=load)))
    print(table(rows))
    save(args.json, rows)


if __name__ == "__main__":
    main()
