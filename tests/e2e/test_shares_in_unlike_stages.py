"""Unequal shares of the batch within stages on unlike numbers of ranks.

Ranks of such stages share each microbatch; the numbers are those of one device.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.cases import nightly
from tests.e2e.ghost import GhostBatchNormalization
from tests.e2e.test_batch_statistics import dense, samples
from tests.e2e.test_mixed_precision import policy
from tests.e2e.test_shares_in_pieces import BATCH, DATA_PARALLEL, EQUAL, MODELS, on_one_device
from tests.equivalence import Trained, assert_same, op_by_op, train, without_graph_optimizers
from tfpar.plans import StageLayout
from tfpar.tf.keras import parallel_model

Shares = Mapping[int, Sequence[int]]
"""Of a full batch, by the number of ranks of a stage."""

WHOLE = None
"""The shares of a stage whose ranks have equal ones."""


def with_shares(plan: tap.Plan, shares: Shares) -> tap.Plan:
    """A plan with shares in its layouts."""

    def changed(layout: StageLayout) -> StageLayout:
        own = shares.get(layout.mesh.size)
        return dataclasses.replace(layout, shares={} if own is None else {"data": tuple(own)})

    stages = plan.stages
    assert stages is not None
    stages = dataclasses.replace(stages, layouts=tuple(map(changed, stages.layouts)))
    return dataclasses.replace(plan, shares=changed(plan.layout).shares, stages=stages)


def shares_of(trained: Trained, kind: str = "train") -> list[tuple[int, ...] | None]:
    """Of each stage, in the last program of a kind."""
    programs = parallel_model(trained.model).executables[kind].compiled.programs.programs
    return [getattr(program.mesh, "shares", WHOLE) for program in programs.values()]


def check(
    name: str,
    ranks: Sequence[Sequence[int]],
    shares: Shares,
    microbatches: int = 2,
    schedule: str = "1f1b",
    mesh: Mapping[str, int] | None = None,
    strict: bool = True,
) -> Trained:
    """Train one of `MODELS` by a plan that was saved, and on one device; all has to come to the
    same. Its batches are of 16 samples, and of 6.

    Args:
        mesh: whose axes all split the batch.
        strict: that shares cannot be had is an error.
    """
    case, plain = MODELS[name], on_one_device(name)
    mesh = mesh or {"data": sum(map(len, ranks))}
    laid = [tap.batch(*mesh), tap.replicate(".*")]
    keras.utils.clear_session(free_memory=False)
    with policy(case.policy), without_graph_optimizers():
        batch = keras.tree.map_structure(lambda a: a[:BATCH], tuple(case.data))
        pipeline = tap.Pipeline(ranks=ranks, microbatches=microbatches, schedule=schedule)
        planned = tap.plan(case.build, batch, mesh, EQUAL, laid, planner="tap", pipeline=pipeline)
        plan = with_shares(planned, shares)
        again = tap.Plan.from_json(plan.to_json())
        assert again == plan
        keras.utils.clear_session(free_memory=False)
        parallel = train(
            case.build,
            case.data,
            mesh=mesh,
            batch_size=BATCH,
            start=plain.start,
            options={"plan": again, "pipeline": pipeline, "verbose": 0, "strict": strict},
        )
    assert_same(parallel, plain, case.rtol, 1e-4 if case.policy == "float32" else 1e-2)
    return parallel


@pytest.mark.slow
def test_ranks_share_each_microbatch_unequally(tmp_path):
    """With dropout, batch statistics for which microbatches join, and sample weights; a batch of 6,
    of which microbatches have three samples each; evaluation and prediction, of a batch that is no
    multiple of the microbatches, too; and a checkpoint that goes on without stages."""
    parallel = check("normalized", [[0], [1, 2]], {2: (12, 4)})
    assert shares_of(parallel) == [WHOLE, (2, 1)]
    x, y, weights = MODELS["normalized"].data
    plain = on_one_device("normalized").model
    got, want = (
        m.evaluate(x[:8], y[:8], 8, sample_weight=weights[:8], verbose=0)
        for m in (parallel.model, plain)
    )
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert shares_of(parallel, "test") == [WHOLE, (3, 1)]
    for count, shares in ((8, (3, 1)), (7, WHOLE)):
        got, want = (m.predict(x[:count], count, verbose=0) for m in (parallel.model, plain))
        np.testing.assert_allclose(got, want, 1e-4, 1e-5)
        assert shares_of(parallel, "predict") == [WHOLE, shares]

    tap.save_checkpoint(parallel.model, tmp_path)
    keras.utils.clear_session(free_memory=False)
    with tap.auto_parallel([2], DATA_PARALLEL, verbose=0):
        other = MODELS["normalized"].build()
    tap.restore_checkpoint(other, tmp_path)
    for model in (parallel.model, other):
        model.fit(x[:8], y[:8], 8, sample_weight=weights[:8], verbose=0)
    for got, want in zip(other.get_weights(), parallel.model.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, 1e-4, 1e-5)


THREE = [[0], [1, 2]]
FIVE = [[2, 4], [0, 1, 3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "shares", "microbatches", "schedule"),
    [
        ("mlp", FIVE, {2: (4, 12), 3: (12, 2, 2)}, 2, "gpipe"),  # one sends more than another has
        ("gpt", THREE, {2: (12, 4)}, 2, "zb-h1"),
        nightly("gpt", [[0, 3], [1], [2]], {2: (4, 12)}, 4, "1f1b"),
        nightly("t5", THREE, {2: (12, 4)}, 4, "gpipe"),
        nightly("u-net", FIVE, {2: (6, 10), 3: (8, 6, 2)}, 2, "1f1b"),
        nightly("resnet", FIVE, {3: (4, 8, 4)}, 4, "1f1b"),
        nightly("lstm", THREE, {2: (4, 12)}, 2, "zb-h1"),
        nightly("moe", THREE, {2: (12, 4)}, 4, "1f1b"),
    ],
)
def test_models(name, ranks, shares, microbatches, schedule):
    check(name, ranks, shares, microbatches, schedule)


@pytest.mark.slow
def test_shares_whose_strides_would_differ_are_equal(caplog):
    """Another axis splits the batch behind them: one warning, and the numbers are the same."""
    mesh = {"data": 3, "model": 2}
    with caplog.at_level(logging.WARNING, "tfpar"):
        parallel = check("mlp", [[0, 1], [2, 3, 4, 5]], {4: (12, 4)}, mesh=mesh, strict=False)
    assert shares_of(parallel) == [WHOLE, WHOLE]
    said = [r.message for r in caplog.records if "in the unequal shares" in r.message]
    assert len(said) == 1


@pytest.mark.slow
def test_batch_statistics_of_microbatches_are_those_of_their_samples_whoever_has_them(capsys):
    """The line about the plan says who has how many."""
    size = 48
    data = samples(size)
    ghost = functools.partial(GhostBatchNormalization, 1, 2)
    plain = train(op_by_op(lambda: dense(ghost)), data, batch_size=size)

    def build() -> keras.Model:
        return dense(keras.layers.BatchNormalization)

    keras.utils.clear_session(free_memory=False)
    pipeline = tap.Pipeline(ranks=THREE, microbatches=2, batch_statistics="microbatch")
    plan = tap.plan(build, data, [3], EQUAL, DATA_PARALLEL, planner="tap", pipeline=pipeline)
    keras.utils.clear_session(free_memory=False)
    parallel = train(
        build,
        data,
        mesh=[3],
        batch_size=size,
        start=plain.start,
        options={"plan": with_shares(plan, {2: (30, 18)}), "pipeline": pipeline, "strict": True},
    )
    assert_same(parallel, plain)
    assert shares_of(parallel) == [WHOLE, (15, 9)]
    told = capsys.readouterr().out
    assert "batch not split on data=1; batch split over data in shares 30:18 on data=2" in told
