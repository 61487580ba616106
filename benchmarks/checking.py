"""What it costs that ranks compare what they are fed and what they hold, of a step of 50 ms.

    python -m benchmarks.checking [--json FILE]

Two processes look at batches and compare the variables of models of several sizes, replicated under
Adam, as they do while they train: batches at each step, variables once a second, or less often
where that would take more than a hundredth of the time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import save
from benchmarks.workers import ROOT

STEP_S = 0.05
_TIMES = 20
_TIMEOUT_S = 300

BATCHES = {
    "tokens, 32 x 1,024": [((32, 1024), "int32"), ((32, 1024), "int32")],
    "table, 1,024 x 40": [((1024, 40), "float32"), ((1024,), "float32")],
    "images, 32 x 64 x 64 x 3": [((32, 64, 64, 3), "float32"), ((32,), "int32")],
    "images, 32 x 224 x 224 x 3": [((32, 224, 224, 3), "float32"), ((32,), "int32")],
}
MODELS = {"20 weights, 8 MB": (20, 8), "200 weights, 120 MB": (200, 120), "400, 480 MB": (400, 480)}


# --- a process that is measured ------------------------------------------------------


def measured() -> Iterator[dict[str, Any]]:
    """Rows of this rank."""
    import numpy as np
    import tensorflow as tf

    from tfpar.spec import Mesh, Replicate
    from tfpar.tf.distributed.input_log import InputLog
    from tfpar.tf.distributed.lockstep import INTERVAL_S, SHARE, blocks
    from tfpar.tf.distributed.world import this_world
    from tfpar.tf.runtime.copies import PlacedVariable
    from tfpar.tf.runtime.ranks import Ranks
    from tfpar.tf.runtime.shared_state import SharedState
    from tfpar.tf.variables.parallel_variable import ParallelVariable

    for name, tensors in BATCHES.items():
        batch = [tf.constant(np.ones(shape, dtype)) for shape, dtype in tensors]
        fed = InputLog()
        fed.note("", 0, batch)
        fed.restart(blocks(fed.step_bytes, STEP_S))
        seconds = _median(lambda n, fed=fed, batch=batch: fed.note("", n, batch))
        share = seconds / STEP_S
        every = {"blocks": fed.blocks, "every_s": STEP_S}
        yield {"what": name, **every, "seconds": seconds, "share": share}
    world = this_world()
    assert world is not None, "start this with `tfpar run`"
    ranks, mesh, spec = Ranks.of(world.size, world), Mesh.of([world.size]), (Replicate(),)
    for name, (number, megabytes) in MODELS.items():
        rows = megabytes * 1_000_000 // number // 3 // 4 // 256
        placed = []
        for i in range(3 * number):  # a weight and two slots each
            variable = ParallelVariable(
                shape=(rows, 256),
                dtype=tf.float32,
                name=f"v{i}",
                initial_value=lambda rows=rows: tf.ones([rows, 256]),
            )
            variable.shard(mesh, spec, ranks)
            placed.append(PlacedVariable(variable, spec, mesh, ranks))
        state = SharedState(placed, world)
        with world.at("comparing"):
            state.compare("")
            state.compare("", 0)
            seconds = _median(lambda turn, state=state: state.compare("", turn))
        every_s = max(INTERVAL_S, seconds / SHARE)
        every = {"blocks": 1, "every_s": every_s}
        yield {"what": name, **every, "seconds": seconds, "share": seconds / every_s}


def _median(call: Callable[[int], object]) -> float:
    took = []
    for n in range(_TIMES):
        begin = time.perf_counter()
        call(n)
        took.append(time.perf_counter() - begin)
    return sorted(took)[_TIMES // 2]


# --- the one that starts them --------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        for row in measured():
            print(json.dumps(row), flush=True)
        return
    launcher = [sys.executable, "-m", "tfpar", "run", "-np", "2"]
    worker = [sys.executable, "-m", "benchmarks.checking", "--worker"]
    done = subprocess.run(
        [*launcher, *worker],
        cwd=ROOT,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        timeout=_TIMEOUT_S,
    )
    said = [line.partition("] ")[2] for line in done.stdout.splitlines() if line[:4] == "[0] "]
    rows = [json.loads(line) for line in said if line.startswith("{")]
    for row in rows:
        print(f"{row['what']:28} {row['seconds'] * 1e3:8.2f} ms {row['share']:8.2%}")
    save(options.json, rows)


if __name__ == "__main__":
    main()
