"""Figures of the examples that open modules: they are what the modules do."""

from __future__ import annotations

import tensorflow as tf

from tests.partitioned import devices
from tests.propagation.by_hand import PAIR
from tfpar.spec import Shard
from tfpar.tf.runtime.ranks import Ranks
from tfpar.tf.variables.parallel_variable import ParallelVariable


def test_a_variable_changes_from_state_to_state():
    """Of `tf.variables.parallel_variable`."""
    v = ParallelVariable(shape=(4, 6), dtype="float32", initial_value=lambda: tf.zeros((4, 6)))
    states = [type(v.state).__name__]
    v.shard(PAIR, (Shard(0),), Ranks(devices(PAIR)))
    states.append(type(v.state).__name__)
    assert [tuple(shard.shape) for shard in v.shards.values()] == [(2, 6), (2, 6)]
    v.assign_add(tf.ones((4, 6)))
    assert v.numpy().tolist() == [[1.0] * 6] * 4
    with v.whole():
        states.append(type(v.state).__name__)
    assert [*states, type(v.state).__name__] == ["Pending", "Sharded", "Whole", "Sharded"]
