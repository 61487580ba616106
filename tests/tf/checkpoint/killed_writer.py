"""Saves checkpoints until it is killed; started by `test_kill.py`.

For each line on standard input one process is forked (importing TensorFlow takes seconds, forking
none). It prints its id and then each step that it has committed. Every tensor of step n is n.
"""

import os
import sys

import numpy as np
import tensorflow as tf  # noqa: F401 - before the fork; its threads start after it

from tests.tf.checkpoint.ranks import save
from tfpar.spec import Mesh, parse_spec
from tfpar.tf.checkpoint import Reader, latest, prune

MESH = Mesh.of([2, 2])
SPECS = {f"v{i}": parse_spec(s) for i, s in enumerate(["S(0),S(1)", "S(1),R", "R,R", "S(0/32),R"])}
SHAPE = (64, 1000)


def save_forever(folder: str) -> None:
    last = latest(folder)
    step = Reader(last).info["generation"] if last else 0
    while True:
        step += 1
        tensors = {name: (np.full(SHAPE, step, np.float32), spec) for name, spec in SPECS.items()}
        # Two generations have the same step: every other checkpoint takes another's place.
        save(folder, tensors, MESH, step // 2, f"run{os.getpid()}", generation=step)
        print("committed", step, flush=True)
        prune(folder, keep=2)


if __name__ == "__main__":
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            save_forever(sys.argv[1])
        print("started", child, flush=True)
        os.waitpid(child, 0)
        print("dead", child, flush=True)
