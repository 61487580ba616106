"""The table of Keras layers: each one, forward and backward, on a mesh and on one device.

A tiny instance of every class of `keras.layers` runs in one traced function on two ranks that
split the batch. Three things are read off: ops that ran replicated for want of a rule,
collectives that gather the batch, and whether loss and gradients are those of one device.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfpar as tap
from scripts.tables import code, made_with, markdown_table
from tfpar.observability.report.coverage import coverage
from tfpar.tf.variables.parallel_variable import ParallelVariable

COMMAND = "python -m scripts.coverage_tables layers"
BATCH = 4
_GATHERING = ("all_gather", "all_to_all", "broadcast")

_rng = np.random.default_rng(0)


def _floats(*shape: int) -> np.ndarray:
    return _rng.uniform(0.1, 1.0, (BATCH, *shape)).astype("float32")


def _ids(*shape: int, limit: int = 6) -> np.ndarray:
    return _rng.integers(0, limit, (BATCH, *shape)).astype("int32")


VECTOR, SEQUENCE, IMAGE, VOLUME = _floats(6), _floats(5, 6), _floats(8, 8, 3), _floats(4, 4, 4, 2)
BY_SUFFIX = {"1D": SEQUENCE, "2D": IMAGE, "3D": VOLUME}
VIDEO = {"1D": _floats(3, 6, 2), "2D": _floats(3, 6, 6, 2), "3D": _floats(3, 4, 4, 4, 2)}
PICTURE = (_floats(8, 8, 3) * 255).astype("float32")
WORDS = np.array([["a b"], ["c"], ["b b"], ["a"]])

NOT_RUN = {
    "Layer": "base class",
    "Wrapper": "base class",
    "InputLayer": "holds no computation",
    "FlaxLayer": "needs the JAX backend",
    "JaxLayer": "needs JAX",
    "TorchModuleWrapper": "needs the PyTorch backend",
    "TFSMLayer": "runs a SavedModel; see `tfpar.tf.capture.graph_sources`",
}


@dataclasses.dataclass
class Recipe:
    """Arguments of the constructor, and what the layer is called on."""

    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    inputs: tuple[Any, ...] = (VECTOR,)
    call: Callable[[Any, Any], Any] | None = None


def _pair(x: Any = VECTOR, **arguments: Any) -> Recipe:
    return Recipe(arguments, (x, x * 0.5), lambda layer, xs: layer(list(xs)))


def _cell(**arguments: Any) -> Recipe:
    def call(layer, xs):
        return layer(xs[0], layer.get_initial_state(BATCH))

    return Recipe(arguments, (VECTOR,), call)


def _image(x: np.ndarray = PICTURE, **arguments: Any) -> Recipe:
    return Recipe(arguments, (x,))


def _spread(layer: Any, xs: Any) -> Any:
    return layer(*xs)


def _labelled() -> Recipe:
    def call(layer, xs):
        return layer({"images": xs[0], "labels": xs[1]})

    return Recipe({}, (PICTURE, _floats(3)), call)


RECIPES: dict[str, Recipe] = {
    "Activation": Recipe({"activation": "gelu"}),
    "AdditiveAttention": _pair(SEQUENCE),
    "AlphaDropout": Recipe({"rate": 0.3}),
    "Attention": _pair(SEQUENCE, use_scale=True),
    "Bidirectional": Recipe({"layer": lambda: layers.LSTM(4)}, (SEQUENCE,)),
    "CategoryEncoding": Recipe({"num_tokens": 6}, (_ids(3),)),
    "CenterCrop": _image(height=4, width=4),
    "Dense": Recipe({"units": 5}),
    "Discretization": Recipe({"bin_boundaries": [0.3, 0.6]}),
    "Dot": _pair(SEQUENCE, axes=-1),
    "Dropout": Recipe({"rate": 0.3}),
    "EinsumDense": Recipe({"equation": "abc,cd->abd", "output_shape": (None, 4)}, (SEQUENCE,)),
    "Embedding": Recipe({"input_dim": 6, "output_dim": 4}, (_ids(5),)),
    "GRU": Recipe({"units": 4}, (SEQUENCE,)),
    "GRUCell": _cell(units=4),
    "GaussianDropout": Recipe({"rate": 0.3}),
    "GaussianNoise": Recipe({"stddev": 0.3}),
    "GroupNormalization": Recipe({"groups": 3}, (IMAGE,)),
    "GroupQueryAttention": Recipe(
        {"head_dim": 4, "num_query_heads": 4, "num_key_value_heads": 2},
        (SEQUENCE, SEQUENCE),
        _spread,
    ),
    "HashedCrossing": Recipe(
        {"num_bins": 5}, (_ids(1), _ids(1)), lambda layer, xs: layer(tuple(xs))
    ),
    "Hashing": Recipe({"num_bins": 5}, (_ids(3),)),
    "IntegerLookup": Recipe({"vocabulary": [1, 2, 3]}, (_ids(3),)),
    "LSTM": Recipe({"units": 4}, (SEQUENCE,)),
    "LSTMCell": _cell(units=4),
    "Lambda": Recipe({"function": lambda x: x * 2}),
    "Masking": Recipe({}, (SEQUENCE,)),
    "MaxNumBoundingBoxes": Recipe(
        {"max_number": 3, "bounding_box_format": "xyxy"},
        (PICTURE, _floats(4, 4), _ids(4)),
        lambda layer, xs: layer(
            {"images": xs[0], "bounding_boxes": {"boxes": xs[1], "labels": xs[2]}}
        ),
    ),
    "MelSpectrogram": Recipe(
        {"fft_length": 32, "num_mel_bins": 4, "sampling_rate": 800, "max_freq": 400}, (_floats(64),)
    ),
    "MultiHeadAttention": Recipe({"num_heads": 2, "key_dim": 3}, (SEQUENCE, SEQUENCE), _spread),
    "Normalization": Recipe({"mean": 0.5, "variance": 0.2}),
    "Permute": Recipe({"dims": (2, 1)}, (SEQUENCE,)),
    "Pipeline": Recipe(
        {"layers": lambda: [layers.Rescaling(2.0), layers.RandomFlip()]}, (PICTURE,)
    ),
    "RNN": Recipe({"cell": lambda: layers.GRUCell(4)}, (SEQUENCE,)),
    "RepeatVector": Recipe({"n": 3}),
    "Rescaling": Recipe({"scale": 2.0}),
    "Reshape": Recipe({"target_shape": (3, 2)}),
    "ReversibleEmbedding": Recipe({"input_dim": 6, "output_dim": 4}, (_ids(5),)),
    "STFTSpectrogram": Recipe(
        {"frame_length": 16, "frame_step": 8, "fft_length": 16}, (_floats(64, 1),)
    ),
    "SimpleRNN": Recipe({"units": 4}, (SEQUENCE,)),
    "SimpleRNNCell": _cell(units=4),
    "SpectralNormalization": Recipe({"layer": lambda: layers.Dense(4)}),
    "StackedRNNCells": _cell(cells=lambda: [layers.GRUCell(4), layers.LSTMCell(3)]),
    "StringLookup": Recipe({"vocabulary": ["a", "b", "c"]}, (WORDS,)),
    "TextVectorization": Recipe({"vocabulary": ["a", "b", "c"]}, (WORDS,)),
    "TimeDistributed": Recipe({"layer": lambda: layers.Dense(4)}, (SEQUENCE,)),
    "MixUp": _labelled(),
    "CutMix": _labelled(),
    **{n: _pair() for n in ("Add", "Average", "Concatenate", "Maximum", "Minimum")},
    **{n: _pair() for n in ("Multiply", "Subtract")},
    **{n: _image(factor=0.3) for n in ("RandomBrightness", "RandomContrast", "RandomRotation")},
    "RandomPosterization": _image(factor=4, value_range=(0, 255)),
    "RandomCrop": _image(height=4, width=4),
    "RandomTranslation": _image(height_factor=0.2, width_factor=0.2),
    "RandomZoom": _image(height_factor=0.2),
    "Resizing": _image(height=5, width=6),
}

# Arguments that many layers want and that mean the same everywhere.
_COMMON: dict[str, Any] = {
    "filters": 4,
    "kernel_size": 2,
    "pool_size": 2,
    "output_size": 2,
    "rate": 0.3,
    "factor": 0.3,
    "value_range": (0, 255),
}


def recipe_for(name: str, layer_class: type) -> Recipe:
    """The recipe by name, or one made from the constructor's arguments."""
    if name in RECIPES:
        return RECIPES[name]
    parameters = inspect.signature(layer_class.__init__).parameters
    required = [
        n
        for n, p in parameters.items()
        if n in _COMMON and (p.default is p.empty or n == "value_range")
    ]
    arguments = {n: _COMMON[n] for n in required}
    suffix = next((s for s in BY_SUFFIX if s in name), None)
    if name.startswith("ConvLSTM"):
        return Recipe({**arguments, "padding": "same"}, (VIDEO[suffix],))
    if suffix is not None:
        return Recipe(arguments, (BY_SUFFIX[suffix],))
    if "preprocessing" in layer_class.__module__:
        return Recipe(arguments, (PICTURE,))
    return Recipe(arguments)


