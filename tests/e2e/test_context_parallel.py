"""Attention on blocks of its scores, and positions that are split over ranks (ring attention)."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfpar as tap
from tests.cases import nightly
from tests.equivalence import assert_equivalent
from tfpar.spec import ArgumentError, SpecError, format_spec
from tfpar.tf.keras import parallel_model

LENGTH, WIDTH, VOCABULARY, BATCH = 16, 16, 40, 4
CONTEXT = [tap.context_parallel("context")]


def ids(samples=8, length=LENGTH):
    found = np.random.default_rng(0).integers(1, VOCABULARY, (samples, length))
    found[:, :3] = 0  # of which causal rows see nothing
    return found


def data(samples=8, length=LENGTH):
    return ids(samples, length), ids(samples, length)[:, ::-1].copy()


def attend(h, tokens, kind):
    """One attention layer of each kind that Keras has, or that users write."""
    if kind == "causal":
        return layers.MultiHeadAttention(4, 4, name=kind)(h, h, use_causal_mask=True)
    if kind == "grouped":
        return layers.GroupQueryAttention(4, 4, 2, name=kind)(h, h, use_causal_mask=True)
    if kind == "open":
        return layers.MultiHeadAttention(4, 4, name=kind)(h, h)
    if kind == "padded":
        real = ops.not_equal(tokens, 0)[:, None]
        attention = layers.MultiHeadAttention(4, 4, name=kind)
        return attention(h, h, attention_mask=real, use_causal_mask=True)
    if kind == "cross":
        return layers.MultiHeadAttention(4, 4, name=kind)(h, h[:, :12])
    if kind == "one head":
        return layers.Attention(name="one_head")([h, h, h], use_causal_mask=True)
    assert kind == "fed"  # what is computed before the model is, comes with its inputs
    q, k, v = (layers.Dense(WIDTH, name=f"fed_{n}")(h) for n in "qkv")
    at = ops.arange(LENGTH)
    bias = ops.where(at[:, None] >= at - 2, 0.0, -1e9)
    scores = ops.matmul(q, ops.transpose(k, (0, 2, 1))) * 0.25
    return ops.matmul(ops.softmax(30 * ops.tanh(scores / 30) + bias), v)


def model(*kinds, length=LENGTH, jit_compile=False):
    tokens = keras.Input((length,), dtype="int32")
    h = layers.Embedding(VOCABULARY, WIDTH, name="tokens")(tokens)
    at = ops.zeros_like(tokens) + ops.arange(length)
    h = h + layers.Embedding(length, WIDTH, name="positions")(at)
    for kind in kinds:
        h = layers.LayerNormalization(name=f"{kind.replace(' ', '_')}_norm")(
            h + attend(h, tokens, kind)
        )
    found = keras.Model(tokens, layers.Dense(VOCABULARY, name="head")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=jit_compile)
    return found


def attentions(trained, kind="train"):
    """How the attentions of a step are split: the specs of their queries."""
    decisions = trained.executable(kind).partitioned.decisions
    return [
        format_spec(decision.strategy.in_specs[0])
        for op, decision in decisions.items()
        if op.type == "TfparAttention"
    ]


def kinds_of(trained):
    return collections.Counter(kind for kind, _, _ in trained.collectives())


def largest(trained):
    """Entries of the largest tensor of a rank's step."""
    graphs = trained.executable().local.graphs()
    return max(t.num_elements for g in graphs for op in g.ops for t in op.outputs)


EVERY_KIND = ("causal", "grouped", "open", "padded", "cross", "one head", "fed")


