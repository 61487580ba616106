"""Every kind of parallelism, laid by hand and searched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

import tfpar as tap
from tests.e2e.test_atp import GPT as ATP
from tests.e2e.test_atp import T5, pairs, small_t5
from tests.e2e.test_patterns import LENGTH, MEGATRON, VOCABULARY, gpt, moe
from tests.tf.distributed.training.place import (
    COLUMNS,
    Case,
    Place,
    Results,
    collectives,
    is_split,
    numbers,
    perceptron,
    precision,
    regression,
    trained,
)
from tfpar.cluster import Cluster, Device, Level, Node
from tfpar.spec import UnevenMesh
from tfpar.tf.keras.adapter import parallel_model

VOCABULARY_PARALLEL = [
    tap.shard("tokens/embeddings", dim=0, axis="model"),
    tap.shard("head/kernel", dim=1, axis="model"),
]
ZERO_1 = [
    tap.batch("data"),
    tap.shard(r"adam.*fc1_kernel_(momentum|velocity)", dim=0, axis="data"),
    tap.shard(r"adam.*fc2_kernel_(momentum|velocity)", dim=1, axis="data"),
]
EXPERTS = [tap.batch("data"), tap.shard("moe/w_.*", dim=0, axis="data")]


def tokens(n: int, vocabulary: int = VOCABULARY) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(n).integers(0, vocabulary, (n, LENGTH + 1)).astype("int32")
    return ids[:, :-1], ids[:, 1:]


def unequal(*speeds: float) -> Cluster:
    """Machines of one rank each, some of them faster than others."""
    devices = [Device({"float32": n * 1e9}, 2**34, n * 1e8) for n in speeds]
    return Cluster("unequal", tuple(map(Node, devices)), (Level(len(speeds), 1e9, 1e-7),))


def trains(
    place: Place,
    build: Callable[[], keras.Model],
    data: Sequence[np.ndarray],
    constraints: Sequence[Any] = (),
    mesh: Sequence[int] | Mapping[str, int] | None = None,
    *,
    planner: str | None = None,
    kinds: Collection[str] = (),
    split: str | None = None,
    batch_size: int = 8,
    **options: Any,
) -> Results:
    """Train as laid out; `options` are more arguments of `auto_parallel`.

    Args:
        kinds: collectives that there have to be.
        split: a weight that has to be split.
    """
    with place.parallel(constraints, mesh, planner, **options):
        model = build()
    results = trained(model, *data, batch_size=batch_size, shuffle=False)
    if place.size > 1:
        found = {kind for kind, _ in collectives(model)}
        assert found.issuperset(kinds), found
        if split is not None:
            assert is_split(next(w for w in model.weights if w.path == split)), split
    return results


def in_megatrons_layout(
    place: Place,
    build: Callable[[], keras.Model] = gpt,
    samples: int = 16,
    **options: Any,
) -> Results:
    """A GPT split as Megatron does; `options` as of `trains`."""
    split = "block_0_fc2/kernel"
    mesh, kinds = [1, place.size], {"all_reduce"}
    return trains(
        place, build, tokens(samples), MEGATRON, mesh, kinds=kinds, split=split, **options
    )


def context_parallel(
    place: Place, build: Callable[[], keras.Model] = gpt, **options: Any
) -> Results:
    """Keys and values pass from rank to rank."""
    mesh = {"context": place.size}
    laid = [tap.context_parallel("context")]
    return trains(place, build, tokens(16), laid, mesh, kinds={"permute"}, **options)


def context_parallel_in_microbatches(place: Place) -> Results:
    """They pass within the calls of a task."""
    return context_parallel(place, pipeline=tap.Pipeline(stages=1, microbatches=2))


@precision("float32")
def context_parallel_compiled_by_xla(place: Place) -> Results:
    return context_parallel(place, compiled)


def context_and_data_parallel(place: Place) -> Results:
    mesh = {"data": 2, "context": 2}
    laid = [tap.context_parallel("context")]
    return trains(place, gpt, tokens(16), laid, mesh, kinds={"permute", "all_reduce"})


# --- two ranks ------------------------------------------------------------------------------------


def mlp() -> keras.Model:
    inputs = keras.Input((6,))
    h = layers.Dense(10, "relu", name="fc1")(inputs)
    h = layers.BatchNormalization(name="norm")(h)
    h = layers.Dropout(0.3, seed=3)(h)
    model = keras.Model(inputs, layers.Dense(2, name="fc2")(h))
    model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return model


def data_parallel_in_microbatches(place: Place) -> Results:
    pipeline = tap.Pipeline(microbatches=3)
    return trains(place, mlp, regression(21), kinds={"all_reduce"}, pipeline=pipeline)


def compiled() -> keras.Model:
    model = gpt()
    model.jit_compile = True
    return model


@precision("float32")
def megatron_compiled_by_xla(place: Place) -> Results:
    return in_megatrons_layout(place, compiled)


@precision("float32")
def megatron_in_microbatches(place: Place) -> Results:
    return in_megatrons_layout(place, pipeline=tap.Pipeline(microbatches=4))


def data_parallel_in_unequal_shares(place: Place, **options: Any) -> Results:
    """Rank 0 is three times as fast as rank 1; the last batch has 5 samples."""
    laid = [tap.batch("data"), tap.replicate(".*")]
    with place.parallel(laid, planner="tap", cluster=unequal(3, 1), **options):
        model = mlp()
    x, y = regression(21)
    results = trained(model, x, y, batch_size=8, shuffle=False)
    if place.size > 1:
        ((more, fewer),) = tap.plan_of(model).shares.values()
        assert more + fewer == 8 and more > fewer, (more, fewer)
        state = parallel_model(model)
        assert state is not None
        last = state.executables["train"].local.mesh
        assert isinstance(last, UnevenMesh) != ("pipeline" in options)  # 5 is no multiple of 2
    results["evaluated"] = np.asarray(model.evaluate(x, y, 6, verbose=0))
    return {**results, "predicted": model.predict(x, 6, verbose=0)}


def unequal_shares_in_microbatches(place: Place) -> Results:
    return data_parallel_in_unequal_shares(place, pipeline=tap.Pipeline(microbatches=2))


def convnet() -> keras.Model:
    inputs = keras.Input((8, 8, 3))
    h = layers.Conv2D(4, 3, padding="same", activation="relu", name="conv1")(inputs)
    h = layers.BatchNormalization(name="norm")(h)
    h = layers.MaxPooling2D()(h)
    h = layers.Conv2D(6, 3, padding="same", activation="relu", name="conv2")(h)
    h = layers.GlobalAveragePooling2D()(h)
    model = keras.Model(inputs, layers.Dense(4, name="head")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], jit_compile=False
    )
    return model


def images(n: int) -> tuple[np.ndarray, np.ndarray]:
    return numbers(n, 8, 8, 3), np.arange(n) % 4


def data_parallel(place: Place) -> Results:
    return trains(place, mlp, regression(21), kinds={"all_reduce"})


@precision("float32")
def megatron(place: Place) -> Results:
    return in_megatrons_layout(place)


@precision("float32")
def megatron_recomputed(place: Place) -> Results:
    return in_megatrons_layout(place, lambda: gpt(num_layers=2), recompute=True)


@precision("float32")
def megatron_offloaded(place: Place) -> Results:
    return in_megatrons_layout(place, lambda: gpt(num_layers=2), offload=True)


@precision("float32")
def megatron_in_chunks(place: Place) -> Results:
    return in_megatrons_layout(place, samples=15, chunks=2)


def data_parallel_in_chunks(place: Place) -> Results:
    return trains(place, mlp, regression(21), kinds={"all_reduce"}, chunks=4)


def vocabulary_parallel(place: Place) -> Results:
    data = tokens(16, 51)
    return trains(
        place,
        lambda: gpt(vocabulary=51),
        data,
        VOCABULARY_PARALLEL,
        [1, place.size],
        split="tokens/embeddings",
    )


def zero_1(place: Place) -> Results:
    def build() -> keras.Model:
        return gpt(optimizer=keras.optimizers.Adam())

    kinds = {"reduce_scatter", "all_gather"}
    return trains(place, build, tokens(16), ZERO_1, kinds=kinds)


def fully_sharded(place: Place) -> Results:
    kinds = {"reduce_scatter", "all_gather"}
    split = "block_0_fc1/kernel"
    return trains(place, gpt, tokens(16), [tap.fsdp("data")], kinds=kinds, split=split)


def fully_sharded_in_microbatches(place: Place) -> Results:
    """Weights are gathered, and gradients scattered, within the calls of a task."""
    pipeline = tap.Pipeline(stages=1, microbatches=2)
    split = "block_0_fc1/kernel"
    return trains(place, gpt, tokens(16), [tap.fsdp("data")], split=split, pipeline=pipeline)


@precision("float32")
def fully_sharded_and_compiled_by_xla(place: Place) -> Results:
    return trains(place, compiled, tokens(16), [tap.fsdp("data")], kinds={"all_gather"})


@precision("float32")
def zero_1_offloaded(place: Place) -> Results:
    """Each rank has its part of the slots in host memory."""
    build = functools.partial(gpt, optimizer=keras.optimizers.Adam())
    offload = tap.Offload(optimizer=[".*fc[12]/kernel"])
    kinds = {"reduce_scatter", "all_gather"}
    return trains(place, build, tokens(16), ZERO_1, kinds=kinds, offload=offload)


@precision("float32")
def experts_by_all_to_all(place: Place) -> Results:
    data = numbers(24, 6, 8), numbers(24, 6, 3)
    return trains(place, moe, data, EXPERTS, kinds={"all_to_all"}, split="moe/w_in")


def compressed_as(name: str, rtol: float) -> Case:
    """Gradients that travel in half precision: close to what they are on one device."""

    def case(place: Place) -> Results:
        plain, model = perceptron(), perceptron()
        model.set_weights(plain.get_weights())
        if place.size > 1:
            model = tap.parallelize(model, [place.size], planner=None, compression=name)
        for each in (plain, model):
            each.fit(*regression(20), batch_size=8, shuffle=False, epochs=2, verbose=0)
        pairs = [*zip(model.get_weights(), plain.get_weights(), strict=True)]
        return {
            "close": np.array([np.allclose(a, b, rtol, rtol) for a, b in pairs]),
            "exact": np.array(place.size > 1 and all(np.allclose(a, b, 1e-9) for a, b in pairs)),
        }

    case.__name__ = f"compressed_as_{name}"
    return case


compressed_as_fp16, compressed_as_bf16 = compressed_as("fp16", 2e-3), compressed_as("bf16", 2e-2)


def searched_mlp(place: Place) -> Results:
    return trains(place, mlp, regression(20), planner="tap")


def searched_gpt(place: Place) -> Results:
    return trains(place, gpt, tokens(16), planner="tap")


def searched_convnet(place: Place) -> Results:
    return trains(place, convnet, images(20), planner="tap")


# --- optimizers -----------------------------------------------------------------------------------


def optimized_by(name: str, make: Callable[[], keras.optimizers.Optimizer]) -> Case:
    """A split perceptron under an optimizer."""

    def case(place: Place) -> Results:
        return trains(
            place,
            lambda: perceptron(make()),
            regression(20),
            COLUMNS,
            [1, place.size],
            split="fc2/kernel",
        )

    case.__name__ = name
    return case


OPTIMIZERS = [
    optimized_by(name, make)
    for name, make in {
        "sgd_with_momentum": lambda: keras.optimizers.SGD(0.05, 0.9, nesterov=True),
        "adamw_with_global_clipnorm": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
        "adafactor": lambda: keras.optimizers.Adafactor(0.05),
        "lion": lambda: keras.optimizers.Lion(0.01),
    }.items()
]


# --- four ranks -----------------------------------------------------------------------------------


@precision("float32")
def data_and_tensor_parallel(place: Place) -> Results:
    data = tokens(12)
    return trains(place, gpt, data, MEGATRON, [2, 2], split="block_0_fc1/kernel")


@precision("float32")
def data_and_tensor_parallel_in_chunks(place: Place) -> Results:
    data = tokens(13)
    return trains(place, gpt, data, MEGATRON, [2, 2], split="block_0_fc1/kernel", chunks=2)


@precision("float32")
def two_dimensional_tensor_parallel(place: Place) -> Results:
    """ATP: kernels split by both axes, the attention core over all ranks."""
    kinds = {"all_reduce", "reduce_scatter", "all_gather"}
    return trains(
        place, gpt, tokens(12), ATP, {"d1": 2, "d2": 2}, kinds=kinds, split="block_0_fc1/kernel"
    )


@precision("float32")
def two_dimensional_tensor_parallel_t5(place: Place) -> Results:
    """ATP: an encoder and a decoder, with cross attention."""
    kinds = {"all_reduce", "reduce_scatter", "all_gather"}
    return trains(
        place,
        small_t5,
        pairs(12),
        T5,
        {"d1": 2, "d2": 2},
        kinds=kinds,
        split="encoder_block_0/feed_forward/wi/kernel",
    )


ON_TWO: list[Case] = [
    data_parallel,
    data_parallel_in_unequal_shares,
    unequal_shares_in_microbatches,
    megatron,
    megatron_in_chunks,
    megatron_compiled_by_xla,
    megatron_recomputed,
    megatron_offloaded,
    vocabulary_parallel,
    zero_1,
    zero_1_offloaded,
    fully_sharded,
    fully_sharded_in_microbatches,
    fully_sharded_and_compiled_by_xla,
    context_parallel,
    context_parallel_in_microbatches,
    context_parallel_compiled_by_xla,
    experts_by_all_to_all,
    searched_gpt,
    searched_convnet,
    data_parallel_in_chunks,
    data_parallel_in_microbatches,
    megatron_in_microbatches,
    *OPTIMIZERS,
    compressed_as_fp16,
    compressed_as_bf16,
]
ON_FOUR: list[Case] = [
    data_and_tensor_parallel,
    data_and_tensor_parallel_in_chunks,
    two_dimensional_tensor_parallel,
    two_dimensional_tensor_parallel_t5,
    experts_by_all_to_all,
    context_parallel_in_microbatches,
    context_and_data_parallel,
    searched_mlp,
]
