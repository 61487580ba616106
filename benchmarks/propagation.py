"""Propagation as the inner loop of a search: candidates a second on one GPT block.

    python -m benchmarks.propagation [--quick] [--json FILE]

A candidate is a random layout of the block's weights on a 2x8 mesh; its forward, backward and
update ops are all propagated and its collectives listed. No devices are used.
"""

from __future__ import annotations

import argparse
import os
import random
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import models
from benchmarks.results import save


def prepared_block(num_layers: int):
    """The prepared training step of a GPT with `num_layers` blocks."""
    import tfpar as tap
    from tfpar.compile import prepare_step
    from tfpar.tf.capture.step import argument_specs
    from tfpar.tf.keras.adapter import parallel_model

    with tap.auto_parallel(tap.split([2])):
        model = models.compile_model(models.gpt(num_layers=num_layers))
    step = parallel_model(model).step("train")
    captured = step.capture(argument_specs((models.gpt_batch(),)))
    return prepare_step(captured)


def measure(num_layers: int, candidates: int) -> dict:
    from tfpar.propagation.engine import propagate
    from tfpar.propagation.partitioned_graph import Anchors
    from tfpar.spec import Mesh, Replicate, Shard

    prepared = prepared_block(num_layers)
    mesh = Mesh.of([2, 8])
    weights = [v for v in prepared.graph.variables if v.trainable]
    inputs = [(Shard(0), Replicate()) for _ in prepared.graph.inputs]
    rng = random.Random(0)
    begin, payload = time.process_time(), 0
    for _ in range(candidates):
        variables = {
            v.name: (
                Replicate(),
                rng.choice([Replicate(), *(Shard(d) for d, n in enumerate(v.shape) if n % 8 == 0)]),
            )
            for v in weights
        }
        result = propagate(prepared, mesh, Anchors(variables=variables, inputs=inputs))
        payload += sum(size for _, _, size in result.collectives())
    seconds = time.process_time() - begin
    return {
        "layers": num_layers,
        "ops": len(prepared.graph.ops),
        "candidates": candidates,
        "candidates_per_s": candidates / seconds,
        "mean_payload_mib": payload / candidates / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    cases = [(1, 20)] if args.quick else [(1, 200), (4, 50), (12, 20)]
    rows = [measure(*case) for case in cases]
    print("| layers | ops | candidates a second |\n|---|---|---|")
    for row in rows:
        print(f"| {row['layers']} | {row['ops']} | {row['candidates_per_s']:.1f} |")
    save(args.json, rows)


if __name__ == "__main__":
    main()
