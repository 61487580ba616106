"""Step time on one GPU: plain Keras and tfpar, with XLA and without.

    python -m benchmarks.gpu [--json FILE] [--steps 20] [--turns 3]

Each contender has a process and the GPU to itself. `tfpar, 2 ranks` cuts the GPU into two logical
devices: it computes the same step in two halves on the same hardware, so that what it takes more
is what splitting costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

SIZES = {
    "gpt": {"num_layers": 12, "hidden": 1024, "heads": 16, "length": 512, "vocabulary": 32000},
    "wide": {},
}
CONTENDERS = [(system, jit) for jit in (False, True) for system in ("keras", "tfpar", "tfpar-2")]


def run(model: str, system: str, jit: bool, policy: str, steps: int, turns: int) -> dict:
    """One contender, in this process."""
    import keras
    import tensorflow as tf

    import tfpar as tap
    from benchmarks import models
    from benchmarks.workers import endless

    gpu = tf.config.list_physical_devices("GPU")[0]
    ranks = 2 if system == "tfpar-2" else 1
    if ranks == 2:
        memory = 30 * 1024
        part = tf.config.LogicalDeviceConfiguration(memory_limit=memory)
        tf.config.set_logical_device_configuration(gpu, [part] * ranks)
    else:
        tf.config.experimental.set_memory_growth(gpu, True)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)

    def build():
        size = SIZES[model]
        made = models.gpt(**size) if model == "gpt" else models.wide(**size)
        made.compile("adam", models.loss_of(made), jit_compile=jit)
        return made

    if system == "keras":
        made = build()
    else:
        with tap.auto_parallel(tap.split([ranks, 1]), planner=None):
            made = build()
    if model == "gpt":
        batch = models.gpt_batch(8, SIZES["gpt"]["length"], SIZES["gpt"]["vocabulary"])
    else:
        batch = models.wide_batch(256)
    data = endless(batch)
    begin = time.perf_counter()
    losses = made.fit(data, steps_per_epoch=1, epochs=1, verbose=0).history["loss"]
    first = time.perf_counter() - begin
    made.fit(data, steps_per_epoch=3, epochs=1, verbose=0)
    taken = []
    for _ in range(turns):
        begin = time.perf_counter()
        losses += made.fit(data, steps_per_epoch=steps, epochs=1, verbose=0).history["loss"]
        taken.append((time.perf_counter() - begin) / steps)
    return {
        "first_step_s": first,
        "step_s": statistics.median(taken),
        "peak_bytes": tf.config.experimental.get_memory_info("GPU:0")["peak"],
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=[*SIZES])
    parser.add_argument("--policies", nargs="*", default=["float32", "mixed_bfloat16"])
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run(*json.loads(arguments.only), arguments.steps, arguments.turns)))
        return
    rows = []
    for model in arguments.models:
        for policy in arguments.policies:
            for system, jit in CONTENDERS:
                only = json.dumps([model, system, jit, policy])
                command = [sys.executable, "-m", "benchmarks.gpu", "--only", only]
                command += ["--steps", str(arguments.steps), "--turns", str(arguments.turns)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=240)
                row = {"model": model, "policy": policy, "system": system, "jit": jit}
                try:
                    row |= json.loads(done.stdout.splitlines()[-1])
                except (IndexError, ValueError):
                    row["error"] = done.stderr[-1500:]
                rows.append(row)
                print(json.dumps(row), flush=True)
                if arguments.json:
                    with open(arguments.json, "w") as file:
                        json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
