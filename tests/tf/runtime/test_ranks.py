"""What ranks share."""

from __future__ import annotations

import types

import pytest

from tfpar.tf.distributed.job import Job
from tfpar.tf.runtime.ranks import Ranks

CPUS = ("/job:rank0/replica:0/task:0/device:CPU:0", "/job:rank1/replica:0/task:0/device:CPU:0")
GPUS = tuple(name.replace("CPU", "GPU") for name in CPUS)


@pytest.mark.parametrize(
    "devices, on_this_machine, share",
    [(CPUS, 2, True), (CPUS, 1, False), (GPUS, 2, False)],
    ids=["one machine", "two machines", "GPUs"],
)
def test_processes_share_the_cores_of_one_machine(devices, on_this_machine, share):
    world = types.SimpleNamespace(job=Job(rank=0, size=2, local_size=on_this_machine))
    assert Ranks(devices, world).share_cores == share


def test_ranks_of_one_process_share_no_cores_with_another():
    assert not Ranks(CPUS).share_cores
