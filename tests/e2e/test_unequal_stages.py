"""Stages on unlike numbers of ranks, in layouts of their own, with the numbers of one device."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.clusters import device, two_levels
from tests.e2e.pipeline_models import CASES, SAMPLES
from tests.e2e.test_mixed_precision import policy
from tests.e2e.test_pipelined_models import data_of, on_one_device
from tests.equivalence import (
    Trained,
    assert_equivalent,
    assert_same,
    train,
    without_graph_optimizers,
)
from tfpar.cluster import Link
from tfpar.compile.local import LocalProgram

SLOW = device(1e9, 1e9, 1e9, 1e11, 1e-6)

PLACED = {
    "1+2": [[0], [1, 2]],
    "1+3": [[0], [1, 2, 3]],
    "2+1+1": [[1, 3], [0], [2]],
    "3+5": [[0, 1, 2], [3, 4, 5, 6, 7]],
}
"""Ranks of stages, by their numbers."""

SCHEDULES = "1f1b", "gpipe", "zb-h1"

BY_DEFAULT = {
    "mlp": ("3+5", "1f1b"),
    "gpt": ("1+2", "zb-h1"),
    "t5": ("2+1+1", "gpipe"),
    "u-net": ("1+3", "1f1b"),
    "resnet": ("1+2", "1f1b"),
    "moe": ("2+1+1", "zb-h1"),
    "two towers": ("1+3", "gpipe"),
}


def covering() -> list[object]:
    """Each model on each set of ranks in each schedule, with batches that are even, ragged, or no
    multiple of the microbatches at all; at night a second batch of another size comes after."""
    found: list[object] = []
    for i, name in enumerate(CASES):
        for j, placed in enumerate(PLACED):
            for k, schedule in enumerate(SCHEDULES):
                case = name, placed, schedule, (i + j + k) % 3 + 2
                by_default = BY_DEFAULT.get(name) == (placed, schedule)
                found.append((*case, 6) if by_default else nightly(*case, SAMPLES))
    return found


def same_as_one_device(name, samples, ranks, microbatches, schedule, planner=None) -> Trained:
    """Train a case on these ranks of stages, and compare it with the same on one device."""
    case, plain = CASES[name], on_one_device(name, samples)
    pipeline = tap.Pipeline(ranks=ranks, microbatches=microbatches, schedule=schedule)
    with policy(case.policy), without_graph_optimizers():
        parallel = train(
            case.build,
            data_of(name, samples),
            batch_size=6,
            mesh=tap.split([sum(map(len, ranks))]),
            planner=planner,
            start=plain.start,
            options={"pipeline": pipeline, "verbose": 0},
        )
    assert_same(parallel, plain, case.rtol, 1e-4 if case.policy == "float32" else 1e-2)
    return parallel


@pytest.mark.slow
@pytest.mark.parametrize(("name", "placed", "schedule", "microbatches", "samples"), covering())
def test_models_train_as_on_one_device(name, placed, schedule, microbatches, samples):
    ranks = PLACED[placed]
    parallel = same_as_one_device(name, samples, ranks, microbatches, schedule)
    assert [list(s.ranks) for s in tap.plan_of(parallel.model).stages.cost.stages] == ranks


def wide(jit_compile: bool = False) -> keras.Model:
    inputs = keras.Input((8,))
    h = inputs
    for i in range(5):
        h = layers.Dense(12, "tanh", name=f"fc{i}")(h)
    model = keras.Model(inputs, layers.Dense(3, name="last")(h))
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
    return model


def numbers(samples: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(samples)
    return rng.normal(size=(samples, 8)), rng.normal(size=(samples, 3))


@pytest.mark.slow
def test_stages_under_xla_with_activations_split_by_hand():
    """A layout splits the batch over the ranks that split weights, too."""
    assert_equivalent(
        lambda: wide(jit_compile=True),
        numbers(12),
        tap.split({"data": 3, "model": 2}),
        [
            tap.batch("data"),
            tap.shard("fc1/kernel", 1, "model"),
            tap.shard_output("fc3", 0, "model"),
        ],
        batch_size=12,
        options={"pipeline": tap.Pipeline(ranks=[[0, 1], [2, 3, 4, 5]], microbatches=3)},
    )


@pytest.mark.slow
def test_what_stages_cut_into_other_microbatches_goes_whole(monkeypatch):
    """As if no layout could say which samples the microbatches have: each rank cuts its own."""
    cut = "tfpar.tf.steps.compiled.cut_by_microbatch"
    monkeypatch.setattr(cut, lambda anchors, *_: anchors)
    options = {"pipeline": tap.Pipeline(ranks=[[0], [1, 2]], microbatches=2)}
    assert_equivalent(wide, numbers(8), tap.split([3]), options=options)


def a_machine_each(ranks: list[list[int]], between: float, within: float) -> tap.Cluster:
    """Of each stage, with links of so many bytes/s between and within machines."""
    ranked = tap.Device({"float32": 1e9}, 1e9, 1e9)
    nodes = tuple(tap.Node(ranked, (tap.Level(len(own), within, 1e-7),)) for own in ranks)
    return tap.Cluster("a machine each", nodes, (tap.Level(len(ranks), between, 1e-6),))


def bytes_sent(program: LocalProgram) -> int:
    """By all ranks of the program of an actor; no scalars."""
    sends = [op for op in program.graph.ops if op.type == "Send" and op.inputs[0].shape]
    return sum(
        op.inputs[0].num_bytes * sum(target is not None for target in op.attrs["targets"])
        for op in sends
    )


MEGATRON_PAIRS = [tap.shard("fc(0|2|4)/kernel", 1, "model")]
"""Layers of `wide` split by columns, then by rows: what goes from one such pair to the next is the
same on all ranks of a stage."""

ONE = 12 * 12 * 4
"""Bytes of what a batch of 12 has between two layers of `wide`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "between", "recompute", "sent", "gathering"),
    [
        ([[0], [1, 2]], 1e5, True, [ONE, ONE], {"F1", "B1"}),  # again as the stage runs again
        ([[0], [1, 2]], 1e12, False, [2 * ONE, ONE], set()),  # whole, to both
        ([[0, 1], [2, 3], [4]], 1e5, False, [ONE, 2 * ONE, ONE], {"F1", "B1", "B0"}),
    ],
    ids=["recomputed", "quick links", "two stages of one layout"],
)
def test_what_all_ranks_of_a_stage_read_comes_in_slices_over_slow_links(
    ranks, between, recompute, sent, gathering
):
    """They gather it in the tasks that read it; the price is that of the bytes which are sent."""
    cut = ["fc0|fc1", "fc2|fc3", "fc4|last"]
    stages = [*cut[: len(ranks) - 1], "|".join(cut[len(ranks) - 1 :])]
    parallel, _ = assert_equivalent(
        wide,
        numbers(24),
        tap.split({"model": sum(map(len, ranks))}),
        [*MEGATRON_PAIRS, *(tap.stage(names, i) for i, names in enumerate(stages))],
        batch_size=12,
        cluster=a_machine_each(ranks, between, 1e12 if between < 1e12 else 1e5),
        options={
            "pipeline": tap.Pipeline(ranks=ranks, microbatches=3, recompute=recompute),
            "verbose": 0,
        },
    )
    programs = parallel.executable().compiled.programs.programs.values()
    assert [bytes_sent(program) for program in programs] == sent
    priced = tap.plan_of(parallel.model).stages.cost.stages
    assert [2 * stage.sent_bytes for stage in priced] == sent, "each over two pairs of ranks"
    gathers = {
        name
        for program in programs
        for name, body in program.graph.functions.items()
        if any(op.type == "AllGather" for op in body.ops)
    }
    assert gathers == {f"round1_{task}" for task in gathering}


