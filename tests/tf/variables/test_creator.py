"""Variables made in a session's scope are pending where their shape is known."""

import pytest
import tensorflow as tf

from tfpar.tf.variables.creator import create_variable
from tfpar.tf.variables.parallel_variable import ParallelVariable


def left(**kwargs):
    """Stands for the next creator."""
    return "left", kwargs


def test_a_callable_is_traced_for_its_shape_and_runs_when_read():
    runs = []

    def initial():
        runs.append(tf.executing_eagerly())
        return tf.fill([2, 3], 4.0)

    variable = create_variable(left, initial_value=initial, name="w", trainable=None)
    assert isinstance(variable, ParallelVariable) and variable.trainable
    assert (variable.shape, variable.dtype) == ((2, 3), tf.float32)
    assert runs == [False]
    assert variable.numpy().tolist() == [[4.0] * 3] * 2
    assert runs == [False, True]


def test_who_knows_what_a_callable_makes_spares_the_trace():
    made = tf.TensorShape([5]), tf.float16

    def refuse():
        raise AssertionError("called")

    variable = create_variable(left, made_by=lambda initial: made, initial_value=refuse)
    assert (variable.shape, variable.dtype) == made


def test_a_value_is_kept_until_it_is_read():
    variable = create_variable(left, initial_value=[1, 2], dtype=tf.int64, trainable=False)
    assert isinstance(variable, ParallelVariable) and not variable.trainable
    assert variable.dtype == tf.int64 and variable.numpy().tolist() == [1, 2]


def test_a_tensor_of_the_traced_step_is_computed_outside_of_it():
    made = []

    @tf.function
    def step():
        if not made:
            made.append(create_variable(left, initial_value=tf.range(3) * 2))
        return made[0].read_value()

    assert step().numpy().tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"initial_value": None, "shape": [2]},
        {"initial_value": "text"},
        {"initial_value": lambda: tf.constant("text")},
    ],
)
def test_what_is_no_number_is_left_to_the_next_creator(kwargs):
    assert create_variable(left, **kwargs) == ("left", kwargs)
