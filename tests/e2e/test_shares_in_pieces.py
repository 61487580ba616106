"""Unequal shares of a batch that ranks compute in microbatches, stages or chunks.

The numbers are those of one device, on full batches, whose shares differ, and on a last one: a
batch that does not divide into as many pieces is shared out equally.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.cases import nightly
from tests.e2e.ghost import GhostBatchNormalization
from tests.e2e.pipeline_models import CASES, Case
from tests.e2e.test_batch_statistics import dense, samples
from tests.e2e.test_mixed_precision import policy
from tests.e2e.test_patterns import MEGATRON
from tests.e2e.test_unequal_shares import mlp, regression
from tests.equivalence import Trained, assert_same, op_by_op, traced, train
from tfpar.cluster import Cluster, Device, Level
from tfpar.tf.runtime import Executable
from tfpar.tf.steps import CompiledFunction

DATA_PARALLEL = (tap.batch("data"), tap.replicate(".*"))
STAGES = {"stage": 2, "data": 2}
"""A mesh whose first axis the stages use up."""
SAMPLES, BATCH = 22, 16
"""A batch of 16, and one of 6."""

EQUAL = Cluster.regular("equal", Device({"float32": 1e9}, 2**34, 1e9), [Level(8, 1e9, 1e-6)])


def widened(case: Case) -> Case:
    """The same model on more samples."""
    data = keras.tree.map_structure(lambda a: np.concatenate([a] * 4)[:SAMPLES], case.data)
    return dataclasses.replace(case, data=data)


MODELS = {name: widened(case) for name, case in CASES.items()} | {
    "normalized": Case(mlp, regression(SAMPLES))
}


@functools.lru_cache(maxsize=1)
def on_one_device(name: str) -> Trained:
    case = MODELS[name]
    plainly = traced if isinstance(case.data[1], list) else op_by_op  # reports of several losses
    with policy(case.policy):
        return train(plainly(case.build), case.data, batch_size=BATCH)


Shares = dict[int, tuple[int, ...] | None]
"""Of each size of batch that there is a program for; None: they are equal."""

_linked: list[Executable] = []


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what a test links."""
    _linked.clear()
    link = CompiledFunction.link

    def kept(self: CompiledFunction, *arguments: Any) -> tuple[tap.Plan, Executable]:
        plan, executable = link(self, *arguments)
        _linked.append(executable)
        return plan, executable

    monkeypatch.setattr(CompiledFunction, "link", kept)


def shares_by_batch(kind: str = "train") -> Shares:
    programs = [e.local for e in _linked if e.name == f"{kind} step"]
    return {p.input_shapes[0][0]: getattr(p.mesh, "shares", None) for p in programs}


def with_shares(
    build: Callable[[], keras.Model],
    data: Sequence[Any],
    mesh: Any,
    shares: Sequence[int],
    constraints: Sequence[Any] = DATA_PARALLEL,
    cluster: Cluster = EQUAL,
    **options: Any,
) -> tap.Plan:
    """A plan for full batches, with these shares along `data`."""
    keras.utils.clear_session(free_memory=False)
    batch = keras.tree.map_structure(lambda a: a[:BATCH], tuple(data))
    plan = tap.plan(build, batch, mesh, cluster, constraints=constraints, planner="tap", **options)
    return dataclasses.replace(plan, shares={"data": tuple(shares)})


def trained(
    build: Callable[[], keras.Model],
    data: Sequence[Any],
    plan: tap.Plan,
    start: Sequence[np.ndarray],
    **options: Any,
) -> Trained:
    """With a plan; what it asks for that a step does not allow is an error."""
    keras.utils.clear_session(free_memory=False)
    given = {"plan": plan, "pipeline": plan.pipeline, "verbose": 0, "strict": True, **options}
    mesh = plan.whole_mesh
    return train(build, data, mesh=mesh, batch_size=BATCH, start=start, options=given)


def check(
    name: str,
    mesh: Any,
    shares: Sequence[int],
    constraints: Sequence[Any] = DATA_PARALLEL,
    options: Mapping[str, Any] | None = None,
    **planned: Any,
) -> Trained:
    """Train one of `MODELS` with a plan and on one device; all has to come to the same.

    Args:
        options: that only matter to a run.
        planned: that matter to the plan.
    """
    case, plain = MODELS[name], on_one_device(name)
    with policy(case.policy):
        plan = with_shares(case.build, case.data, mesh, shares, constraints, **planned)
        parallel = trained(case.build, case.data, plan, plain.start, **(options or {}))
    assert_same(parallel, plain, case.rtol, 1e-4 if case.policy == "float32" else 1e-2)
    found = shares_by_batch()
    assert found.keys() == {BATCH, SAMPLES % BATCH} and len({*found[BATCH]}) > 1
    return parallel


