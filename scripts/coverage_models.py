"""The table of models: forward and backward of tiny ones, traced and partitioned, not run.

Nothing is trained and no weight is made, so that ImageNet models come in their own size.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

import tfpar as tap
from scripts.tables import code, made_with, markdown_table
from tfpar.compile import prepare_step
from tfpar.observability.report.coverage import coverage
from tfpar.planning.meshes import input_spec
from tfpar.planning.problems import batched_inputs
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import Anchors
from tfpar.spec import Mesh

COMMAND = "python -m scripts.coverage_tables models"
BATCH, LENGTH, SIDE, NUM_SAMPLES = 4, 8, 64, 2048
_GATHERING = ("all_gather", "all_to_all", "broadcast")

# One of each family of keras.applications, with the smallest side that all of them take.
APPLICATIONS = (
    "ConvNeXtTiny",
    "DenseNet121",
    "EfficientNetB0",
    "EfficientNetV2B0",
    "InceptionResNetV2",
    "InceptionV3",
    "MobileNet",
    "MobileNetV2",
    "MobileNetV3Small",
    "NASNetMobile",
    "ResNet50",
    "ResNet50V2",
    "VGG16",
    "Xception",
)
APPLICATION_SIDE = 80

# What constructors of KerasHub's backbones ask for, by the name of the argument.
TINY: dict[str, Any] = {
    "vocabulary_size": 40,
    "vocab_size": 40,
    "num_layers": 2,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_query_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "head_size": 8,
    "hidden_dim": 16,
    "hidden_size": 16,
    "intermediate_dim": 24,
    "embedding_dim": 12,
    "num_experts": 3,
    "moe_intermediate_dim": 8,
    "shared_expert_intermediate_dim": 8,
    "shared_expert_intermediate_size": 8,
    "top_k": 2,
    "num_layers_enc": 2,
    "num_layers_dec": 2,
    "filter_dim": 16,
    "encoder_num_layers": 2,
    "decoder_num_layers": 2,
    "encoder_num_heads": 2,
    "decoder_num_heads": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 32,
    "partial_rotary_factor": 1.0,
    "rope_layer_enabled_list": [True, True],
    "layer_types": ["full_attention"] * 2,
    "mlp_dim": 24,
    "projection_dim": 8,
    "image_shape": (SIDE, SIDE, 3),
    "patch_size": 16,
    "max_sequence_length": LENGTH,
    **{
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "hidden_dim": 16,
            "intermediate_dim": 24,
            "num_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "layer_types": ["full_attention"] * 2,
        }.items()
    },
}

# Where an argument's name is not enough.
OWN: dict[str, dict[str, Any]] = {
    "DenseNetBackbone": {"stackwise_num_repeats": [1, 1, 1]},
    "Gemma3Backbone": {"image_size": None},
    "Qwen3MoeBackbone": {"top_k": 2},
    "QwenMoeBackbone": {"top_k": 2},
    "MiTBackbone": {
        "layerwise_depths": [1, 1],
        "num_layers": 2,
        "layerwise_num_heads": [1, 2],
        "layerwise_sr_ratios": [2, 1],
        "max_drop_path_rate": 0.1,
        "layerwise_patch_sizes": [7, 3],
        "layerwise_strides": [4, 2],
        "image_shape": (SIDE, SIDE, 3),
        "hidden_dims": [8, 16],
    },
    "ResNetBackbone": {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [7],
        "stackwise_num_filters": [64, 64],
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2],
        "block_type": "basic_block",
    },
    "SwinTransformerBackbone": {
        "image_shape": (SIDE, SIDE, 3),
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 4,
    },
    "VGGBackbone": {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [8, 16]},
    "ViTBackbone": {"patch_size": (16, 16), "image_shape": (SIDE, SIDE, 3)},
    "WhisperBackbone": {"max_encoder_sequence_length": 16, "max_decoder_sequence_length": LENGTH},
    "XceptionBackbone": {
        "stackwise_conv_filters": [[8, 8], [16, 16]],
        "stackwise_pooling": [True, False],
    },
}


@dataclasses.dataclass
class Result:
    """What came of one model."""

    name: str
    num_ops: int = 0
    num_weights: int = 0
    without_rule: tuple[str, ...] = ()
    replicated: int = 0
    gathers: tuple[str, ...] = ()
    error: str = ""


def applications() -> Iterator[tuple[str, Callable[[], keras.Model]]]:
    shape = (APPLICATION_SIDE, APPLICATION_SIDE, 3)
    for name in APPLICATIONS:
        make = getattr(keras.applications, name)
        yield name, lambda make=make: make(weights=None, input_shape=shape, classes=10)


def backbones() -> Iterator[tuple[str, Callable[[], keras.Model]]]:
    """KerasHub's backbones for whose arguments `TINY` and `OWN` have values."""
    import keras_hub

    for name in dir(keras_hub.models):
        if name.endswith("Backbone") and name != "Backbone":
            make = getattr(keras_hub.models, name)
            arguments = _arguments(make, OWN.get(name, {}))
            if arguments is not None:
                yield f"keras_hub {name}", lambda make=make, arguments=arguments: make(**arguments)