@pytest.mark.slow
def test_every_kind_of_attention_around_a_ring():
    parallel, _ = assert_equivalent(
        lambda: model(*EVERY_KIND), data(), tap.split({"context": 4}), CONTEXT, batch_size=BATCH
    )
    assert set(attentions(parallel)) == {"S(1)", "S(2)"} and len(attentions(parallel)) == 7
    moved = kinds_of(parallel)
    assert moved["permute"] and not moved["all_to_all"]
    local = parallel.executable().local.graph
    sent = [t.num_bytes for op in local.ops if op.type == "Permute" for t in op.inputs]
    told = [size for kind, _, size in parallel.collectives() if kind == "permute"]
    assert sorted(sent) == sorted(told)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "constraints", "options", "specs"),
    [
        ({"data": 2, "context": 2}, [], {"jit_compile": True}, "S(0),S(2)"),
        pytest.param(
            {"data": 2, "model": 2, "context": 2},
            [tap.shard(".*(query|key|value)/kernel", 1, "model")],
            {},
            "S(0),S(1),S(2)",
            marks=pytest.mark.nightly,
        ),
        (
            {"context": 2},
            [],
            {"pipeline": tap.Pipeline(stages=1, microbatches=2), "recompute": True},
            "S(2)",
        ),
        ({"context": 4}, [], {"pipeline": tap.Pipeline(stages=2, microbatches=2)}, "S(2)"),
    ],
    ids=["and data, compiled", "and data and model", "in microbatches, recomputed", "in stages"],
)
def test_context_parallel(mesh, constraints, options, specs):
    jit_compile = "jit_compile" in options
    options = {name: value for name, value in options.items() if name != "jit_compile"}
    parallel, _ = assert_equivalent(
        lambda: model("causal", "padded", jit_compile=jit_compile),
        data(),
        tap.split(mesh),
        [*CONTEXT, *constraints],
        batch_size=BATCH,
        options=options,
    )
    assert specs in attentions(parallel)
    assert kinds_of(parallel)["permute"]


@pytest.mark.slow
def test_an_axis_called_data_splits_positions_alone_if_it_is_asked_to():
    laid = tap.context_parallel("data")
    parallel, _ = assert_equivalent(
        lambda: model("causal"), data(), tap.split({"data": 2}), laid, batch_size=BATCH
    )
    assert attentions(parallel) == ["S(2)"] and tap.plan_of(parallel.model).batch_axes == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "own"),
    [
        ("LlamaBackbone", {"num_key_value_heads": 2}),
        nightly("MistralBackbone", {"num_key_value_heads": 2, "sliding_window": 5}),
        nightly("GPT2Backbone", {"dropout": 0.0, "max_sequence_length": LENGTH}),
        nightly("BertBackbone", {"dropout": 0.0, "max_sequence_length": LENGTH}),
    ],
)
def test_models_of_keras_hub(backbone, own):
    """With rotary or learned positions, masks of padding, sliding windows."""
    backbones = pytest.importorskip("keras_hub").models

    def build():
        inner = getattr(backbones, backbone)(VOCABULARY, 1, 4, WIDTH, 2 * WIDTH, **own)
        made = inner(inner.input)
        made = made["sequence_output"] if isinstance(made, dict) else made
        found = keras.Model(inner.input, layers.Dense(VOCABULARY, name="head")(made))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        found.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, jit_compile=False)
        return found

    x, y = data(4)
    given = {"token_ids": x, "padding_mask": (x > 0).astype("int32"), "segment_ids": 0 * x}
    given = {name: given[name] for name in build().input}
    parallel, _ = assert_equivalent(
        build, (given, y), tap.split({"context": 2}), CONTEXT, batch_size=2
    )
    assert attentions(parallel) == ["S(2)"]


@pytest.mark.slow
def test_heads_are_exchanged_for_positions_where_layers_split_them():
    """Ulysses: what is split by positions outside is split by heads within."""
    laid = [tap.batch(), tap.replicate(".*"), tap.shard_output("tokens", 1, "data")]
    laid += [tap.shard_output("causal/(query|key|value)", 2, "data")]
    parallel, _ = assert_equivalent(
        lambda: model("causal"),
        data(),
        tap.split({"data": 2}),
        laid,
        batch_size=BATCH,
        options={"attention": "blockwise"},
    )
    assert attentions(parallel) == ["S(1)"] and kinds_of(parallel)["all_to_all"] >= 3


@pytest.mark.slow
@pytest.mark.parametrize("length", [32, nightly(24), nightly(21)])
def test_scores_never_exist_whole(length):
    """Neither on one device nor on several; chunks of odd lengths are whole."""

    def trained(parts):
        found, _ = assert_equivalent(
            lambda: model("causal", length=length),
            data(2, length),
            tap.split({"context": parts}),
            CONTEXT if length % parts == 0 else [],
            batch_size=2,
            options={"attention": "blockwise"},
        )
        return found

    scores = 2 * 4 * length * length
    logits = 2 * length * VOCABULARY
    assert largest(trained(1)) <= max(scores / (4 if length % 2 == 0 else 1), logits)
    if length % 8 == 0:
        assert largest(trained(4)) <= max(scores / 64, logits)