# --- one layer ---------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """What came of one layer."""

    name: str
    without_rule: tuple[str, ...] = ()
    gathers: tuple[str, ...] = ()
    numbers: str = ""
    backward: bool = True
    error: str = ""


def probe(name: str, layer_class: type) -> Result:
    """Run the layer on two ranks and on one device."""
    recipe = recipe_for(name, layer_class)
    inputs = [tf.constant(x) for x in recipe.inputs]
    call = recipe.call or (lambda layer, xs: layer(xs[0]))
    try:
        with tap.auto_parallel([2]):
            keras.utils.set_random_seed(1)
            layer = layer_class(**{k: _made(k, v) for k, v in recipe.arguments.items()})
            _call(call, layer, inputs)
            step = tap.function(_step(call, layer, backward=True))
            result = Result(name)
            try:
                on_mesh = _from_start(layer, step, inputs)
            except LookupError:  # an op without a gradient: preprocessing
                result.backward = False
                step = tap.function(_step(call, layer, backward=False))
                on_mesh = _from_start(layer, step, inputs)
        (executable,) = step.executables
        for variable in layer.variables:
            if isinstance(variable._value, ParallelVariable):
                variable._value.gather()
        plain = tf.function(_step(call, layer, result.backward), autograph=False)
        alone = _from_start(layer, plain, inputs)
    except Exception as error:  # noqa: BLE001 - the table says what happened
        return Result(
            name, error=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
        )
    result.without_rule = coverage(executable.partitioned.prepared).without_rule()
    kinds = {kind for kind, _, _ in executable.partitioned.collectives()}
    result.gathers = tuple(k for k in _GATHERING if k in kinds)
    result.numbers = _compare(on_mesh, alone)
    return result