def two_fast_and_four_slow() -> tap.Cluster:
    """Devices on one machine and on another, with a slow link between."""
    fast = tap.Device({"float32": 4e9}, 1e9, 4e9)
    slow = tap.Device({"float32": 1e9}, 1e9, 1e9)
    nodes = (
        tap.Node(fast, (tap.Level(2, 1e11, 1e-7),)),
        tap.Node(slow, (tap.Level(4, 1e11, 1e-7),)),
    )
    return tap.Cluster("mixed", nodes, (tap.Level(2, 1e7, 1e-5),))


def deep() -> keras.Model:
    inputs = h = keras.Input((8,))
    for i in range(6):
        h = layers.Dense(256, "tanh", name=f"fc{i}")(h)
    model = keras.Model(inputs, layers.Dense(3, name="last")(h))
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


@pytest.mark.slow
def test_machines_that_differ_get_stages_that_differ():
    parallel, _ = assert_equivalent(
        deep,
        numbers(32),
        tap.split([6]),
        planner="tap",
        cluster=two_fast_and_four_slow(),
        batch_size=32,
        options={"pipeline": "auto"},
    )
    plan = tap.plan_of(parallel.model)
    assert sorted(plan.stages.groups(plan.mesh.size)) == [(0, 1), (2, 3, 4, 5)]
    rivals = [one.seconds for one in plan.findings.rivals]
    assert plan.cost.seconds < min(rivals)


