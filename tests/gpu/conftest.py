"""What needs a GPU. One is enough: it is cut into logical devices, one for each rank.

They are cut before TensorFlow's runtime starts, so run these tests by themselves:

    CUDA_VISIBLE_DEVICES=0 pytest tests/gpu

Without a GPU, or where other tests have started the runtime, they are skipped.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

NUM_RANKS = 4
MEMORY_MIB = 4096


@pytest.fixture(scope="session", autouse=True)
def ranks_on_a_gpu():
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        pytest.skip("there is no GPU")
    part = tf.config.LogicalDeviceConfiguration(memory_limit=MEMORY_MIB)
    try:
        tf.config.set_logical_device_configuration(gpus[0], [part] * NUM_RANKS)
    except RuntimeError:
        pytest.skip("TensorFlow's runtime has started: run these tests by themselves")
    tf.config.set_visible_devices(gpus[0], "GPU")
    tf.config.experimental.enable_tensor_float_32_execution(False)
