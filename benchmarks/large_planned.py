"""Large Keras models on large clusters: what `pipeline="auto"` decides, and what deciding takes.

    python -m benchmarks.large_planned [--setup NAME ...] [--policy NAME] [--xla] [--layers N]
                                       [--nodes N] [--json FILE]

The models, machines and batches of `benchmarks.large_models`, as Keras models with AdamW, in 32
bits or another dtype policy: from the definition to the plan, by the public API,
without weights. All heads together are as wide as the model (those of GLaM are twice as wide).
`CPU s` are those after TensorFlow is imported; memory is the peak of the process. Each is planned
in a process of its own.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import resource
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.results import save

if TYPE_CHECKING:
    import keras

    from tfpar.cost import Cost

NAMES = ("gpt3-175b", "gpt3-175b, mixed", "glam-1t", "glam-1t, mixed")
DEVICES = 8
"""Of a machine."""

POLICIES = ("float32", "mixed_bfloat16")


def planned(
    name: str,
    policy: str = POLICIES[0],
    xla: bool = False,
    layers: int | None = None,
    nodes: int | None = None,
) -> dict[str, Any]:
    """A row: the plan, what it is predicted to take, and what planning took.

    Args:
        name: of `benchmarks.large_models.SETUPS`.
        policy: of Keras, for dtypes.
        xla: whether XLA compiles the step, as Keras has it on GPUs by default.
        layers: by default all; the batch of fewer machines is as much smaller.
        nodes: by default all; of mixed machines a third is older.
    """
    import keras
    import tensorflow as tf

    import tfpar as tap
    from benchmarks import models
    from benchmarks.large_models import PEAK, SETUPS
    from benchmarks.moe_layers import GLAM
    from tfpar.planning.candidates import name_of_plan

    setup = SETUPS[name]
    gpt = dataclasses.replace(setup.gpt, layers=layers or setup.gpt.layers, head=None)
    batch = setup.batch
    if nodes is not None:
        batch = batch * nodes // setup.nodes
        older = round(nodes / 3) if setup.num_older else 0
        setup = dataclasses.replace(setup, nodes=nodes, num_older=older)
    setup = dataclasses.replace(setup, gpt=gpt, batch=batch)
    tokens = tf.TensorSpec((batch, gpt.length), "int32")

    def build() -> keras.Model:
        sizes = dict(vocabulary=gpt.vocabulary, length=gpt.length, hidden=gpt.hidden)
        sizes |= dict(heads=gpt.heads, num_layers=gpt.layers)
        if setup.chosen > 1:
            model = models.gshard_moe(**sizes, inner=4 * gpt.hidden, experts=GLAM.experts)
        else:
            model = models.gpt(**sizes)
        return models.compile_model(model, "adamw", jit_compile=xla)

    keras.config.set_dtype_policy(policy)
    start, wall = time.process_time(), time.perf_counter()
    cluster = setup.cluster
    plan = tap.plan(build, (tokens, tokens), [setup.nodes, DEVICES], cluster, pipeline="auto")
    cost = plan.cost
    assert cost is not None, "a searched plan"
    could = sum(PEAK[device.name] for device in cluster.devices)
    return {
        "setup": name,
        "policy": policy,
        "xla": xla,
        "layers": gpt.layers,
        "devices": setup.nodes * DEVICES,
        "batch": batch,
        "plan": name_of_plan(plan),
        "split_slots": sum(v.slots is not None for v in plan.variables.values()),
        "step_s": cost.seconds,
        "parts": _parts(cost),
        "mfu": setup.flops / cost.seconds / could,
        "bubble": cost.bubble_s / cost.seconds,
        "memory_bytes": cost.memory_bytes,
        "rivals": [
            {
                "name": r.name,
                "step_s": None if r.cost is None else r.cost.seconds,
                "parts": None if r.cost is None else _parts(r.cost),
                "why": r.reason,
            }
            for r in plan.findings.rivals
        ],
        "plan_cpu_s": time.process_time() - start,
        "plan_s": time.perf_counter() - wall,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _parts(cost: Cost) -> dict[str, float]:
    """Seconds of a step by part, and the bytes that a rank stores."""
    return {
        "compute_s": sum(cost.compute_s),
        "collectives_s": sum(cost.communication_s) - cost.hidden_s,
        "gradients_s": cost.exposed_s,
        "transfers_s": cost.transfer_s,
        "bubble_s": cost.bubble_s,
        "host_wait_s": cost.host_wait_s,
        "memory_bytes": cost.memory_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--setup", choices=NAMES, action="append", help="default: all")
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0], help="of dtypes")
    parser.add_argument("--xla", action="store_true", help="have XLA compile the step")
    parser.add_argument("--layers", type=int, help="default: all of the model")
    parser.add_argument("--nodes", type=int, help="default: all")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    rows = []
    spawn = multiprocessing.get_context("spawn")
    for name in options.setup or NAMES:
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
            asked = name, options.policy, options.xla, options.layers, options.nodes
            row = process.submit(planned, *asked).result()
        print(
            "{setup}: {plan}: {step_s:.2f} s a step, bubble {bubble:.2f}; found in "
            "{plan_cpu_s:.0f} CPU s, {plan_s:.0f} s".format_map(row),
            file=sys.stderr,
            flush=True,
        )
        rows.append(row)
        save(options.json, rows)


if __name__ == "__main__":
    main()
