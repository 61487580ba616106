"""The insides of TensorFlow and Keras that tfpar uses: the only package that imports them.

All other modules take them from here, by a name that says what they give, or use what is exported
(`tf.__internal__`, which TensorFlow exports for Keras, included). What a new version of either
breaks is mended here.

==================== ============================================ ==================================
Name                 What for                                     Why there is no public way
==================== ============================================ ==================================
graphs:
trace                captures steps and initial values            a `tf.function` lifts out what
                                                                  makes variables, and traces again
op_definition        reads and writes nodes by their op type      not exported
graph_of_function    bodies of loops and branches                 not exported
nodes_of_function    puts functions in the place of their calls   not exported
function_of_graph    loops of TensorFlow 1 as `While`             `tf.function` renames nodes
copy_handle_data     what their handles and lists hold            only reading it is exported
is_body              which graphs are part of a traced step       their classes are not exported
watched_ops          noise in every op that adds up               not exported
raise_at_ops         Ctrl-C ends the tracing of a step            Python raises it where it is lost
runtime:
is_started           whether devices can still be configured      asking for devices starts it
start_server         collectives between processes                only as part of a `tf.distribute`
                                                                  strategy
global_seed          one seed for all ranks                       it can be set, not read
add_function, ...    a program as one FunctionDef                 public ones are made op by op
run_op               runs what makes an initial value             `tf.raw_ops` takes inputs by name
profiler:
Profiler             when each op of a step ran                   what the profiler writes is for
                                                                  TensorBoard; no public module has
                                                                  its format
variables:
Uninitialized-
Variable             variables without memory                     `tf.Variable` takes a value
note_use, note_read  gradients with respect to split variables    tapes record public ops only
without_tapes        gathering a value is not recorded            only for one tape that is known
tapes_may_record     warns of training past the mesh              not exported
autograph:
on_loop, ...         `for batch in dataset`, a step for each pass not exported
Undefined, ...       what AutoGraph keeps in closures             not exported
variable_calls       reads and writes of split variables          TensorFlow names what it traces
written_graphs:
wrap_writer          whole values, written by one process         who imported it by name before
                                                                  would go past it
change_written_-
graphs               reads of shards become those of a variable   graphs are made in private
keras_internals:
TensorFlowTrainer    models that are made in a block run on it    it comes before the rest of
                                                                  `keras.Model.__init__`
Trainer              models that are compiled in a block, too     Keras compares the `compile` of a
                                                                  model with the trainer's
cloning              copies run on the mesh of their original     functions imported by their names
saving_lib,          files are written once, and read by shards   functions imported by their names;
legacy_h5_format                                                  readers are not exported
in_stateless_scope   whether a value is really assigned           only the scope is exported
random_generator     one seed for all ranks                       not exported
print_msg            shows a line as Keras shows its own          not exported
==================== ============================================ ==================================

`tf.interop.attributes` and `tf.interop.convert` read attributes and traced graphs of TensorFlow
into the IR, and write attributes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.tf.interop.convert import convert_func_graph
    from tfpar.tf.interop.profiler import OpEvent, Profiler
    from tfpar.tf.interop.xla import XlaKernels

__all__ = [
    "OpEvent",
    "Profiler",
    "XlaKernels",
    "convert_func_graph",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.tf.interop.convert": ["convert_func_graph"],
        "tfpar.tf.interop.profiler": ["OpEvent", "Profiler"],
        "tfpar.tf.interop.xla": ["XlaKernels"],
    },
)
