"""What lies in host memory leaves room on a GPU: peaks of TensorFlow's allocator fall.

Written without a GPU at hand, and not run on one yet. What does not need one is in
`tests/e2e/test_offload.py`.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tests.equivalence import assert_same, train

WIDTH, LAYERS = 1024, 6
SLOTS = LAYERS * 2 * 4 * WIDTH * WIDTH
"""Bytes of Adam's slots of all kernels."""


def residual(jit_compile: bool = False) -> keras.Model:
    """Blocks of two layers."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    for i in range(LAYERS // 2):
        h = keras.layers.Dense(WIDTH, "gelu", name=f"block_{i}_in")(x)
        x = x + keras.layers.Dense(WIDTH, name=f"block_{i}_out")(h)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=jit_compile)
    return model


def rows(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, WIDTH)).astype("float32"), rng.normal(size=(n, 1)).astype("float32")


def peak_bytes(n: int, jit_compile: bool, offload: tap.Offload | bool) -> int:
    """What two steps allocate at most beyond what there was before."""
    before = tf.config.experimental.get_memory_info("GPU:0")["current"]
    with tap.auto_parallel(tap.split([1]), planner=None, offload=offload, verbose=0):
        model = residual(jit_compile)
    model.fit(*rows(n), batch_size=n, verbose=0)
    tf.config.experimental.reset_memory_stats("GPU:0")
    model.fit(*rows(n), batch_size=n, verbose=0)
    return tf.config.experimental.get_memory_info("GPU:0")["peak"] - before


@pytest.mark.parametrize("jit_compile", [False, True], ids=["kernels", "xla"])
def test_slots_leave_room(jit_compile):
    """All but those of two weights, which are there in passing."""
    stored = peak_bytes(8, jit_compile, False)
    away = peak_bytes(8, jit_compile, tap.Offload(optimizer=True))
    assert stored - away > SLOTS * (1 - 2 / LAYERS) / 2


def test_activations_leave_room():
    n = 16384
    stored = peak_bytes(n, False, False)
    away = peak_bytes(n, False, tap.Offload(activations=True))
    kept = 4 * n * WIDTH  # a tensor of a block
    assert stored - away > kept


@pytest.mark.parametrize("jit_compile", [False, True], ids=["kernels", "xla"])
def test_trains_as_on_one_device(jit_compile):
    def build() -> keras.Model:
        return residual(jit_compile)

    plain = train(build, rows(16), batch_size=8)
    for mesh in (tap.split([4]), tap.split([2, 2])):
        run = train(
            build,
            rows(16),
            batch_size=8,
            mesh=mesh,
            constraints=[tap.shard(".*_in/kernel", -1, "model")] if mesh.num_axes > 1 else [],
            start=plain.start,
            options={"offload": True},
        )
        assert_same(run, plain)
        slots = [v for v in run.executable().captured.variables if "momentum" in v.name]
        devices = {shard.device for slot in slots for shard in slot.shards.values()}
        assert slots and all("CPU:0" in device for device in devices)