@pytest.mark.parametrize("ranks", [[[2], [0, 1]], [[2, 3], [0, 1]]])
def test_plans_made_without_training_have_the_ranks_that_are_given(ranks):
    pipeline = tap.Pipeline(ranks=ranks, microbatches=2)
    size = sum(map(len, ranks))
    plan = tap.plan(wide, numbers(8), [size], pipeline=pipeline, planner="tap")
    assert [list(group) for group in plan.stages.groups(plan.mesh.size)] == ranks


@pytest.mark.slow
def test_annealing_compares_stages_that_differ_where_machines_do():
    asked, machines = tap.Pipeline("auto", search="anneal"), two_fast_and_four_slow()
    plan = tap.plan(deep, numbers(32), [6], machines, pipeline=asked, planner="tap")
    compared = [(plan.cost.seconds, plan)]
    compared += [(one.seconds, one.plan) for one in plan.findings.rivals if one.plan is not None]
    groups = [sorted(one.stages.groups(one.mesh.size)) for _, one in compared if one.stages]
    assert [(0, 1), (2, 3, 4, 5)] in groups and [(0, 1), (2, 3), (4, 5)] in groups
    assert plan.cost.seconds == min(seconds for seconds, _ in compared)


def wide_before_long() -> keras.Model:
    """A layer with most weights, and then four with most of the work."""
    inputs = keras.Input((256,))
    h = layers.Dense(2048, "tanh", name="wide")(inputs)
    h = layers.Reshape((16, 128))(h)
    for i in range(4):
        h = layers.Dense(128, "tanh", name=f"fc{i}")(h)
    model = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


@pytest.mark.slow
def test_alpas_stages_have_as_many_ranks_as_their_layers_need():
    rng = np.random.default_rng(0)
    parallel, _ = assert_equivalent(
        wide_before_long,
        (rng.normal(size=(24, 256)), rng.normal(size=(24, 3))),
        tap.split([3]),
        planner="tap",
        cluster=two_levels("slow links", 3, 1, SLOW, Link(1e10, 1e-6), Link(3e7, 1e-6)),
        batch_size=24,
        options={"pipeline": tap.Pipeline("auto", search="alpa")},
    )
    plan = tap.plan_of(parallel.model)
    assert plan.stages.groups(plan.mesh.size) == ((0, 1), (2,))
    assert [one.name.split(",")[0] for one in plan.findings.rivals] == ["no stages"]


def partitions(rng: np.random.Generator) -> list[list[int]]:
    """Two to four sets of ranks of unlike sizes, of three to eight in any order."""
    while True:
        count = int(rng.integers(2, 5))
        sizes = rng.integers(1, 4, count)
        if 3 <= sizes.sum() <= 8 and len({*sizes}) > 1:
            ranks = iter(rng.permutation(sizes.sum()).tolist())
            return [sorted(itertools.islice(ranks, int(n))) for n in sizes]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_random_models_on_random_sets_of_ranks(seed):
    rng = np.random.default_rng(seed)
    name = str(rng.choice([*CASES]))
    ranks, schedule = partitions(rng), str(rng.choice(SCHEDULES))
    microbatches, samples = int(rng.integers(2, 6)), int(rng.integers(4, SAMPLES + 1))
    planner = str(rng.choice(["tap", "rhino"])) if rng.random() < 0.3 else None
    same_as_one_device(name, samples, ranks, microbatches, schedule, planner)
