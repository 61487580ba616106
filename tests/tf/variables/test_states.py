"""A variable's value is pending, whole or sharded, and reads the same in each state."""

import contextlib

import pytest
import tensorflow as tf

from tests.partitioned import devices
from tfpar.spec import Mesh, Replicate, Shard
from tfpar.tf.runtime.ranks import Ranks
from tfpar.tf.variables.parallel_variable import ParallelVariable
from tfpar.tf.variables.states import Pending, Sharded, Whole

MESH = Mesh.of([2, 2])
SPEC = (Shard(0), Shard(1))
OTHER = (Replicate(), Shard(0))
VALUE = tf.reshape(tf.range(15.0), (3, 5))
"""Both dims are uneven on the mesh."""


def make(state: str) -> ParallelVariable:
    variable = ParallelVariable(shape=(3, 5), dtype=tf.float32, initial_value=lambda: VALUE)
    if state == "whole":
        variable.materialize()
    if state == "sharded":
        variable.shard(MESH, SPEC, Ranks(devices(MESH)))
    return variable


def behind(variable: tf.Variable) -> tf.Tensor:
    """What lies behind the variable's own handle."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


KINDS = {"pending": Pending, "whole": Whole, "sharded": Sharded}


@pytest.fixture(params=KINDS)
def variable(request):
    made = make(request.param)
    assert isinstance(made.state, KINDS[request.param])
    return made


def test_reading_and_assigning_take_the_whole_value(variable):
    assert variable.numpy().tolist() == VALUE.numpy().tolist()
    variable.assign_add(VALUE)
    assert variable.numpy().tolist() == (2 * VALUE).numpy().tolist()
    variable.assign(tf.ones([3, 5]))
    variable.scatter_update(tf.IndexedSlices(tf.zeros([1, 5]), [1]))
    assert variable.numpy().sum(axis=1).tolist() == [5, 0, 5]


def test_a_first_assignment_runs_no_initializer():
    def refuse():
        raise AssertionError("made for nothing")

    variable = ParallelVariable(shape=(2,), dtype=tf.float32, initial_value=refuse)
    variable.assign([1.0, 2.0])
    assert variable.is_whole and variable.numpy().tolist() == [1, 2]


def test_whole_for_a_time(variable):
    before = variable.state
    with variable.whole():
        assert variable.is_whole
        assert behind(variable).numpy().tolist() == VALUE.numpy().tolist()
    assert variable.state is before
    assert variable.numpy().tolist() == VALUE.numpy().tolist()


def test_the_state_is_put_back_after_an_error(variable):
    before = variable.state
    with contextlib.suppress(KeyError), variable.whole():
        raise KeyError("of the user's")
    assert variable.state is before


def test_what_is_laid_alike_stays_where_it_is():
    variable = make("sharded")
    state = variable.state
    assert isinstance(state, Sharded)
    variable.shard(MESH, SPEC, state.ranks)
    assert variable.state is state
    variable.shard(MESH, OTHER, state.ranks)
    assert variable.layout == (MESH, OTHER)
    assert variable.numpy().tolist() == VALUE.numpy().tolist()


def test_ranks_may_share_shards():
    variable = make("pending")
    variable.shard(MESH, OTHER, Ranks(devices(MESH)), holders=[0, 1, 0, 1])
    assert sorted(variable.state.stored) == [0, 1]
    assert variable.shards[2] is variable.shards[0]
    variable.assign(2 * VALUE)
    assert variable.numpy().tolist() == (2 * VALUE).numpy().tolist()


def test_gathering_lets_shards_go():
    variable = make("sharded")
    shard = variable.shards[0]
    variable.gather()
    assert variable.is_whole and variable.layout is None and variable.shards == {}
    assert variable.numpy().tolist() == VALUE.numpy().tolist()
    assert tf.reduce_all(tf.math.is_nan(behind(shard)))


def test_a_plain_variable_is_adopted_where_it_stands():
    plain = tf.Variable(VALUE)
    adopted = ParallelVariable.adopt(plain)
    assert adopted is plain and adopted.is_whole and ParallelVariable.adopt(plain) is plain
    state = adopted.state
    assert ParallelVariable.adopt(adopted).state is state
    adopted.shard(MESH, SPEC, Ranks(devices(MESH)))
    assert plain.numpy().tolist() == VALUE.numpy().tolist()
