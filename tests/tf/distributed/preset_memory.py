"""The memory that a preset takes: `python -m tests.tf.distributed.preset_memory SMALL LARGE`.

Prints a line of JSON, MiB by name: the peaks of this process, each above what it had before,

- `read`: of `from_preset` and `enable_lora` in an `auto_parallel` block,
- `trained`: of these and a step of training,
- `plain`: of `from_preset` outside of a block; on one process only,

and `stored`: what of the weights this process holds in the end. What the same takes for SMALL,
whose weights are next to nothing, is Python's and TensorFlow's own, and taken off.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import keras_hub

import tfpar as tap
from benchmarks.pipeline.resident import forget_peak, resident
from tests import presets
from tfpar.tf.distributed.world import this_world

MIB = 1 << 20


def peaks(preset: Path) -> dict[str, float]:
    before = forget_peak()
    with tap.auto_parallel(tap.Mesh.of({"model": 2}), presets.SPLIT, planner=None):
        task = presets.with_lora(preset)
    read = resident("VmHWM") - before
    task.fit(presets.TEXT[:2], batch_size=2, verbose=0)
    trained = resident("VmHWM") - before
    shards = [s for w in task.weights for s in w.value.shards.values()]
    stored = sum(s.shape.num_elements() * s.dtype.size for s in shards)
    return {"read": read / MIB, "trained": trained / MIB, "stored": stored / MIB}


def plain_peak(preset: Path) -> float:
    before = forget_peak()
    task = keras_hub.models.CausalLM.from_preset(str(preset))
    peak = resident("VmHWM") - before
    del task
    return peak / MIB


def main(small: Path, large: Path) -> None:
    peaks(small)  # what is made once, whatever the model
    gc.collect()
    own = peaks(small)
    gc.collect()
    found = {name: value - own[name] for name, value in peaks(large).items()}
    if this_world() is None:
        found["plain"] = plain_peak(large)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
