"""Large Keras models on large clusters: what `pipeline="auto"` decides, and what deciding takes.

    python -m benchmarks.large_planned [--layers N] [--nodes N] [--json FILE]

GPT-3 175B (96 layers, hidden 12,288) in 32 bits with AdamW and a batch of 1,536 sequences, on 128
DGX A100: from the model's definition to the plan, by the public API, without its weights. `CPU s`
are those after TensorFlow is imported; memory is the peak of the process.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

from benchmarks.results import save

GPT3 = {"vocabulary": 51_200, "length": 2048, "hidden": 12_288, "heads": 96}
LAYERS, NODES, DEVICES, BATCH = 96, 128, 8, 1536


def planned(layers: int, nodes: int) -> dict[str, Any]:
    """A row: the plan, what it is predicted to take, and what planning took."""
    import tensorflow as tf

    import tfpar as tap
    from benchmarks import models
    from tfpar.search.stages.choice import name_of_plan

    batch = BATCH * nodes // NODES
    tokens = tf.TensorSpec((batch, GPT3["length"]), "int32")

    def build():
        return models.compile_model(models.gpt(num_layers=layers, **GPT3), "adamw")

    start, wall = time.process_time(), time.perf_counter()
    plan = tap.plan(build, (tokens, tokens), [nodes, DEVICES], "dgx-a100", pipeline="auto")
    cost = plan.cost
    assert cost is not None, "a searched plan"
    return {
        "layers": layers,
        "devices": nodes * DEVICES,
        "batch": batch,
        "plan": name_of_plan(plan),
        "step_s": cost.seconds,
        "bubble": cost.bubble_s / cost.seconds,
        "memory_bytes": cost.memory_bytes,
        "rivals": [
            {"name": r.name, "step_s": None if r.cost is None else r.cost.seconds, "why": r.reason}
            for r in plan.rivals
        ],
        "plan_cpu_s": time.process_time() - start,
        "plan_s": time.perf_counter() - wall,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"default: {LAYERS}")
    parser.add_argument("--nodes", type=int, default=NODES, help=f"default: {NODES}")
    parser.add_argument("--json", help="write the row to this file")
    options = parser.parse_args()
    row = planned(options.layers, options.nodes)
    print(
        "{plan}: {step_s:.1f} s a step, bubble {bubble:.2f}; found in {plan_cpu_s:.0f} CPU s, "
        "{plan_s:.0f} s".format_map(row)
    )
    save(options.json, [row])


if __name__ == "__main__":
    main()