@pytest.mark.slow
def test_each_share_is_cut_into_its_own_microbatches():
    """With dropout and batch statistics, for which microbatches join, and sample weights."""
    pipeline = tap.Pipeline(microbatches=4)
    parallel = check("normalized", [2], (12, 4), pipeline=pipeline)
    assert shares_by_batch() == {BATCH: (3, 1), 6: None}, "of each microbatch"
    x, y, weights = MODELS["normalized"].data
    plain = on_one_device("normalized").model
    got, want = (
        m.evaluate(x[:18], y[:18], 10, sample_weight=weights[:18], verbose=0)
        for m in (parallel.model, plain)
    )
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert shares_by_batch("test") == {10: (8, 2), 8: (6, 2)}, "in one piece"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, shares, run",
    [
        nightly([4], (6, 4, 4, 2), (3, 2, 2, 1)),
        nightly([2, 2], (4, 12), (2, 6)),
        nightly([2, 2], (5, 11), (1, 3)),
    ],
)
def test_microbatches_of_a_transformer(mesh, shares, run):
    """Dropout and clipping. On two axes every layer is split over two ranks, and attention splits
    the samples of a microbatch over them, of which there have to be pairs."""
    laid = MEGATRON if len(mesh) > 1 else DATA_PARALLEL
    check("gpt", mesh, shares, laid, pipeline=tap.Pipeline(microbatches=2))
    assert shares_by_batch()[BATCH] == run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normalized", nightly("gpt")])
def test_chunks_of_unequal_shares(name):
    check(name, [2], (3, 1), options={"chunks": 2})
    assert shares_by_batch() == {BATCH: (6, 2), 6: (2, 1)}, "of each chunk"


def in_stages(name: str, schedule: str = "1f1b", **more: Any) -> Trained:
    microbatches = 2 if schedule == "zb-v" else 4
    pipeline = tap.Pipeline(2, microbatches, schedule, **more)
    return check(name, STAGES, (12, 4), pipeline=pipeline)


@pytest.mark.slow
def test_stages_of_unequal_ranks():
    parallel = in_stages("mlp")
    assert tap.plan_of(parallel.model).mesh.shape == (1, 2)
    x = MODELS["mlp"].data[0][:14]
    plain = on_one_device("mlp").model
    got, want = (m.predict(x, 12, verbose=0) for m in (parallel.model, plain))
    np.testing.assert_allclose(got, want, 1e-4, 1e-5)
    assert shares_by_batch("predict") == {12: (2, 1), 2: None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, schedule",
    [
        nightly("gpt", "1f1b"),
        nightly("u-net", "zb-h1"),
        nightly("bert", "gpipe"),
        ("resnet", "interleaved"),
        nightly("lstm", "1f1b"),
        nightly("moe", "zb-v"),
    ],
)
def test_models_in_stages(name, schedule):
    in_stages(name, schedule)


@pytest.mark.nightly
def test_stages_that_recompute():
    in_stages("gpt", recompute=True)


SLOW_LINKS = Cluster.regular(
    "slow links", Device({"float32": 1e9}, 2**34, 1e9), [Level(2, 1e5, 0.0), Level(4, 1e12, 0.0)]
)


@pytest.mark.slow
def test_what_ranks_hold_alike_goes_from_stage_to_stage_in_slices():
    pipeline, mesh = tap.Pipeline(2, 4), {"data": 4, "model": 2}
    halves = [tap.shard(f"dense{n}/kernel", 1 - i % 2, "model") for i, n in enumerate(("", "_1"))]
    laid = (tap.batch("data"), *halves, tap.replicate("dense(_1/bias|_[23]/.*)"))
    parallel = check("mlp", mesh, (12, 4), laid, cluster=SLOW_LINKS, pipeline=pipeline)
    graphs = parallel.executable().local.graphs()
    gathers = [op for graph in graphs for op in graph.ops if op.type == "AllGather"]
    assert any("/slices" in op.name for op in gathers)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, nightly(2)])
def test_batch_statistics_of_microbatches_in_which_ranks_have_unequal_parts(stages):
    """It is the model on one device that normalises the same samples together."""
    data, counts = samples(BATCH), (12, 4)
    plain = train(
        op_by_op(lambda: dense(lambda **of: GhostBatchNormalization(counts, 4, **of))),
        data,
        batch_size=BATCH,
    )
    pipeline = tap.Pipeline(stages, 4, batch_statistics="microbatch")
    mesh = STAGES if stages > 1 else [2]

    def build() -> keras.Model:
        return dense(keras.layers.BatchNormalization)

    plan = with_shares(build, data, mesh, counts, pipeline=pipeline)
    parallel = trained(build, data, plan, plain.start)
    assert_same(parallel, plain)
    assert shares_by_batch() == {BATCH: (3, 1)}


@pytest.mark.slow
def test_what_cannot_be_shared_out_runs_in_equal_shares(caplog):
    """A weight that the axis splits: one warning, and the numbers are the same."""
    laid = (tap.batch("data"), tap.shard("dense_1/kernel", 1, "data"))
    case, plain = MODELS["mlp"], on_one_device("mlp")
    pipeline = tap.Pipeline(2, 4)
    plan = with_shares(case.build, case.data, STAGES, (12, 4), laid, pipeline=pipeline)
    with caplog.at_level(logging.WARNING, "tfpar"):
        parallel = trained(case.build, case.data, plan, plain.start, strict=False)
    assert_same(parallel, plain)
    assert {*shares_by_batch().values()} == {None}
    said = [
        r.message for r in caplog.records if "does not split in the unequal shares" in r.message
    ]
    assert len(said) == 1 and "dense_1/kernel" in said[0]
