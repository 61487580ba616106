"""Step time on one GPU: plain Keras and tfpar, with XLA and without.

    python -m benchmarks.gpu [--layers 4] [--dtype mixed_bfloat16] [--json FILE]

Each contender has a process and the GPU to itself, one after the other. Two ranks cut the GPU into
two logical devices: they compute the same step in two halves on the same hardware, so that what
they take longer is what splitting costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.results import save

CONTENDERS = [
    {"system": system, "ranks": ranks, "xla": xla}
    for xla in (False, True)
    for system, ranks in (("keras", 1), ("tfpar", 1), ("tfpar", 2))
]
SIZE = {"hidden": 1024, "heads": 16, "length": 512, "vocabulary": 32_000}
BATCH = 8
RANK_MIB = 30 * 1024
STEPS, TURNS = 20, 3
SECONDS = 600  # for one contender


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """The row of a contender, whose steps are run in this process."""
    import keras
    import tensorflow as tf

    import tfpar as tap
    from benchmarks import models
    from benchmarks.workers import endless

    (gpu, *_) = tf.config.list_physical_devices("GPU")
    if config["ranks"] > 1:
        part = tf.config.LogicalDeviceConfiguration(memory_limit=RANK_MIB)
        tf.config.set_logical_device_configuration(gpu, [part] * config["ranks"])
    else:
        tf.config.experimental.set_memory_growth(gpu, True)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(config["dtype"])

    def build() -> keras.Model:
        model = models.gpt(num_layers=config["layers"], **SIZE)
        model.compile("adam", models.loss_of(model), jit_compile=config["xla"])
        return model

    if config["system"] == "keras":
        model = build()
    else:
        with tap.auto_parallel(tap.split([config["ranks"], 1]), planner=None):
            model = build()
    data = endless(models.gpt_batch(BATCH, SIZE["length"], SIZE["vocabulary"]))

    def seconds(steps: int) -> float:
        begin = time.perf_counter()
        model.fit(data, steps_per_epoch=steps, verbose=0)
        return (time.perf_counter() - begin) / steps

    first = seconds(1)
    seconds(3)
    step = statistics.median(seconds(STEPS) for _ in range(TURNS))
    memory = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return {**config, "first_step_s": first, "step_s": step, "peak_bytes": memory}


def in_a_process(config: dict[str, Any]) -> dict[str, Any]:
    """As `measure`; what it says if it fails is in the error."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"{config} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="mixed_bfloat16", help="a dtype policy of Keras")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(json.dumps(measure(arguments.only)))
        return
    rows = []
    for contender in CONTENDERS:
        size = {"layers": arguments.layers, "dtype": arguments.dtype}
        rows.append(in_a_process({**contender, **size}))
        print(rows[-1], flush=True)
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
