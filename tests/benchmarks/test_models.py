"""The models of the benchmarks train in plain Keras; the full ones have the published sizes."""

import keras
import numpy as np
import pytest

import tfpar as tap
from benchmarks import models
from benchmarks.models.experts import MoE
from tests.cases import at_night

PUBLISHED = {
    "roberta_large": 355e6,
    "switch_c": 1571e9,
    "t5_large": 737.7e6,
    "vit_huge": 632e6,
    "wav2vec2_large": 317e6,
}

# Rhino's tables are round, and its models are not all described (see `sizes`).
ROUGHLY = {
    "albert_xxlarge": 235e6,
    "dnabert": 162e6,
    "gpt_xl": 1.3e9,
    "moe_16e_2b4": 2.4e9,
    "unet": 33e6,
    "vgg19_1m": 4.2e9,
    "wide_resnet_2b6": 2.6e9,
    "wide_resnet_12b": 12e9,
}


TRAINED = ("gpt", "gshard_moe", "unet")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRAINED, *at_night(*sorted({*models.SMALL} - {*TRAINED}))])
def test_small_models_train(name):
    keras.utils.set_random_seed(0)
    model = models.compile_model(models.SMALL[name]())
    model.run_eagerly = True  # tracing takes longer than one step
    x, y = models.batch_of(model, 4)
    before = [w.numpy() for w in model.trainable_variables]
    assert np.isfinite(model.train_on_batch(x, y))
    moved = [
        not np.array_equal(b, w) for b, w in zip(before, model.trainable_variables, strict=True)
    ]
    assert sum(moved) >= 0.9 * len(moved)


SIZES = PUBLISHED | ROUGHLY
BUILT = ("roberta_large", "vgg19_1m")


@pytest.mark.parametrize("name", [*BUILT, *at_night(*sorted({*SIZES} - {*BUILT}))])
def test_full_models_have_the_published_size(name):
    with tap.auto_parallel(tap.split([1, 1])):
        model = models.FULL[name]()
    if name in PUBLISHED:
        assert model.count_params() == pytest.approx(PUBLISHED[name], rel=0.01)
    else:
        assert model.count_params() == pytest.approx(ROUGHLY[name], rel=0.15)


def test_an_encoder_block_of_t5_has_six_matrices():
    model = models.t5(num_layers=3)
    for i in range(3):
        block = model.get_layer(f"encoder_block_{i}")
        assert sum(len(w.shape) == 2 for w in block.weights) == 6


def test_albert_has_one_block_for_all_layers():
    shallow, deep = (models.albert(num_layers=n) for n in (1, 3))
    assert shallow.count_params() == deep.count_params()
    assert len(deep.get_layer("block")._inbound_nodes) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_later_tokens_do_not_change_earlier_logits(name):
    model = models.SMALL[name]()
    x, _ = models.batch_of(model, 2)
    tokens = x[-1] if isinstance(x, list) else x
    before = model.predict_on_batch(x)
    tokens[:, 9] = (tokens[:, 9] + 1) % 64
    after = model.predict_on_batch(x)
    np.testing.assert_allclose(before[:, :9], after[:, :9], rtol=1e-4, atol=1e-5)
    assert np.abs(before[:, 9:] - after[:, 9:]).max() > 1e-3


@pytest.mark.parametrize("top_k", [1, 2])
def test_experts_compute_what_each_token_chose(top_k):
    x = np.random.default_rng(0).standard_normal((2, 6, 8)).astype("float32")
    layer = MoE(16, 4, top_k=top_k)
    layer.router.capacity_factor = 4.0  # a place for everyone
    y = keras.ops.convert_to_numpy(layer(x))
    router, wi, wo = (np.asarray(w) for w in (layer.router.kernel, layer.wi, layer.wo))
    for group, row in zip(x, y, strict=True):
        for token, result in zip(group, row, strict=True):
            gates = np.exp(token @ router) / np.exp(token @ router).sum()
            chosen = np.argsort(gates)[::-1][:top_k]
            expected = sum(gates[e] * (np.maximum(token @ wi[e], 0) @ wo[e]) for e in chosen)
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_a_full_expert_takes_no_more_tokens():
    layer = MoE(16, 2)
    layer.router.capacity_factor = 1.0  # three of six tokens each
    x = np.ones((1, 6, 8), "float32")  # all choose the same
    y = keras.ops.convert_to_numpy(layer(x))[0]
    assert (y[:3] != 0).any(axis=-1).all()
    assert (y[3:] == 0).all()
