"""One rank: trains a deep MLP under each schedule and number of microbatches, and tells its peaks.

python -m benchmarks.pipeline.memory_worker CONFIG    # started by `tfpar run`
"""

from __future__ import annotations

import json
import sys
from typing import Any

import keras
import numpy as np

import tfpar as tap
from benchmarks.pipeline.config import MARK, Memory
from benchmarks.pipeline.resident import forget_peak, resident


def _model(config: Memory) -> Any:
    h = inputs = keras.Input((config.features,))
    for i in range(config.layers):
        h = keras.layers.Dense(config.width, "gelu", name=f"fc{i}")(h)
    model = keras.Model(inputs, keras.layers.Dense(config.features, name="head")(h))
    model.compile("adam", "mse", jit_compile=False)
    return model


def measured(config: Memory, system: str, microbatches: int) -> dict[str, Any]:
    """Two steps of one contender, on this rank."""
    stages = 1 if system == "accumulation" else config.ranks
    schedule = "1f1b" if stages == 1 else system
    pipeline = tap.Pipeline(stages=stages, microbatches=microbatches, schedule=schedule)
    batch = config.microbatch * microbatches
    keras.utils.set_random_seed(0)
    with tap.auto_parallel(tap.split([config.ranks]), pipeline=pipeline, verbose=0):
        model = _model(config)
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((batch, config.features), "float32") for _ in range(2))
    before = forget_peak()
    losses = [model.fit(x, y, batch_size=batch, verbose=0).history["loss"][0] for _ in range(2)]
    peak = resident("VmHWM") - before
    plan = tap.plan_of(model)
    keras.backend.clear_session()
    assert plan.cost is not None
    shares = plan.stages.cost.stages if plan.stages and plan.stages.cost else ()
    return {
        "system": system,
        "microbatches": microbatches,
        "peak_bytes": peak,
        "predicted_bytes": [s.peak_bytes for s in shares] or [plan.cost.memory_bytes] * stages,
        "losses": losses,
    }


def main() -> None:
    config = Memory.from_json(sys.argv[1])
    rows = [measured(config, s, m) for m in config.microbatches for s in config.systems]
    print(f"{MARK}{json.dumps(rows)}", flush=True)


if __name__ == "__main__":
    main()