@pytest.mark.slow
def test_evaluation_and_prediction_run_on_blocks_too():
    def build():
        found = model("padded")
        found.compile(loss=found.loss, metrics=["accuracy"])
        return found

    x, y = data()
    keras.utils.set_random_seed(1)
    plain = build()
    with tap.auto_parallel(tap.split({"context": 2}), CONTEXT, planner=None):
        parallel = build()
    parallel.set_weights(plain.get_weights())
    np.testing.assert_allclose(
        parallel.predict(x, verbose=0), plain.predict(x, verbose=0), 1e-4, 1e-5
    )
    assert parallel.evaluate(x, y, verbose=0) == pytest.approx(
        plain.evaluate(x, y, verbose=0), 1e-4
    )


def test_dropout_of_weights_runs_whole():
    with tap.auto_parallel(tap.split([2]), planner=None, attention="blockwise"):
        h = keras.Input((LENGTH, WIDTH))
        found = keras.Model(h, layers.MultiHeadAttention(4, 4, dropout=0.5)(h, h))
        found.compile("sgd", "mse")
    x = np.ones((2, LENGTH, WIDTH), "float32")
    found.fit(x, x, verbose=0)
    graph = parallel_model(found).executables["train"].captured.graph
    assert "Softmax" in {op.type for op in graph.ops}
    assert not any(op.type.startswith("TfparAttention") for op in graph.ops)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"attention": "flash"}, ArgumentError, "attention is 'flash'; .*'whole', 'blockwise'"),
        ({"constraints": tap.context_parallel("rows")}, SpecError, "no axis 'rows'"),
        ({"constraints": CONTEXT, "length": 18}, SpecError, "18 positions .* 4 equal parts"),
        ({"constraints": CONTEXT, "kinds": ()}, SpecError, "attentions are none that it knows"),
        ({"constraints": [*CONTEXT, tap.batch("context")]}, SpecError, "samples or positions"),
        (
            {"constraints": [*CONTEXT, tap.shard_output("causal/query", 2, "context")]},
            SpecError,
            "contradict each other along mesh axis 'context'",
        ),
    ],
)
def test_refused(options, error, told):
    length, kinds = options.get("length", LENGTH), options.get("kinds", ("causal",))
    options = {name: options[name] for name in options.keys() - {"length", "kinds"}}
    with pytest.raises(error, match=told):
        tap.plan(
            lambda: model(*kinds, length=length), data(length=length), {"context": 4}, **options
        )


@pytest.mark.nightly
@pytest.mark.parametrize(("heads", "dim"), [(8, "S(1)"), (4, "S(2)")])
def test_131072_tokens_on_8_h100(heads, dim):
    """Unasked: heads over all ranks where there are enough, else positions."""

    def build():
        tokens = keras.Input((131072,), dtype="int32", batch_size=1)
        h = layers.Embedding(VOCABULARY, 1024, name="tokens")(tokens)
        for i in range(2):
            attention = layers.MultiHeadAttention(heads, 1024 // heads, name=f"block_{i}_attention")
            normed = layers.LayerNormalization(name=f"block_{i}_norm")(h)
            h = h + attention(normed, normed, use_causal_mask=True)
            h = h + layers.Dense(1024, "gelu", name=f"block_{i}_mlp")(h)
        found = keras.Model(tokens, layers.Dense(VOCABULARY, name="head")(h))
        found.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return found

    batch = [np.zeros((1, 131072), "int32")] * 2
    plan = tap.plan(build, batch, 8, cluster="dgx-h100")
    assert plan.attention == "blockwise" and plan.cost.memory_bytes < 20e9
    decisions = plan.partitioned.decisions.items()
    specs = {
        format_spec(d.strategy.in_specs[0]) for op, d in decisions if op.type == "TfparAttention"
    }
    assert all(dim in spec for spec in specs)


def test_a_plan_runs_on_blocks_where_scores_do_not_fit():
    def build():
        found = model("causal", length=512)
        return found

    batch = data(2, 512)
    options = {"planner": "rhino", "level": 2, "cluster": "rhino-m8"}
    whole = tap.plan(build, batch, 2, attention="whole", **options)
    limit = whole.cost.memory_bytes / 2
    found = tap.plan(build, batch, 2, memory_limit=limit, recompute=False, **options)
    assert found.attention == "blockwise"
    assert found.cost.memory_bytes <= limit
    assert any("attention on blocks" in one.name for one in found.findings.attempts)
    assert "on blocks of its scores" in found.summary()
    assert "attention: whole -> blockwise" in "\n".join(whole.diff(found))
