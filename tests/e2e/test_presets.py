"""Presets of KerasHub on ranks of one process: read by shards, tuned, saved for plain Keras."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
from keras.distribution import DeviceMesh, ModelParallel, set_distribution

import tfpar as tap
from tests.e2e.test_keras_hub import LABELS, TEXT, classifier
from tfpar.tf.variables import ParallelVariable

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("presets")]

MESH = tap.Mesh.of({"model": 2})


@pytest.fixture(scope="module")
def keras_hub():
    """Imported late: it takes long, and the quick part of the suite does without."""
    return pytest.importorskip("keras_hub")


@pytest.fixture(scope="module")
def presets(keras_hub):
    pytest.importorskip("sentencepiece")
    return pytest.importorskip("tests.presets")


@pytest.fixture(scope="module")
def preset(presets, tmp_path_factory):
    """In several files of weights."""
    folder = tmp_path_factory.mktemp("gemma")
    presets.save_gemma(folder, max_shard_size=1e-6)
    assert len(list(folder.glob("model_*.weights.h5"))) > 1
    return folder


@pytest.fixture(scope="module")
def plain(presets, preset):
    """The task that plain Keras has tuned, and what its `fit` returned."""
    task = presets.with_lora(preset)
    return task, presets.tuned(task)


@pytest.fixture(scope="module")
def parallel(presets, preset):
    """The same on two ranks; LoRA is enabled outside of the block, as where it comes later."""
    with tap.auto_parallel(MESH, presets.SPLIT, planner=None):
        task = presets.with_lora(preset)
    return task, presets.tuned(task)


def test_lora_trains_on_strings_as_in_plain_keras(presets, preset, plain, parallel):
    (_, want), (task, got) = plain, parallel
    assert got.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-4, err_msg=name)
    split = {w.path for w in task.weights if w.value.is_sharded and w.value.layout[1] != ()}
    assert "token_embedding/embeddings" in split
    before = presets.frozen(presets.with_lora(preset))
    for name, value in presets.frozen(task).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert all(np.any(w) for w in task.trainable_weights)  # LoRA's second factors begin as zeros


@pytest.fixture
def by_map(keras_hub):
    """The layout map that Gemma brings is in force."""
    mesh = DeviceMesh((1, 2), ("batch", "model"), ["cpu:0", "cpu:1"])
    layouts = keras_hub.models.GemmaBackbone.get_layout_map(mesh)
    set_distribution(ModelParallel(layout_map=layouts, batch_dim_name="batch"))
    yield
    set_distribution(None)


def test_a_layout_map_of_keras_hub_is_the_plan(presets, preset, plain, by_map):
    task = presets.with_lora(preset)
    got = presets.tuned(task)
    for name, values in plain[1].items():
        np.testing.assert_allclose(got[name], values, rtol=1e-4, err_msg=name)
    split = {w.path: str(w.value.layout[1]) for w in task.backbone.weights if w.value.is_sharded}
    assert split["token_embedding/embeddings"] == "(R, S(0))"
    assert split["decoder_block_1/ffw_gating/kernel"] == "(R, S(1))"


def test_under_a_layout_map_a_preset_is_read_by_shards(presets, by_map, tmp_path, monkeypatch):
    presets.save_gemma(tmp_path, scale=12)
    streamed: list[str] = []
    assign = ParallelVariable.assign_stored

    def spied(self, value):
        streamed.append(self.name)
        assign(self, value)

    monkeypatch.setattr(ParallelVariable, "assign_stored", spied)
    presets.with_lora(tmp_path)
    assert any("embeddings" in name for name in streamed)


def test_generates_the_text_of_plain_keras(presets, plain, parallel):
    assert presets.generated(parallel[0]) == presets.generated(plain[0])


def test_plain_keras_loads_what_is_saved(presets, preset, plain, parallel, tmp_path):
    (reference, _), (task, _) = plain, parallel
    task.save_to_preset(str(tmp_path / "tuned"), max_shard_size=1e-6)
    (loaded,) = presets.plain_logits(tmp_path / "tuned")
    np.testing.assert_allclose(loaded, presets.logits(task), atol=1e-5)
    np.testing.assert_allclose(loaded, presets.logits(reference), atol=1e-4)
    before = presets.logits(presets.with_lora(preset))
    assert np.abs(loaded - before).max() > 0.1  # so LoRA's weights are in it


@pytest.mark.nightly
def test_a_preset_goes_on_under_another_plan(presets, parallel, tmp_path):
    task, _ = parallel
    task.save_to_preset(str(tmp_path))
    want = presets.tuned(presets.with_lora(tmp_path))
    split = [tap.batch("data"), tap.shard("ffw_linear/kernel", dim=1, axis="data")]
    with tap.auto_parallel(tap.Mesh.of({"data": 2}), split, planner=None):
        other = presets.with_lora(tmp_path)
    np.testing.assert_allclose(presets.logits(other), presets.logits(task), atol=1e-5)
    for name, values in presets.tuned(other).items():
        np.testing.assert_allclose(values, want[name], rtol=1e-4, err_msg=name)


def test_loras_own_weights(presets, preset, parallel, tmp_path):
    task, _ = parallel
    path = str(tmp_path / "tuned.lora.h5")
    task.backbone.save_lora_weights(path)
    with tap.auto_parallel(MESH, presets.SPLIT, planner=None):
        on_ranks = presets.with_lora(preset)
    for other in (presets.with_lora(preset), on_ranks):
        other.backbone.load_lora_weights(path)
        np.testing.assert_allclose(presets.logits(other), presets.logits(task), atol=1e-5)


@pytest.mark.nightly
def test_a_model_that_is_no_gemma(presets, tmp_path):
    presets.save_llama(tmp_path / "llama")
    plain = presets.with_lora(tmp_path / "llama")
    want = presets.tuned(plain)
    split = [
        tap.shard("token_embedding/embeddings", dim=0, axis="model"),
        tap.shard("token_embedding/reverse_embeddings", dim=1, axis="model"),
        tap.shard("feedforward_intermediate_dense/kernel", dim=1, axis="model"),
    ]
    with tap.auto_parallel(MESH, split, planner=None):
        task = presets.with_lora(tmp_path / "llama")
    for name, values in presets.tuned(task).items():
        np.testing.assert_allclose(values, want[name], rtol=1e-4, err_msg=name)
    task.save_to_preset(str(tmp_path / "tuned"), max_shard_size=1e-6)
    saved = presets.with_lora(tmp_path / "tuned")
    np.testing.assert_allclose(presets.logits(saved), presets.logits(plain), atol=1e-4)
    assert presets.generated(task) == presets.generated(plain)


@pytest.mark.nightly
def test_lora_on_kernels_of_8_bits(presets, preset, tmp_path):
    """Quantized on the mesh as on one device; the preset of that is read by shards."""
    plain = presets.with_lora(preset)
    with tap.auto_parallel(MESH, presets.SPLIT[:1], planner=None):
        task = presets.with_lora(preset)
    for model in (plain, task):
        model.backbone.quantize("int8")
    np.testing.assert_allclose(presets.logits(task), presets.logits(plain), atol=1e-5)
    task.save_to_preset(str(tmp_path))
    want = presets.tuned(presets.with_lora(tmp_path))
    split = [*presets.SPLIT[:1], tap.shard("ffw_gating/kernel", dim=1, axis="model")]
    with tap.auto_parallel(MESH, split, planner=None):
        again = presets.with_lora(tmp_path)
    assert {w.dtype for w in again.weights} == {"int8", "float32"}
    for name, values in presets.tuned(again).items():
        np.testing.assert_allclose(values, want[name], rtol=1e-3, err_msg=name)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"num_classes": 3}], ids=["its head", "a new head"])
def test_a_classifier_of_a_preset(keras_hub, tmp_path, options):
    saved = classifier(keras_hub)
    saved.save_to_preset(str(tmp_path))

    def load():
        random.seed(5)
        model = keras_hub.models.TextClassifier.from_preset(str(tmp_path), **options)
        model.compile(keras.optimizers.SGD(0.1), saved.loss, jit_compile=False)
        return model

    plain = load()
    want = plain.fit(TEXT, LABELS, batch_size=4, shuffle=False, verbose=0).history
    split = [tap.shard("logits/kernel", dim=0, axis="model")]
    with tap.auto_parallel(MESH, split, planner=None):
        model = load()
    got = model.fit(TEXT, LABELS, batch_size=4, shuffle=False, verbose=0).history
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-4)
    predicted = model.predict(TEXT, verbose=0)
    np.testing.assert_allclose(predicted, plain.predict(TEXT, verbose=0), atol=1e-5)
