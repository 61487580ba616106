"""Architectures that others wrote train on a mesh as on one device.

Each model is the real code of keras.applications or keras_hub in a tiny configuration. It is
trained for two batches of a size that does not divide, under data parallelism and under tensor
parallelism that it was not made for: embeddings split by rows and a random half of the kernels
split by their last dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.applications import mobilenet_v3
from keras.src.applications.convnext import ConvNeXt
from keras.src.applications.densenet import DenseNet

import tfpar as tap
from tests.equivalence import Trained, assert_same, op_by_op, train
from tests.one_epoch import Build, cases, layout_of_strangers

BATCH = 5  # no multiple of the ranks
NUM_SAMPLES = 2 * BATCH
LENGTH, VOCABULARY, CLASSES = 12, 50, 6
IMAGE = (32, 32, 3)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model to try.

    Attributes:
        build: makes the model, without compiling it.
        policy: batch normalization on few samples multiplies roundings: float64 there.
        exchanges: data parallelism has more to do than to add gradients up.
    """

    build: Callable[[], keras.Model]
    policy: str = "float32"
    learning_rate: float = 0.02
    from_logits: bool = True
    exchanges: bool = False


def hub() -> Any:
    return pytest.importorskip("keras_hub").models


TEXT = dict(
    vocabulary_size=VOCABULARY, num_layers=1, num_heads=2, hidden_dim=16, intermediate_dim=32
)
GROUPED = dict(
    vocabulary_size=VOCABULARY,
    num_layers=1,
    num_query_heads=4,
    num_key_value_heads=2,
    hidden_dim=16,
    intermediate_dim=32,
)


def classifier(task: str, backbone: str, **config: Any) -> Callable[[], keras.Model]:
    def build():
        made = getattr(hub(), backbone)(**config)
        return getattr(hub(), task)(made, num_classes=CLASSES)

    return build


def language_model(task: str, backbone: str, **config: Any) -> Callable[[], keras.Model]:
    def build():
        return getattr(hub(), task)(getattr(hub(), backbone)(**config))

    return build


def pooled(backbone: str, **config: Any) -> Callable[[], keras.Model]:
    """The backbone's outputs, averaged over everything but samples and channels, classified."""

    def build():
        made = getattr(hub(), backbone)(**config)
        features = [
            keras.layers.Lambda(_average, output_shape=(t.shape[-1],))(t) if len(t.shape) > 2 else t
            for t in keras.tree.flatten(made.output)
        ]
        if len(features) > 1:
            features = [keras.layers.Concatenate()(features)]
        return keras.Model(made.input, keras.layers.Dense(CLASSES)(features[0]))

    return build


def _average(x):
    return keras.ops.mean(x, axis=list(range(1, len(x.shape) - 1)))


def application(model: Any, *args: Any, **config: Any) -> Architecture:
    def build():
        return model(*args, weights=None, input_shape=IMAGE, classes=CLASSES, **config)

    return Architecture(build, "float64", 1e-4, from_logits=False)


def mobilenet():
    def blocks(x, kernel, activation, se_ratio):
        of_small = [(1, 16, 3, 2, se_ratio), (4, 24, 3, 1, None), (4, 24, kernel, 1, se_ratio)]
        for i, (expansion, filters, size, stride, ratio) in enumerate(of_small):
            x = mobilenet_v3._inverted_res_block(
                x, expansion, filters, size, stride, ratio, activation, i
            )
        return x

    return mobilenet_v3.MobileNetV3(
        blocks, 32, input_shape=IMAGE, model_type="small", weights=None, classes=CLASSES
    )


def segmenter():
    encoder = hub().MiTBackbone(
        layerwise_depths=[1] * 4,
        hidden_dims=[4, 8, 12, 16],
        num_layers=4,
        max_drop_path_rate=0.0,
        layerwise_num_heads=[1, 2, 2, 2],
        layerwise_sr_ratios=[8, 4, 2, 1],
        layerwise_patch_sizes=[7, 3, 3, 3],
        layerwise_strides=[4, 2, 2, 2],
        image_shape=(64, 64, 3),
    )
    backbone = hub().SegFormerBackbone(image_encoder=encoder, projection_filters=8)
    return keras.Model(backbone.input, keras.layers.Dense(CLASSES)(backbone.output))


