"""How long `pipeline="auto"` takes for a Keras model, over devices and layers.

    python -m benchmarks.planned_scale [--devices N ...] [--layers N ...] [--json FILE] | --plot SVG

The GPT and the machines of `benchmarks.three_d_scale`, which searches tables of its layers: hidden
size 4,096 on `dgx-a100` machines of 8 devices, in batches of as many samples as there are devices,
64 at least; here in `mixed_bfloat16`, with AdamW, compiled by XLA. CPU seconds are those of tracing
the step and of searching it, after TensorFlow is imported. Each is planned in a process of its own.
`--plot` draws what was last written down (needs matplotlib).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import resource
import time
from typing import TYPE_CHECKING, Any

from benchmarks.results import Result, save
from benchmarks.three_d_scale import DEVICES, GPT, LAYERS, plot

if TYPE_CHECKING:
    import keras


def measured(devices: int, layers: int) -> dict[str, Any]:
    """A row: the plan, and the CPU-seconds that it took to find."""
    import keras
    import tensorflow as tf

    import tfpar as tap
    from benchmarks import models
    from tfpar.planning.candidates import name_of_plan
    from tfpar.spec import PlanError

    def build() -> keras.Model:
        sizes = dict(vocabulary=GPT.vocabulary, length=GPT.length, hidden=GPT.hidden)
        model = models.gpt(**sizes, heads=GPT.heads, num_layers=layers)
        return models.compile_model(model, "adamw", jit_compile=True)

    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = tf.TensorSpec((max(64, devices), GPT.length), "int32")
    start = time.process_time()
    try:
        plan = tap.plan(build, (tokens, tokens), [devices // 8, 8], "dgx-a100", pipeline="auto")
    except PlanError as error:
        found, seconds = str(error), None
    else:
        assert plan.cost is not None, "a searched plan"
        found, seconds = name_of_plan(plan), plan.cost.seconds
    return {
        "devices": devices,
        "layers": layers,
        "plan": found,
        "step_s": seconds,
        "search_cpu_s": time.process_time() - start,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    parser.add_argument("--plot", metavar="SVG", help="draw what was last written down, and stop")
    options = parser.parse_args()
    if options.plot:
        plot(Result.load("planned_scale").rows, options.plot)
        return
    rows = []
    spawn = multiprocessing.get_context("spawn")
    for devices, layers in itertools.product(options.devices, options.layers):
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
            rows.append(process.submit(measured, devices, layers).result())
        print(
            "{devices} devices, {layers} layers: {search_cpu_s:.0f} CPU s, {plan}".format_map(
                rows[-1]
            )
        )
        save(options.json, rows)


if __name__ == "__main__":
    main()
