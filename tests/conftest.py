"""Four virtual CPU devices for every test, configured before TensorFlow starts."""

import os
import sys

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

NUM_DEVICES = 4


def pytest_configure(config):
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES
    )


@pytest.fixture(autouse=True)
def the_same_samples_in_any_order():
    """A test draws the same numbers from the generators of test modules, whatever ran before."""
    start = np.random.default_rng(0).bit_generator.state
    for name, module in list(sys.modules.items()):
        if name.startswith("tests.") and isinstance(vars(module).get("rng"), np.random.Generator):
            module.rng.bit_generator.state = start