ARCHITECTURES = {
    "llama": Architecture(language_model("LlamaCausalLM", "LlamaBackbone", **GROUPED)),
    "resnet": Architecture(
        pooled(
            "ResNetBackbone",
            input_conv_filters=[64],
            input_conv_kernel_sizes=[3],
            stackwise_num_filters=[64],
            stackwise_num_blocks=[1],
            stackwise_num_strides=[1],
            block_type="bottleneck_block",
            image_shape=IMAGE,
        ),
        "float64",
        1e-3,
    ),
    "mobilenet_v3": Architecture(mobilenet, "float64", 1e-4, from_logits=False),
    "densenet": application(DenseNet, [1, 1, 2, 1]),
    "convnext": application(ConvNeXt, [1, 1, 1, 1], [8, 8, 16, 16]),
    "gpt2": Architecture(
        language_model("GPT2CausalLM", "GPT2Backbone", **TEXT, max_sequence_length=LENGTH)
    ),
    "gemma2": Architecture(
        language_model(
            "GemmaCausalLM",
            "GemmaBackbone",
            **GROUPED,
            head_dim=4,
            use_post_ffw_norm=True,
            use_post_attention_norm=True,
            attention_logit_soft_cap=50.0,
            final_logit_soft_cap=30.0,
            use_sliding_window_attention=True,
            sliding_window_size=4,
        )
    ),
    "bloom": Architecture(language_model("BloomCausalLM", "BloomBackbone", **TEXT)),
    "mixtral": Architecture(
        language_model("MixtralCausalLM", "MixtralBackbone", **GROUPED, num_experts=4)
    ),
    "rwkv7": Architecture(
        language_model(
            "RWKV7CausalLM",
            "RWKV7Backbone",
            hidden_size=16,
            head_size=8,
            num_layers=1,
            vocabulary_size=VOCABULARY,
            intermediate_dim=32,
            gate_lora=4,
            mv_lora=4,
            aaa_lora=4,
            decay_lora=4,
        )
    ),
    "bert": Architecture(
        classifier("BertTextClassifier", "BertBackbone", **TEXT, max_sequence_length=LENGTH)
    ),
    "deberta": Architecture(
        classifier(
            "DebertaV3TextClassifier",
            "DebertaV3Backbone",
            **TEXT,
            bucket_size=4,
            max_sequence_length=LENGTH,
        ),
        exchanges=True,
    ),
    "fnet": Architecture(
        pooled(
            "FNetBackbone",
            vocabulary_size=VOCABULARY,
            num_layers=1,
            hidden_dim=16,
            intermediate_dim=32,
            max_sequence_length=LENGTH,
        )
    ),
    # It reshapes its mask where a transpose is meant, which mixes samples.
    "xlnet": Architecture(pooled("XLNetBackbone", **TEXT), exchanges=True),
    # A vocabulary looked up twice: samples that do not divide are joined behind each other.
    "t5": Architecture(pooled("T5Backbone", **{**TEXT, "num_layers": 2}), exchanges=True),
    "whisper": Architecture(
        pooled(
            "WhisperBackbone",
            **TEXT,
            num_mels=4,
            max_encoder_sequence_length=LENGTH,
            max_decoder_sequence_length=LENGTH,
        )
    ),
    "vit": Architecture(
        pooled(
            "ViTBackbone",
            image_shape=IMAGE,
            patch_size=16,
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            mlp_dim=32,
        )
    ),
    "swin": Architecture(
        pooled(
            "SwinTransformerBackbone",
            image_shape=IMAGE,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[2, 2],
            window_size=4,
            drop_path=0.0,
        )
    ),
    "segformer": Architecture(segmenter),
}

BY_DEFAULT = ("mobilenet_v3",)
IN_BOTH_WAYS = ("llama", "deberta")


def inputs_of(model: keras.Model, rng: np.random.Generator) -> Any:
    """Random samples for each input of the model, by its name."""

    def make(tensor):
        name = tensor.name
        shape = (NUM_SAMPLES, *(LENGTH if n is None else n for n in tensor.shape[1:]))
        if "mask" in name:
            lengths = rng.integers(LENGTH // 2, LENGTH + 1, (NUM_SAMPLES, 1))
            return (np.arange(shape[1]) < lengths).astype("int32")
        if "segment" in name:
            return np.broadcast_to(np.arange(shape[1]) >= LENGTH // 2, shape).astype("int32")
        if "int" in str(tensor.dtype) or "token" in name:
            return rng.integers(1, VOCABULARY, shape).astype("int32")
        return rng.normal(size=shape).astype("float32")

    return keras.tree.map_structure(make, model._inputs_struct)


def without_dropout(model: keras.Model) -> keras.Model:
    for layer in model._flatten_layers():
        for name in ("rate", "dropout", "_dropout"):
            # Some layers only show the rate of an inner one.
            if isinstance(vars(layer).get(name), float):
                setattr(layer, name, 0.0)
    return model


def fitted(
    architecture: Architecture,
    adapt: Callable[[Build], Build] = lambda build: build,
    **arguments: Any,
) -> Trained:
    """Train `architecture` from the same start on the same samples, whatever the mesh."""
    keras.utils.clear_session(free_memory=False)  # so that layers get the same names again
    keras.config.set_dtype_policy(architecture.policy)
    data: list[Any] = []

    def build():
        model = without_dropout(architecture.build())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=architecture.from_logits)
        optimizer = keras.optimizers.SGD(architecture.learning_rate, momentum=0.9)
        model.compile(optimizer, loss, jit_compile=False)
        rng = np.random.default_rng(0)
        shape = [LENGTH if n is None else n for n in model.output.shape[1:]]
        labels = rng.integers(0, shape[-1], (NUM_SAMPLES, *shape[:-1])).astype("int32")
        data.extend([inputs_of(model, rng), labels])
        return model

    try:
        return train(adapt(build), data, batch_size=BATCH, **arguments)
    finally:
        keras.config.set_dtype_policy("float32")


@functools.lru_cache(maxsize=1)
def on_one_device(name: str) -> Trained:
    return fitted(ARCHITECTURES[name], op_by_op)


@pytest.mark.parametrize(("name", "mode"), cases(ARCHITECTURES, BY_DEFAULT, IN_BOTH_WAYS))
def test_trains_as_on_one_device(name, mode):
    plain = on_one_device(name)
    constraints = layout_of_strangers(plain.model) if mode == "tensor" else []
    parallel = fitted(
        ARCHITECTURES[name], mesh=tap.split([2, 2]), constraints=constraints, start=plain.start
    )
    assert_same(parallel, plain)
    assert not parallel.executable().partitioned.prepared.fallbacks
    if mode == "data" and not ARCHITECTURES[name].exchanges:
        assert parallel.collectives() and not parallel.exchanged()
