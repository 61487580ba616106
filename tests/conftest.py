"""TensorFlow gets four virtual CPU devices when a test imports it; who needs none does without."""

import gc
import importlib.abc
import importlib.util
import os
import pathlib
import sys

import numpy as np
import pytest

from tests import time_limits
from tests.cases import set_nightly

gc.disable()  # until all is imported, of which nothing is garbage: a third of the time goes into it
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

NUM_DEVICES = 4


def make_devices(tf):
    """Cut the CPU into virtual devices, which is possible until TensorFlow has started."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES
    )


class DevicesOnImport(importlib.abc.MetaPathFinder):
    """Makes the devices as soon as TensorFlow is imported, whoever imports it first."""

    def find_spec(self, name, path=None, target=None):
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_configure(module):
            execute(module)
            make_devices(module)

        spec.loader.exec_module = execute_and_configure
        return spec


def pytest_configure(config):
    set_nightly(config.option.markexpr)
    time_limits.machine_factor()  # here once, not in each process that this one starts
    # Keras imports it wherever it is installed, which takes longer than Keras itself. No test
    # needs it but one that starts a program of its own.
    sys.modules.setdefault("sklearn", None)
    if sys.modules.get("tensorflow") is not None:  # a plugin has it already
        make_devices(sys.modules["tensorflow"])
    else:
        sys.meta_path.insert(0, DevicesOnImport())


WITHOUT_TENSORFLOW = (
    *("compile", "cost", "ir", "observability/report", "pipeline", "planning", "propagation"),
    "spec",
)
"""Folders of tests that run where TensorFlow cannot be imported."""
NEED_TENSORFLOW = ("test_captured.py", "test_dump_of_training.py")
"""Names of files in them that trace what they test."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Where a test does without TensorFlow, neither it nor its fixtures can import it."""
    folder = item.path.relative_to(pathlib.Path(__file__).parent).as_posix()
    is_without = folder.startswith(tuple(f"{name}/" for name in WITHOUT_TENSORFLOW))
    if not is_without or item.path.name in NEED_TENSORFLOW:
        return (yield)
    missing = object()
    before = {name: sys.modules.get(name, missing) for name in ("tensorflow", "keras")}
    sys.modules.update(dict.fromkeys(before, None))
    try:
        return (yield)
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not missing:
                sys.modules[name] = module


def pytest_itemcollected(item):
    """Processes share tests out by files, so that what a module makes once is not made in each."""
    if item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}/{item.path.stem}"))


YOUNG = 20_000
"""Number of objects that are made until the collector looks at them."""

MANY = 10 * YOUNG
"""Number of objects made in a module above which it ends with a collection of its own."""


def collect_and_freeze():
    """Let the collector never look again at what is in use now."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    """What imports made stays; what tests make is much: the collector looks at less, less often."""
    collect_and_freeze()
    gc.set_threshold(YOUNG, 20, 20)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """TensorFlow keeps some of each function that was traced: millions of objects in the end, which
    each full collection of a later test would walk through. Without this `make test` took 12 min
    41 s in place of 11 min 3 s."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        _, young, old = gc.get_count()
        if (young + 20 * old) * YOUNG > MANY:
            collect_and_freeze()
    return result


@pytest.fixture(autouse=True)
def the_same_samples_in_any_order():
    """A test draws the same numbers from the generators of test modules, whatever ran before."""
    start = np.random.default_rng(0).bit_generator.state
    for name, module in list(sys.modules.items()):
        if name.startswith("tests.") and isinstance(vars(module).get("rng"), np.random.Generator):
            module.rng.bit_generator.state = start
