"""The GPU of a rank that is a process; TensorFlow's list of GPUs is made up."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import tensorflow as tf

from tfpar.spec import TfparError
from tfpar.tf.runtime import devices
from tfpar.tf.runtime.devices import own_device

GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.fixture
def machine(monkeypatch) -> Callable[[int], dict[str, str]]:
    """Gives the machine so many GPUs; returns which one is made visible, and which grows."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"):
        os.environ.pop(name, None)

    def has(count: int) -> dict[str, str]:
        gpus = [tf.config.PhysicalDevice(f"gpu{i}", "GPU") for i in range(count)]
        chosen: dict[str, str] = {}
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
        monkeypatch.setattr(
            tf.config, "set_visible_devices", lambda gpu, kind: chosen.update({kind: gpu.name})
        )
        monkeypatch.setattr(
            tf.config.experimental,
            "set_memory_growth",
            lambda gpu, grows: chosen.update(grows=gpu.name if grows else ""),
        )
        return chosen

    return has


@pytest.mark.parametrize("local_rank", range(4))
def test_each_rank_has_the_gpu_of_its_number(machine, local_rank):
    chosen = machine(4)
    assert own_device(local_rank, 4) == GPU
    assert chosen == {"GPU": f"gpu{local_rank}", "grows": f"gpu{local_rank}"}


@pytest.mark.parametrize("local_rank", range(4))
def test_each_rank_has_the_one_gpu_that_a_scheduler_left_it(machine, local_rank):
    chosen = machine(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
    assert own_device(local_rank, 4) == GPU
    assert chosen == {"GPU": "gpu0", "grows": "gpu0"}


def test_a_rank_alone_on_its_machine_takes_the_first_gpu(machine):
    chosen = machine(2)
    assert own_device(0, 1) == GPU
    assert chosen["GPU"] == "gpu0"


@pytest.mark.parametrize("gpus", [1, 2, 3])
@pytest.mark.parametrize("local_rank", range(4))
def test_fewer_gpus_than_ranks_are_an_error_on_every_rank(machine, gpus, local_rank):
    chosen = machine(gpus)
    with pytest.raises(TfparError, match=f"rank {local_rank} of 4 .* sees {gpus}.*one rank a GPU"):
        own_device(local_rank, 4)
    assert not chosen


def test_a_local_rank_beyond_the_gpus_is_an_error_though_nobody_told_how_many_there_are(machine):
    machine(2)
    with pytest.raises(TfparError, match="sees 2"):
        own_device(2, 1)


def test_kernels_start_in_the_order_of_issue(machine):
    machine(2)
    own_device(1, 2)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_connections_are_the_users_where_set(machine):
    machine(2)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    own_device(1, 2)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_connections_are_set_before_the_gpus_are_looked_for(machine, monkeypatch):
    """CUDA reads the variable as it starts, which the first look at the GPUs makes it do."""
    machine(2)
    at_look = []
    listed = tf.config.list_physical_devices

    def look(kind: str) -> list[tf.config.PhysicalDevice]:
        at_look.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return listed(kind)

    monkeypatch.setattr(tf.config, "list_physical_devices", look)
    own_device(0, 2)
    assert at_look[0] == "1"


def test_without_gpus_a_rank_computes_on_its_share_of_the_cores(machine, monkeypatch):
    chosen = machine(0)
    threads: list[int] = []
    monkeypatch.setattr(devices.runtime, "is_started", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", threads.append)
    assert own_device(3, 4) == CPU
    assert threads == [3]
    assert not chosen
