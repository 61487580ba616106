"""The runtime on TensorFlow: from a Keras model or function to the programs that its ranks run.

A step goes through these packages in order: `tf.capture` traces it as a graph of the IR, `tf.steps`
has it planned (`tfpar.planning`) and compiled (`tfpar.compile`) for each batch shape, `tf.runtime`
links the local programs of the ranks into TensorFlow functions and runs them.

`tf.keras` hooks parallel models into Keras's `fit`, `compile` and `save`, `tf.functions` does so
for functions of tensors (`tap.function`), `tf.graph_program` for graphs of TensorFlow 1.
`tf.variables` holds sharded variables and their initial values, `tf.checkpoint` sharded
checkpoints. `tf.distributed` coordinates ranks that are processes, outside of steps. `tf.session`
holds what one `tap.auto_parallel` block has in common; `tf.traced` is a model that is planned
without devices. `tf.interop` is the only package that imports private modules of TensorFlow and
Keras.

The packages below this one (`planning`, `compile`, `rules`, ...) never import it, or TensorFlow.
"""
