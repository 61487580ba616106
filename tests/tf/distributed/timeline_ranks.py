"""A rank that trains a small model and is late before every step, if it is rank 1.

`python -m tests.tf.distributed.timeline_ranks [T.JSON]`: a timeline by the callback, if a file is
named; else `tfpar run --timeline-filename` has asked for one. With `stages` for a file, each rank
has a stage.
"""

from __future__ import annotations

import os
import sys
import time

import keras
import numpy as np

import tfpar as tap

LATE_S = 0.2
BATCH, BATCHES = 8, 4


class Late(keras.callbacks.Callback):
    """Holds up rank 1 before every batch."""

    def on_train_batch_begin(self, batch, logs=None):
        if os.environ.get("TFPAR_RANK") == "1":
            time.sleep(LATE_S)


def main(*paths: str) -> None:
    laid = {"constraints": tap.batch("data")}
    if paths == ("stages",):
        paths = ()
        stages = [tap.stage("net/up", 0), tap.stage("net/head", 1)]
        laid = {"constraints": stages, "pipeline": tap.Pipeline(stages=2, microbatches=2)}
    with tap.auto_parallel(tap.Mesh(("data",), (2,)), planner=None, **laid):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(16, "relu", name="up"), keras.layers.Dense(4, name="head")]
        model = keras.Sequential([keras.Input((16,)), *layers], name="net")
        model.compile("sgd", "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(BATCH * BATCHES, 16)).astype("float32")
    callbacks = [tap.Timeline(path, steps=(3, 4)) for path in paths]
    model.fit(x, x[:, :4], batch_size=BATCH, verbose=0, callbacks=[Late(), *callbacks])
    if os.environ.get("TFPAR_RANK") == "0":
        print("planned", sum(size for *_, size in _collectives(model)))


def _collectives(model: keras.Model) -> list[tuple[str, tuple[str, ...], int]]:
    partitioned = tap.plan_of(model).partitioned
    assert partitioned is not None
    return partitioned.collectives()


if __name__ == "__main__":
    main(*sys.argv[1:])
