"""Models of KerasHub under the `layout_map` that they bring, beside the plan that is searched.

    python -m benchmarks.layout_maps [--case NAME ...] [--json FILE]

Backbones at their published sizes, in `mixed_bfloat16`, with AdamW, on a machine of eight H100,
without weights and without its memory limit. The map is tried on each mesh of batch and model, and
the rest is searched; of these plans the fastest is shown beside the one that is found without the
map. All are priced by the same terms. Bytes are those of the tensors that a rank gives to
collectives in a step.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.results import save

if TYPE_CHECKING:
    from tfpar.plans import Plan

DEVICES = 8
CLUSTER = "dgx-h100"
BATCH, LENGTH = 32, 1024
LIMIT = "10 TiB"
"""Memory of a device, for all plans to fit."""

CASES: dict[str, tuple[str, dict[str, int]]] = {
    "Gemma 2B": (
        "GemmaBackbone",
        dict(
            vocabulary_size=256000,
            num_layers=18,
            num_query_heads=8,
            num_key_value_heads=1,
            hidden_dim=2048,
            intermediate_dim=32768,
            head_dim=256,
        ),
    ),
    "Llama 3.2 1B": (
        "LlamaBackbone",
        dict(
            vocabulary_size=128256,
            num_layers=16,
            num_query_heads=32,
            num_key_value_heads=8,
            hidden_dim=2048,
            intermediate_dim=8192,
        ),
    ),
    "Qwen 2.5 3B": (
        "QwenBackbone",
        dict(
            vocabulary_size=151936,
            num_layers=36,
            num_query_heads=16,
            num_key_value_heads=2,
            hidden_dim=2048,
            intermediate_dim=11008,
        ),
    ),
}
"""Class of the backbone, and its sizes, by the model's name."""


def priced(name: str) -> dict[str, Any]:
    """A row: the fastest plan under the map, and the one that is found."""
    import keras
    import keras_hub
    import tensorflow as tf

    import tfpar as tap

    backbone, sizes = CASES[name]
    cls = getattr(keras_hub.models, backbone)

    def build() -> keras.Model:
        body = cls(**sizes)
        head = body.token_embedding(body.output, reverse=True)
        model = keras.Model(body.input, head)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adamw", loss)
        return model

    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = tf.TensorSpec((BATCH, LENGTH), "int32")
    data = {"token_ids": tokens, "padding_mask": tokens}, tokens
    row: dict[str, Any] = {"model": name, "devices": DEVICES, "batch": BATCH, "length": LENGTH}
    by_map: list[Plan] = []
    for parts in (1, 2, 4, 8):
        shape = DEVICES // parts, parts
        devices = [f"gpu:{i}" for i in range(DEVICES)]
        mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), devices)
        asked = keras.distribution.ModelParallel(
            layout_map=cls.get_layout_map(mesh), batch_dim_name="batch"
        )
        by_map.append(tap.plan(build, data, asked, CLUSTER, planner="tap", memory_limit=LIMIT))
    best = min(by_map, key=_seconds)
    start = time.process_time()
    found = tap.plan(build, data, tap.split([1, DEVICES]), CLUSTER, memory_limit=LIMIT)
    row["plan_cpu_s"] = time.process_time() - start
    row["map"], row["found"] = _described(best), _described(found)
    row["meshes"] = [{"mesh": str(plan.mesh), "step_s": _seconds(plan)} for plan in by_map]
    return row


def _seconds(plan: Plan) -> float:
    assert plan.cost is not None, "priced"
    return plan.cost.seconds


def _described(plan: Plan) -> dict[str, Any]:
    cost, step = plan.cost, plan.partitioned
    assert cost is not None and step is not None, "searched, and priced"
    moved = sum(one.num_bytes for one in step.communications(step.wire_dtypes))
    return {
        "mesh": str(plan.mesh),
        "step_s": cost.seconds,
        "moved_bytes": moved,
        "memory_bytes": cost.memory_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    rows = []
    spawn = multiprocessing.get_context("spawn")
    for name in options.case or CASES:
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
            row = process.submit(priced, name).result()
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    save(options.json, rows)


if __name__ == "__main__":
    main()