def _made(name: str, value: Any) -> Any:
    """Layers in arguments are made where the layer is: inside the block."""
    return value() if name in ("layer", "layers", "cell", "cells") else value


def _call(call, layer, inputs):
    try:
        accepts = "training" in inspect.signature(layer.call).parameters
    except (TypeError, ValueError):
        accepts = False
    if accepts and call.__name__ == "<lambda>" and len(inputs) == 1:
        return layer(inputs[0], training=True)
    return call(layer, inputs)


def _step(call, layer, backward: bool):
    def step(*inputs):
        random.seed(0)  # some layers choose in Python, while they are traced
        if not backward:
            return [_weighted(_call(call, layer, inputs))]
        floating = [x for x in inputs if x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floating)
            loss = _weighted(_call(call, layer, inputs))
        weights = [v.value for v in layer.trainable_variables]
        by_input = tape.gradient(loss, [*floating, *weights])
        gradients = [g for g in by_input if g is not None]
        return [loss, *(_weighted(g) for g in gradients)]

    return step


def _weighted(outputs: Any) -> tf.Tensor:
    """A sum in which every element of every output counts differently."""
    total = tf.zeros([], "float32")
    for y in tf.nest.flatten(outputs):
        if isinstance(y, tf.IndexedSlices):
            y = tf.convert_to_tensor(y)
        if y.dtype == tf.string:
            continue
        if y.dtype.is_complex:
            y = tf.abs(y)
        y = tf.cast(y, "float32")
        if y.shape.is_fully_defined():
            y = y * np.cos(np.arange(y.shape.num_elements(), dtype="float32")).reshape(y.shape)
        total += tf.reduce_sum(y)
    return total


def _from_start(layer, step, inputs) -> list[np.ndarray]:
    """What one call of `step` gives; the layer's state is as before afterwards."""
    start = [np.array(v) for v in layer.variables]
    out = [np.asarray(t) for t in step(*inputs)]
    for variable, value in zip(layer.variables, start, strict=True):
        variable.assign(value)
    return out


def _compare(got: list[np.ndarray], want: list[np.ndarray]) -> str:
    if all(
        np.allclose(g, w, rtol=1e-4, atol=1e-5, equal_nan=True)
        for g, w in zip(got, want, strict=True)
    ):
        return "equal"
    return "DIFFER"


# --- the page ------------------------------------------------------------------------


def layer_classes() -> dict[str, type]:
    """Every class of `keras.layers` once, by its first name."""
    found: dict[type, str] = {}
    for name in sorted(dir(layers)):
        value = getattr(layers, name)
        if inspect.isclass(value) and issubclass(value, layers.Layer):
            found.setdefault(value, name)
    return {name: value for value, name in found.items()}


def layers_page() -> str:
    """`docs/coverage/layers.md`."""
    results = []
    for name, layer_class in layer_classes().items():
        if name not in NOT_RUN:
            results.append(probe(name, layer_class))
            keras.backend.clear_session()
    ran = [r for r in results if not r.error]
    full = [r for r in ran if not r.without_rule and not r.gathers and r.numbers == "equal"]
    rows = [
        [
            f"`{r.name}`" + ("" if r.backward else " (forward only)"),
            code(r.without_rule) or "none",
            "yes" if not r.gathers else f"no: {', '.join(r.gathers)}",
            r.numbers,
        ]
        for r in ran
    ]
    not_tried = [[f"`{n}`", why] for n, why in NOT_RUN.items() if n in layer_classes()]
    failed = [[f"`{r.name}`", r.error.replace("|", "/")] for r in results if r.error]
    return f"""# Coverage of Keras layers

Made by `{COMMAND}` ({made_with("tensorflow", "keras")}).

A tiny instance of every class of `keras.layers` runs forward and backward in one traced function,
with the batch split over two ranks in one process. *Ops without a rule* ran replicated. *Batch
stays split* means that nothing gathers it: the only collectives are sums. *Numbers* compares the
loss and the gradients with one device.

{len(full)} of {len(results)} layers have a rule for every op, keep the batch split and give equal
numbers; {len(ran)} ran.

{markdown_table(["Layer", "Ops without a rule", "Batch stays split", "Numbers"], rows)}

## Did not run

{markdown_table(["Layer", "Why"], failed) if failed else "None."}

## Not tried

{markdown_table(["Layer", "Why"], not_tried)}
"""
