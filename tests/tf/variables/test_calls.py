"""Functions that were traced while a variable is split: they run, and leave the process, alike."""

import tensorflow as tf

from tests.partitioned import devices
from tfpar.spec import Mesh, Shard
from tfpar.tf.capture.step import argument_specs, capture_step
from tfpar.tf.keras.adapter import install
from tfpar.tf.runtime.ranks import Ranks
from tfpar.tf.variables.parallel_variable import ParallelVariable

MESH = Mesh.of([2, 2])
VALUE = tf.reshape(tf.range(15.0), (3, 5))


class Counter(tf.Module):
    """Reads and writes its variable by turns, also in a loop and a branch."""

    def __init__(self, variable: tf.Variable) -> None:
        super().__init__()
        self.value = variable

    @tf.function(input_signature=[tf.TensorSpec([])])
    def step(self, x):
        before = tf.reduce_sum(self.value)
        for _ in tf.range(2):
            self.value.assign_add(x * self.value)
        if x > 1.0:
            self.value.assign(tf.gather(self.value, [2, 1, 0]))
        return before, self.value.sparse_read([0]), self.value.read_value()


def split() -> ParallelVariable:
    variable = ParallelVariable(shape=(3, 5), dtype=tf.float32, initial_value=lambda: VALUE)
    variable.shard(MESH, (Shard(0), Shard(1)), Ranks(devices(MESH)))
    return variable


def assert_same_steps(*counters: Counter) -> None:
    for x in (0.5, 2.0):
        one, *others = [[t.numpy().tolist() for t in c.step(tf.constant(x))] for c in counters]
        assert all(other == one for other in others)


def test_reads_and_writes_in_a_function():
    counter = Counter(split())
    assert_same_steps(Counter(tf.Variable(VALUE)), counter)
    assert counter.step.get_concrete_function().structured_outputs[2].shape == VALUE.shape


def test_a_tape_outside_of_the_function():
    variable = split()
    square = tf.function(lambda: tf.reduce_sum(variable**2))
    with tf.GradientTape() as tape:
        result = square()
    assert tf.reduce_all(tape.gradient(result, variable) == 2 * VALUE)


def test_a_saved_function_reads_and_writes_the_whole_variable(tmp_path):
    install()
    plain, counter = Counter(tf.Variable(VALUE)), Counter(split())
    assert_same_steps(plain, counter)
    tf.saved_model.save(counter, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert_same_steps(plain, counter, loaded)
    assert tf.reduce_all(loaded.value == plain.value)


def test_a_saved_model_holds_nothing_of_shards_that_no_function_holds():
    variable = split()
    assert not variable._trackable_children("savedmodel")
    tf.function(variable.read_value)()
    assert len(variable._trackable_children("savedmodel")) == MESH.size


def test_a_captured_step_calls_a_function_that_was_traced_while_weights_were_split():
    """It has the variable, not its shards; also in loops and branches."""
    counter = Counter(split())
    counter.step(tf.constant(0.5))
    captured = capture_step(counter.step, argument_specs((tf.constant(0.5),)))
    (found,) = captured.variables
    assert found is counter.value
    handles = [t for op in captured.graph.ops for t in op.inputs if t.dtype == "resource"]
    assert {t.op.name for t in handles} == {captured.graph.variables[0].handle.op.name}