def not_tried() -> list[str]:
    """KerasHub's other backbones: their arguments are models, or their own."""
    import keras_hub

    tried = {name.rpartition(" ")[2] for name, _ in backbones()}
    names = [n for n in dir(keras_hub.models) if n.endswith("Backbone") and n != "Backbone"]
    return [n for n in names if n not in tried]


def _arguments(make: Any, own: dict[str, Any]) -> dict[str, Any] | None:
    values = {**TINY, **own}
    parameters = inspect.signature(make.__init__).parameters
    wanted = [
        n
        for n, p in parameters.items()
        if n != "self"
        and p.kind is not p.VAR_KEYWORD
        and (p.default is p.empty or n in own or n in ("image_shape", "max_sequence_length"))
    ]
    if not wanted or any(n not in values for n in wanted):
        return None
    return {n: values[n] for n in wanted}


# --- one model ---------------------------------------------------------------------


def probe(name: str, make: Callable[[], keras.Model]) -> Result:
    """Trace, prepare and partition the model's forward and backward pass."""
    try:
        with tap.auto_parallel([2]):
            model = make()
            specs = keras.tree.map_structure(_spec, model._inputs_struct)
            step = tap.function(_step(model))
            captured = step.capture(specs)
        prepared = prepare_step(captured)
        found = coverage(prepared)
        batched, mesh = batched_inputs(captured, BATCH), Mesh.of([2])
        inputs = [input_spec(t in batched, mesh, [0]) for t in captured.graph.inputs]
        partitioned = propagate(prepared, mesh, Anchors(inputs=inputs))
    except Exception as error:  # noqa: BLE001 - the table says what happened
        text = str(error).strip().splitlines()[0][:120]
        return Result(name, error=f"{type(error).__name__}: {text}")
    kinds = {kind for kind, _, _ in partitioned.collectives()}
    return Result(
        name,
        sum(o.count for o in found.op_types),
        model.count_params(),
        found.without_rule(),
        sum(o.partial + o.fallback for o in found.op_types),
        tuple(k for k in _GATHERING if k in kinds),
    )


def _spec(tensor: keras.KerasTensor) -> tf.TensorSpec:
    unknown = SIDE if len(tensor.shape) == 4 else LENGTH
    if len(tensor.shape) == 3 and tensor.shape[-1] == 1:
        unknown = NUM_SAMPLES
    shape = [BATCH, *(unknown if n is None else n for n in tensor.shape[1:])]
    return tf.TensorSpec(shape, tensor.dtype)


def _step(model: keras.Model) -> Callable[[Any], Any]:
    def step(inputs):
        random.seed(0)
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(inputs, training=True))
            loss = sum(tf.reduce_mean(tf.square(tf.cast(y, "float32"))) for y in outputs)
        weights = [v.value for v in model.trainable_variables]
        gradients = [g for g in tape.gradient(loss, weights) if g is not None]
        return [loss, *(tf.reduce_sum(g) for g in gradients)]

    return step


# --- the page ------------------------------------------------------------------------


def models_page() -> str:
    """`docs/coverage/models.md`."""
    results = []
    for name, make in (*applications(), *backbones()):
        results.append(probe(name, make))
        print(results[-1], flush=True)
        keras.backend.clear_session()
    traced = [r for r in results if not r.error]
    full = [r for r in traced if not r.without_rule and not r.gathers]
    rows = [
        [
            r.name,
            str(r.num_ops),
            f"{r.num_weights:,}",
            code(r.without_rule) or "none",
            str(r.replicated),
            "yes" if not r.gathers else f"no: {', '.join(r.gathers)}",
        ]
        for r in traced
    ]
    columns = ["Model", "Ops", "Weights", "Ops without a rule", "Replicated", "Batch stays split"]
    failed = [[r.name, r.error.replace("|", "/")] for r in results if r.error]
    not_traced = markdown_table(["Model", "Why"], failed) if failed else "None."
    return f"""# Coverage of models

Made by `{COMMAND}` ({made_with("tensorflow", "keras", "keras-hub")}).

Forward and backward pass of each model are traced, and partitioned with the batch split over two
ranks. Nothing runs here: this table says what is shared out, not that numbers are equal (tests
do). Of `keras.applications` one model of each family is taken, of KerasHub the backbones in a
tiny configuration. *Replicated* counts the ops that have no rule as they stand. *Batch stays
split* means that nothing gathers it.

{len(full)} of {len(traced)} models have a rule for every op and keep the batch split.

{markdown_table(columns, rows)}

## Not traced

{not_traced}

## Not tried

KerasHub backbones that are made of other models, or whose arguments this script does not know:
{code(not_tried())}.
"""
