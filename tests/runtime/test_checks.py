"""What is checked after the first step: shards lie where they should, and copies agree."""

import contextlib
import types

import pytest
import tensorflow as tf

from tests.partitioned import devices
from tfpar.runtime.checks import Placed, check_placement
from tfpar.runtime.ranks import Ranks
from tfpar.spec import Mesh, Replicate, RuntimeMismatchError, Shard
from tfpar.variables.parallel_variable import ParallelVariable

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
    check_placement([Placed(variable, spec, mesh, Ranks(devices(mesh)))], None)


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
        check_placement([Placed(sharded(), SPEC, MESH, Ranks([devices(MESH)[0]] * 4))], None)


# --- ranks that are processes ------------------------------------------------------------


def processes(*others):
    """A job of two, seen from its first rank. The other one says what this one says and so much
    more, message after message; what was said is kept."""
    said = []

    def all_gather(own):
        said.append(own.numpy())
        return [own, own + others[len(said) - 1]]

    exchange = types.SimpleNamespace(all_gather=all_gather)
    world = types.SimpleNamespace(rank=0, exchange=exchange, at=lambda _: contextlib.nullcontext())
    return world, said


def copied() -> Placed:
    """A variable of which each of two ranks has a copy."""
    mesh, spec, ranks = Mesh.of([2]), (Replicate(),), Ranks(devices(Mesh.of([2])))
    variable = ParallelVariable(
        shape=(6, 10), dtype=tf.float32, name="kernel", initial_value=lambda: tf.ones([6, 10])
    )
    variable.shard(mesh, spec, ranks, [0, 1])
    return Placed(variable, spec, mesh, ranks)


def test_processes_that_agree_compare_checksums_alone():
    world, said = processes([[0.0]])
    check_placement([copied()], world)
    assert [message.shape for message in said] == [(1, 1)]


def test_processes_that_differ_find_out_by_how_much(caplog):
    world, said = processes([[1.0]], [[1.0, 2e-3, 0.0]])
    check_placement([copied()], world)
    assert "2.0e-03 apart" in caplog.text and len(said) == 2
    world, _ = processes([[1.0]], [[1.0, 0.5, 0.0]])
    with pytest.raises(RuntimeMismatchError, match="Ranks 0 and 1 hold different values.*report"):
        check_placement([copied()], world)


def test_processes_that_share_nothing_compare_nothing():
    mesh, spec = Mesh.of([2]), (Shard(0),)
    variable = copied().variable
    ranks = Ranks(devices(mesh))
    variable.shard(mesh, spec, ranks, [0, 1])
    world, said = processes()
    check_placement([Placed(variable, spec, mesh, ranks)], world)
    assert not said
