"""Every kind of parallelism comes out of specs, with the collectives it should have."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfpar as tap
from tests.cases import nightly
from tests.equivalence import assert_equivalent

LENGTH, VOCABULARY, HIDDEN, HEADS, BATCH = 12, 50, 16, 4, 8
rng = np.random.default_rng(0)


def tokens(n=2 * BATCH, length=LENGTH, vocabulary=VOCABULARY):
    ids = rng.integers(0, vocabulary, (n, length + 1)).astype("int32")
    return ids[:, :-1], ids[:, 1:]


def block(x, i, use_bias=True):
    h = layers.LayerNormalization(name=f"block_{i}_ln1")(x)
    attention = layers.MultiHeadAttention(
        HEADS, HIDDEN // HEADS, use_bias=use_bias, name=f"block_{i}_attention"
    )
    x = x + attention(h, h, use_causal_mask=True)
    h = layers.LayerNormalization(name=f"block_{i}_ln2")(x)
    h = layers.Dense(4 * HIDDEN, activation="gelu", name=f"block_{i}_fc1")(h)
    return x + layers.Dense(HIDDEN, name=f"block_{i}_fc2")(h)


def gpt(num_layers=1, optimizer=None, vocabulary=VOCABULARY):
    # The bias of attention keys has no true gradient: Adam makes noise of it.
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    use_bias = isinstance(optimizer, keras.optimizers.SGD)
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(vocabulary, HIDDEN, name="tokens")(ids)
    x = x + layers.Embedding(LENGTH, HIDDEN, name="positions")(ops.arange(LENGTH))
    for i in range(num_layers):
        x = block(x, i, use_bias)
    model = keras.Model(ids, layers.Dense(vocabulary, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model


MEGATRON = [
    tap.shard(r".*attention/(query|key|value)/kernel", dim=1, axis="model"),
    tap.shard(r".*fc1/kernel", dim=1, axis="model"),
]


def by_kind(collectives, axis=None):
    """kind -> payload sizes, of the collectives over `axis`."""
    found = collections.defaultdict(list)
    for kind, axes, size in collectives:
        if axis is None or axes == (axis,):
            found[kind].append(size)
    return found


@pytest.mark.slow
def test_data_parallel_reduces_the_packed_gradients_and_nothing_else():
    parallel, plain = assert_equivalent(gpt, tokens(), tap.split([2, 2]), batch_size=BATCH)
    found = by_kind(parallel.collectives())
    assert set(found) == {"all_reduce"}
    weights = sum(w.nbytes for w in plain.model.get_weights())
    gradients = sum(s for s in found["all_reduce"] if s > 8)
    assert gradients == weights
    local = parallel.executable().local.graph
    packed = [op for op in local.ops if op.type == "AllReduce"]
    assert len(packed) <= 2, "gradients of one group share a bucket"


@pytest.mark.slow
def test_megatron_has_its_four_all_reduces():
    parallel, _ = assert_equivalent(gpt, tokens(), tap.split([1, 2]), MEGATRON, batch_size=BATCH)
    found = by_kind(parallel.collectives())
    activations = BATCH * LENGTH * HIDDEN * 4
    large = [s for s in found["all_reduce"] if s >= activations]
    assert large == [activations] * 4, "two forward, two backward"
    assert set(found) == {"all_reduce"}
    specs = parallel.specs()
    assert specs["block_0_fc1/bias"] == "R,S(0)"
    assert specs["block_0_fc2/kernel"] == "R,S(0)"
    assert specs["block_0_attention/attention_output/kernel"] == "R,S(0)"
    assert specs["block_0_fc2/bias"] == "R,R"
    slots = [s for n, s in specs.items() if "fc1_kernel" in n]
    assert len(slots) == 1 and set(slots) == {"R,S(1)"}, "slots follow their weight"


@pytest.mark.slow
def test_megatron_on_two_dims():
    assert_equivalent(
        lambda: gpt(optimizer=keras.optimizers.AdamW(1e-3, global_clipnorm=0.5)),
        tokens(),
        tap.split([2, 2]),
        MEGATRON,
        batch_size=BATCH,
    )


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [nightly(50), 51])
def test_vocabulary_parallel_never_gathers_logits(vocabulary):
    constraints = [
        tap.shard("tokens/embeddings", dim=0, axis="model"),
        tap.shard("head/kernel", dim=1, axis="model"),
    ]
    parallel, _ = assert_equivalent(
        lambda: gpt(vocabulary=vocabulary),
        tokens(vocabulary=vocabulary),
        tap.split([1, 2]),
        constraints,
        batch_size=BATCH,
    )
    logits = BATCH * LENGTH * vocabulary * 4
    assert all(size < logits // 2 for _, _, size in parallel.collectives())


@pytest.mark.slow
def test_zero_1_scatters_gradients_and_gathers_updates():
    constraints = [
        tap.batch("data"),
        tap.shard(r"adam.*fc1_kernel_(momentum|velocity)", dim=0, axis="data"),
    ]
    parallel, _ = assert_equivalent(
        lambda: gpt(optimizer=keras.optimizers.Adam()),
        tokens(),
        tap.split([2]),
        constraints,
        batch_size=BATCH,
    )
    found = by_kind(parallel.collectives())
    kernel = HIDDEN * 4 * HIDDEN * 4
    assert found["reduce_scatter"] == [kernel]
    assert found["all_gather"] == [kernel]


@pytest.mark.slow
def test_sequence_parallel_from_border_tensors():
    constraints = [
        *MEGATRON,
        tap.shard_output("block_0_ln1", dim=1, axis="model"),
        tap.shard_output("block_0_ln2", dim=1, axis="model"),
    ]
    assert_equivalent(gpt, tokens(), tap.split([1, 2]), constraints, batch_size=BATCH)


class MoE(layers.Layer):
    """A GShard-style mixture of experts: dense dispatch and combine einsums."""

    def __init__(self, experts, hidden, capacity, **kwargs):
        super().__init__(**kwargs)
        self.experts, self.hidden, self.capacity = experts, hidden, capacity

    def build(self, shape):
        width = shape[-1]
        self.gate = self.add_weight(shape=(width, self.experts), name="gate")
        self.w_in = self.add_weight(shape=(self.experts, width, self.hidden), name="w_in")
        self.w_out = self.add_weight(shape=(self.experts, self.hidden, width), name="w_out")

    def call(self, x):
        gates = ops.softmax(ops.einsum("gsm,me->gse", x, self.gate))
        chosen = ops.one_hot(ops.argmax(gates, axis=-1), self.experts, dtype="float32")
        position = ops.cumsum(chosen, axis=1) * chosen
        kept = chosen * ops.cast(position <= self.capacity, "float32")
        slot = ops.one_hot(
            ops.cast(ops.sum(position, -1) - 1, "int32"), self.capacity, dtype="float32"
        )
        dispatch = ops.einsum("gse,gsc->gsec", kept, slot)
        combine = dispatch * ops.sum(gates * kept, -1)[..., None, None]
        h = ops.einsum("gsec,gsm->egcm", dispatch, x)
        h = ops.relu(ops.einsum("egcm,emh->egch", h, self.w_in))
        h = ops.einsum("egch,ehm->egcm", h, self.w_out)
        return ops.einsum("gsec,egcm->gsm", combine, h)


def moe():
    inputs = keras.Input((6, 8))
    x = layers.Dense(8, name="stem")(inputs)
    x = x + MoE(4, 16, 3, name="moe")(x)
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile("sgd", "mse", jit_compile=False)
    return model


WITHIN_EXPERTS = [
    tap.shard("stem/kernel", dim=1, axis="model"),
    tap.shard("moe/w_in", dim=2, axis="model"),
    tap.shard("moe/w_out", dim=1, axis="model"),
]
"""Products are split over an axis of their own, those of each expert too."""

ALONG_TWO_AXES = [
    tap.shard("stem/kernel", dim=0, axis="d1"),
    tap.shard("stem/kernel", dim=1, axis="d2"),
    *(tap.shard("moe/w_.*", dim=dim, axis=axis) for dim, axis in ((1, "d1"), (2, "d2"))),
]
"""Column- and row-first, within each expert too."""

FOUR_AXES = {"copies": 2, "data": 2, "d1": 2, "d2": 2}


@pytest.mark.parametrize(
    ("mesh", "others"),
    [
        ([2], []),
        pytest.param([2, 2], WITHIN_EXPERTS, marks=pytest.mark.slow),
        pytest.param(FOUR_AXES, ALONG_TWO_AXES, marks=pytest.mark.slow),
    ],
)
def test_experts_exchange_tokens_by_all_to_all(mesh, others):
    batch = tap.batch(*(["copies", "data"] if mesh is FOUR_AXES else ["data"]))
    constraints = [batch, tap.shard("moe/w_.*", dim=0, axis="data"), *others]
    data = (
        rng.normal(size=(24, 6, 8)).astype("float32"),
        rng.normal(size=(24, 6, 3)).astype("float32"),
    )
    parallel, _ = assert_equivalent(moe, data, tap.split(mesh), constraints, batch_size=8)
    assert len(by_kind(parallel.collectives())["all_to_all"]) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [[3], nightly([4]), nightly([2, 2])])
def test_batches_that_do_not_divide(mesh):
    assert_equivalent(gpt, tokens(5), tap.split(mesh), batch_size=5)
