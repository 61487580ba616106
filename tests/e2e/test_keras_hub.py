"""Tasks of KerasHub on ranks of one process: generated text, and data that a task preprocesses."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest

import tfpar as tap

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "dog"]
TEXT, LABELS = ["the fox", "dog", "the dog", "fox fox"] * 2, np.arange(8) % 3


@pytest.fixture(scope="module")
def keras_hub():
    """Imported late: it takes long, and the quick part of the suite does without."""
    return pytest.importorskip("keras_hub")


@pytest.fixture(scope="module")
def ranks(keras_hub):
    return pytest.importorskip("tests.tf.distributed.hub_ranks")


@pytest.fixture(scope="module")
def generated(ranks):
    """What one device generates after `fit`."""
    return ranks.generated(ranks.trained(ranks.build()))


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 2, "model": 2}], ids=["1", "2x2"])
def test_generates_the_tokens_of_one_device_after_fit(ranks, generated, mesh):
    split = [tap.batch("data"), *ranks.SPLIT[:2]] if "model" in mesh else [tap.batch()]
    with tap.auto_parallel(tap.Mesh.of(mesh), split, planner=None):
        model = ranks.build()
    assert ranks.generated(ranks.trained(model)) == generated


@pytest.mark.nightly
def test_a_function_made_before_a_model_is_parallel_is_made_anew(ranks):
    plain, model = ranks.build("greedy"), ranks.build("greedy")
    before = model.generate("abc")
    assert before == plain.generate("abc")
    tap.parallelize(model, {"model": 2}, ranks.SPLIT[:2], planner=None)
    assert ranks.trained(model).generate("abc") == ranks.trained(plain).generate("abc")
    assert tap.plan_of(model).mesh.size == 2


def classifier(keras_hub) -> keras.Model:
    keras.utils.set_random_seed(0)
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=WORDS)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(WORDS),
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=6,
        dropout=0.0,
    )
    model = keras_hub.models.BertTextClassifier(
        backbone,
        num_classes=3,
        preprocessor=keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=6),
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    return model


@pytest.mark.slow
def test_a_task_is_planned_for_what_its_preprocessor_makes_of_strings(keras_hub):
    build = functools.partial(classifier, keras_hub)
    made = build().preprocessor(TEXT)
    plans = [tap.plan(build, (x, LABELS), [2], planner="tap") for x in (TEXT, np.array(TEXT), made)]
    kernels = [{k: v for k, v in p.variables.items() if "seed" not in k} for p in plans]
    assert kernels[0] and kernels[0] == kernels[1] == kernels[2]


@pytest.mark.nightly
def test_a_task_is_verified_and_covered_with_strings(keras_hub):
    with tap.auto_parallel([2], planner=None):
        model = classifier(keras_hub)
    without = tap.coverage(model)  # of the length to which its preprocessor pads
    with_data = tap.coverage(model, TEXT, LABELS)
    assert 0 < len(without.op_types) < len(with_data.op_types)
    assert tap.verify(model, TEXT, LABELS, steps=2, batch_size=4)
