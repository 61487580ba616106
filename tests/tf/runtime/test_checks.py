"""What is checked after the first step: shards lie where they should, and copies agree."""

import pytest
import tensorflow as tf

from tests.partitioned import devices
from tfpar.spec import Mesh, Replicate, RuntimeMismatchError, Shard
from tfpar.tf.runtime.copies import PlacedVariable
from tfpar.tf.runtime.executable import check_copies, check_placement
from tfpar.tf.runtime.ranks import Ranks
from tfpar.tf.variables.parallel_variable import ParallelVariable

MESH = Mesh.of([2, 2])
SPEC = (Replicate(), Shard(1))


def sharded() -> ParallelVariable:
    """A variable of which every rank has a shard of its own, as on GPUs."""
    variable = ParallelVariable(
        shape=(6, 10), dtype=tf.float32, name="kernel", initial_value=lambda: tf.ones([6, 10])
    )
    variable.shard(MESH, SPEC, Ranks(devices(MESH)))
    return variable


def check(variable, spec=SPEC, mesh=MESH):
    placed = [PlacedVariable(variable, spec, mesh, Ranks(devices(mesh)))]
    check_placement(placed)
    check_copies(placed)


def test_shards_as_planned():
    check(sharded())


def test_copies_that_differ():
    variable = sharded()
    variable.shards[3].assign_add(tf.ones([6, 5]))
    with pytest.raises(RuntimeMismatchError, match="Ranks 1 and 3 hold different values.*report"):
        check(variable)


def test_copies_that_differ_by_noise(caplog):
    variable = sharded()
    variable.shards[3].assign_add(tf.fill([6, 5], 2e-3))
    check(variable)
    assert "ill-conditioned" in caplog.text


def test_another_layout():
    with pytest.raises(RuntimeMismatchError, match="not as the plan's S\\(0\\),R"):
        check(sharded(), (Shard(0), Replicate()))


def test_another_device():
    with pytest.raises(RuntimeMismatchError, match="rank 1 lies on .*CPU:1, not on .*CPU:0"):
        check_placement([PlacedVariable(sharded(), SPEC, MESH, Ranks([devices(MESH)[0]] * 4))])
