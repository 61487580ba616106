"""Files beside the tensors of a checkpoint: its index, and the parts that ranks wrote."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfpar as tap
from scripts.fuzzing.files import of_files
from scripts.fuzzing.trials import Case, Kind
from tfpar.tf.checkpoint import Box, Reader, TensorWrite, commit, temporary_folder, write_part
from tfpar.tf.keras import saving
from tfpar.tf.keras.adapter import state_of
from tfpar.tf.keras.replay import Position

POSITION = Position(epoch=2, batch=3, batches=5, step=13)


def _model() -> keras.Model:
    with tap.auto_parallel(tap.Mesh.of({"model": 2}), planner=None, verbose=0):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="a")], name="m")
        model.compile(keras.optimizers.SGD(name="sgd"), "mse", jit_compile=False)
    model.train_on_batch(np.ones((2, 2), "float32"), np.ones((2, 2), "float32"))
    return model


def _indexes(folder: str) -> Case:
    """Whatever index is restored, training stands where it stood."""
    model = _model()
    index = os.path.join(saving.save(state_of(model), "run", POSITION), "checkpoint.json")

    def use(path: str) -> None:
        found = tap.restore_checkpoint(model, os.path.dirname(path))
        assert found == POSITION, f"training goes on from {found}"

    return of_files([Path(index).read_bytes()], [index], use)


def _old_indexes(folder: str) -> Case:
    """Those of format 1, which have no checksum: training goes on where it can have been."""
    model = _model()
    index = os.path.join(saving.save(state_of(model), "run", POSITION), "checkpoint.json")
    old = json.loads(Path(index).read_bytes())
    old.pop("checksum", None)
    old["info"].pop("model", None)
    old["format"] = 1

    def use(path: str) -> None:
        found = tap.restore_checkpoint(model, os.path.dirname(path))
        assert found.step == POSITION.step and 0 <= found.batch <= found.step, found
        assert 0 <= found.epoch and 0 <= found.batches, found

    return of_files([json.dumps(old, indent=1).encode()], [index], use)


def _parts(folder: str) -> Case:
    whole = temporary_folder("whole", 0, "a")
    value = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    for rank in range(2):
        box = Box((rank, 0), (1, 2), (0, 0))
        rows = TensorWrite("kernel", (2, 2), tf.float32, [box], lambda r=rank: value[r : r + 1])
        half = TensorWrite(
            "half", (2, 2), tf.float16, [box], lambda r=rank: tf.cast(value[r : r + 1], "half")
        )
        write_part(whole, rank, [rows, half])
    part = Path(whole, "parts", "part-00001.json").read_bytes()

    def use(path: str) -> None:
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree("whole", "run")
        here = os.path.join("run", os.path.basename(whole))
        shutil.copyfile(path, os.path.join(here, "parts", "part-00001.json"))
        reader = Reader(commit(here, 2, {}))
        for name in reader.names:
            assert np.array_equal(reader.read_whole(name), value), name

    return of_files([part], ["part.json"], use)


KINDS = (
    Kind("checkpoint", _indexes),
    Kind("old checkpoint", _old_indexes),
    Kind("part", _parts),
)
