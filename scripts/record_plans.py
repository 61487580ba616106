"""Record plans, prices and collectives of the test models, or compare them with a record.

    python -m scripts.record_plans FILE [--compare] [--model gpt]

For work that must change no plan: record before, compare after each step. For every model, TAP's
plan on 2 x 2 slow devices (where small models are worth splitting), for three of them Rhino's, and
layouts without a planner are written down, with prices to the last digit; so is every collective,
in its order, of the program that a training step becomes under them.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

BATCH = 8
RHINO = ("gpt", "wide", "resnet")
"""Those that Rhino plans in seconds."""


def ways(name: str) -> dict[str, dict[str, Any]]:
    """What `auto_parallel` is asked for, by the name under which it is recorded."""
    import tfpar as tap
    from benchmarks import models
    from tfpar.cluster.description import Cluster, Device, Level

    device = Device({"float32": 1e9}, 2**30, 1e9, 1e-7)
    cluster = Cluster.regular("slow", device, [Level(2, 1e9, 1e-6), Level(2, 4e9, 1e-7)])
    found: dict[str, dict[str, Any]] = {"tap": {"planner": "tap", "cluster": cluster}}
    if name in RHINO:
        found["rhino"] = {"planner": "rhino", "cluster": cluster}
    found["data"] = {"planner": None}
    if name == "gpt":
        mesh = tap.split([2, 2])
        by_hand = {"mesh": mesh, "planner": None, "constraints": models.layout("gpt")}
        slots = tap.shard(r"adam.*/.*_(momentum|velocity)", 0, "data")
        found["megatron"] = by_hand
        found["chunks"] = {**by_hand, "chunks": 2}
        found["zero"] = {**by_hand, "constraints": [tap.batch("data"), slots]}
    return found


def record(name: str) -> dict[str, Any]:
    """What is recorded of a model: by way, its plan and the collectives of a training step."""
    import keras

    import tfpar as tap
    from benchmarks import models
    from tfpar.compile.local.reshard import COLLECTIVE_TYPES
    from tfpar.tf.keras.adapter import parallel_model

    found = {}
    for way, asked in ways(name).items():
        keras.utils.clear_session()  # so that names start from the same numbers
        keras.utils.set_random_seed(0)
        options = {"mesh": [2, 2], "plan_cache": None, "verbose": 0, **asked}
        with tap.auto_parallel(**options):
            model = models.compile_model(models.SMALL[name](), "adamw")
        model.train_on_batch(*models.batch_of(model, BATCH))
        executable = parallel_model(model).executables["train"]
        ops = executable.local.graph.ops
        found[way] = {
            "plan": json.loads(parallel_model(model).plan.to_json()),
            "predicted": [repr(c) for c in executable.partitioned.collectives()],
            "emitted": [
                f"{op.type} {op.attrs['axes']} {[f'{t.dtype}{list(t.shape)}' for t in op.inputs]}"
                for op in ops
                if op.type in COLLECTIVE_TYPES
            ],
            "ops": len(ops),
        }
    return found


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Where two records differ, one line for each place."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = []
        for key in sorted({*before, *after}):
            found += differences(before.get(key), after.get(key), f"{path}/{key}")
        return found
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for i, (b, a) in pairs for line in differences(b, a, f"{path}[{i}]")]
    return [] if before == after else [f"{path}: {_short(before)} -> {_short(after)}"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else f"{text[:100]}... ({len(text)} characters)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--compare", action="store_true", help="with what FILE holds")
    parser.add_argument("--model", action="append", help="only this one")
    arguments = parser.parse_args()
    known = json.loads(arguments.file.read_text()) if arguments.compare else None

    from benchmarks import models

    names = arguments.model or (list(known) if known is not None else list(models.SMALL))
    found = {}
    for name in names:
        found[name] = json.loads(json.dumps(record(name)))
        print(name, flush=True)
    if known is None:
        arguments.file.write_text(json.dumps(found, indent=1))
        return 0
    lines = differences({name: known[name] for name in names}, found)
    print("\n".join(lines) or "nothing differs")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
