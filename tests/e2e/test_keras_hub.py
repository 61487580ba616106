"""Tasks of KerasHub on ranks of one process: generated text, and data that a task preprocesses."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfpar as tap

keras_hub = pytest.importorskip("keras_hub")
ranks = pytest.importorskip("tests.distributed.hub_ranks")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "dog"]
TEXT, LABELS = ["the fox", "dog", "the dog", "fox fox"] * 2, np.arange(8) % 3


@pytest.fixture(scope="module")
def generated():
    """What one device generates after `fit`."""
    return ranks.generated(ranks.trained(ranks.build()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, split",
    [
        ({"data": 1}, [tap.batch()]),
        ({"data": 2, "model": 2}, [tap.batch("data"), *ranks.SPLIT[:2]]),
    ],
    ids=["1", "2x2"],
)
def test_generates_the_tokens_of_one_device_after_fit(generated, mesh, split):
    with tap.auto_parallel(tap.Mesh.of(mesh), split, planner=None):
        model = ranks.build()
    assert ranks.generated(ranks.trained(model)) == generated


@pytest.mark.slow
def test_a_function_made_before_a_model_is_parallel_is_made_anew():
    plain, model = ranks.build("greedy"), ranks.build("greedy")
    before = model.generate("abc")
    assert before == plain.generate("abc")
    tap.parallelize(model, {"model": 2}, ranks.SPLIT[:2], planner=None)
    assert ranks.trained(model).generate("abc") == ranks.trained(plain).generate("abc")
    assert tap.plan_of(model).mesh.size == 2


def classifier() -> keras.Model:
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
def test_a_task_is_planned_for_what_its_preprocessor_makes_of_strings():
    made = classifier().preprocessor(TEXT)
    plans = [
        tap.plan(classifier, (x, LABELS), [2], planner="tap") for x in (TEXT, np.array(TEXT), made)
    ]
    kernels = [{k: v for k, v in p.variables.items() if "seed" not in k} for p in plans]
    assert kernels[0] and kernels[0] == kernels[1] == kernels[2]


@pytest.mark.slow
def test_a_task_is_verified_and_covered_with_strings():
    with tap.auto_parallel([2], planner=None):
        model = classifier()
    without = tap.coverage(model)  # of the length to which its preprocessor pads
    with_data = tap.coverage(model, TEXT, LABELS)
    assert 0 < len(without.op_types) < len(with_data.op_types)
    assert tap.verify(model, TEXT, LABELS, steps=2, batch_size=4)
