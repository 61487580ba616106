"""What a trained model is written as, and how plain TensorFlow or Keras reads it.

Each row writes a model, which may be on a mesh, and reads what was written on one device. Tests of
one process and of several share them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

import tfpar as tap

_rng = np.random.default_rng(5)
X = _rng.integers(0, 9, (16, 4)).astype("int32")
Y = _rng.normal(size=(16, 3)).astype("float32")
SPLIT = [
    tap.shard("table/embeddings", dim=0, axis="model"),
    tap.shard("fc/kernel", dim=1, axis="model"),
    tap.shard("loop/kernel", dim=0, axis="model"),
]
SPEC = tf.TensorSpec((None, 4), tf.int32, name="x")


@keras.saving.register_keras_serializable("tests")
class Loop(layers.Layer):
    """Reads its weight in the body of a loop."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        return keras.ops.fori_loop(0, 2, lambda _, h: keras.ops.tanh(h @ self.kernel), x)


def built() -> keras.Model:
    keras.utils.clear_session(free_memory=False)  # layers are named alike, whatever ran before
    keras.utils.set_random_seed(7)
    inputs = keras.Input((4,), dtype="int32")
    h = layers.Flatten()(layers.Embedding(9, 4, name="table")(inputs))
    h = layers.BatchNormalization(momentum=0.5, name="norm")(
        layers.Dense(8, use_bias=False, name="fc")(h)
    )
    model = keras.Model(inputs, layers.Dense(3, name="head")(Loop(name="loop")(h)))
    model.compile(keras.optimizers.Adam(0.05), "mse", jit_compile=False)
    return model


def fitted(model: keras.Model) -> keras.Model:
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model


def trained() -> keras.Model:
    """Built on the mesh of whatever block is open."""
    return fitted(built())


def outputs(model: keras.Model) -> np.ndarray:
    return np.asarray(model.predict(X, verbose=0))


@dataclasses.dataclass(frozen=True)
class Row:
    """One form of a model.

    Attributes:
        write: writes a model to a path; every process calls it.
        read: what is computed of `X` by what lies there.
        own: whether each process writes a file of its own.
    """

    write: Callable[[keras.Model, Path], Any]
    read: Callable[[Path], Any]
    own: bool = False

    def path(self, folder: Path, name: str, rank: int) -> Path:
        return folder / (f"{rank}-{name}" if self.own else name)


def _served(model: keras.Model) -> Any:
    """A function of the user's, traced with the weights as they lie now."""
    return tf.function(lambda x: model(x, training=False), autograph=False)


def _freeze(function: Any, path: Path, **options: bool) -> None:
    frozen = convert_variables_to_constants_v2(function, **options)
    assert [t.dtype for t in frozen.inputs] == [tf.int32]
    path.write_bytes(frozen.graph.as_graph_def().SerializeToString())


def _frozen(**options: bool) -> Row:
    def write(model: keras.Model, path: Path) -> None:
        _freeze(_served(model).get_concrete_function(SPEC), path, **options)

    return Row(write, _read_frozen, own=True)


def _freeze_saved_model(model: keras.Model, path: Path) -> None:
    """As TF-TRT does."""
    folder = Path(f"{path} saved")
    _save_module(model, folder)
    loaded = tf.saved_model.load(str(folder))  # without which its signatures lose their variables
    function = loaded.signatures["serving_default"]
    _freeze(function, path, lower_control_flow=False, aggressive_inlining=True)


def _read_frozen(path: Path) -> Any:
    graph_def = tf.compat.v1.GraphDef.FromString(path.read_bytes())
    nodes = [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]
    assert not [n.name for n in nodes if "Variable" in n.op or "PartitionedCall" in n.op]
    weights = [n.attr["value"].tensor for n in graph_def.node if n.op == "Const"]
    assert max(w.ByteSize() for w in weights) > 16 * 8 * 4, "whole weights, not shards of them"
    whole = tf.compat.v1.wrap_function(lambda: tf.import_graph_def(graph_def, name=""), [])
    (output,) = whole.prune("x:0", ["Identity:0"])(tf.constant(X))
    return output


def _lite(convert: Callable[[keras.Model, Path], tf.lite.TFLiteConverter]) -> Row:
    return Row(lambda m, path: path.write_bytes(convert(m, path).convert()), _read_lite, own=True)


def _lite_of_function(model: keras.Model, _: Path) -> tf.lite.TFLiteConverter:
    concrete = _served(model).get_concrete_function(SPEC)
    return tf.lite.TFLiteConverter.from_concrete_functions([concrete], model)


def _lite_of_saved_model(model: keras.Model, path: Path) -> tf.lite.TFLiteConverter:
    folder = f"{path} exported"
    model.export(folder, verbose=False)
    return tf.lite.TFLiteConverter.from_saved_model(folder)


def _read_lite(path: Path) -> Any:
    interpreter = tf.lite.Interpreter(str(path))
    (given,), (made,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(given["index"], X.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], X)
    interpreter.invoke()
    return interpreter.get_tensor(made["index"])


def _save_module(model: keras.Model, path: Path) -> None:
    """A module of the user's, whose function was called while weights were split."""
    module = tf.Module()
    module.model = model
    module.serve = tf.function(lambda x: model(x, training=False), [SPEC], autograph=False)
    module.serve(tf.constant(X))
    tf.saved_model.save(module, str(path))


def _read_model(path: Path) -> Any:
    return outputs(keras.models.load_model(path, compile=False))


def _read_weights(path: Path) -> Any:
    model = built()
    model.load_weights(path)
    return outputs(model)


def _read_served(path: Path) -> Any:
    loaded = tf.saved_model.load(str(path))
    return loaded.serve(tf.constant(X))


def _read_signature(path: Path) -> Any:
    loaded = tf.saved_model.load(str(path))
    (output,) = loaded.signatures["serving_default"](tf.constant(X)).values()
    return output


ROWS = {
    "frozen": _frozen(),
    "frozen, control flow kept": _frozen(lower_control_flow=False),
    "frozen, all inlined": _frozen(lower_control_flow=False, aggressive_inlining=True),
    "frozen SavedModel": Row(_freeze_saved_model, _read_frozen, own=True),
    "export": Row(lambda model, path: model.export(path, verbose=False), _read_served),
    "tf.saved_model.save": Row(lambda m, path: tf.saved_model.save(m, str(path)), _read_signature),
    "tf.saved_model.save of a module": Row(_save_module, _read_served),
    "TFLite": _lite(lambda model, _: tf.lite.TFLiteConverter.from_keras_model(model)),
    "TFLite of a function": _lite(_lite_of_function),
    "TFLite of a SavedModel": _lite(_lite_of_saved_model),
    "model.keras": Row(lambda model, path: model.save(path), _read_model),
    "model.h5": Row(lambda model, path: model.save(path), _read_model),
    "keras.saving.keras": Row(keras.saving.save_model, _read_model),
    "keras.saving.h5": Row(keras.saving.save_model, _read_model),
    "keras.saving of a folder": Row(
        lambda model, path: keras.saving.save_model(model, path, zipped=False), _read_model
    ),
    "model.weights.h5": Row(lambda model, path: model.save_weights(path), _read_weights),
}
