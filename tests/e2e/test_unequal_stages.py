"""Stages on unlike numbers of ranks, in layouts of their own, with the numbers of one device."""

from __future__ import annotations

import pytest

import tfpar as tap
from tests.cases import nightly
from tests.e2e.pipeline_models import CASES, SAMPLES
from tests.e2e.test_mixed_precision import policy
from tests.e2e.test_pipelined_models import data_of, on_one_device
from tests.equivalence import assert_same, train, without_graph_optimizers

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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "placed", "schedule", "microbatches", "samples"), covering())
def test_models_train_as_on_one_device(name, placed, schedule, microbatches, samples):
    case, plain, ranks = CASES[name], on_one_device(name, samples), PLACED[placed]
    pipeline = tap.Pipeline(ranks=ranks, microbatches=microbatches, schedule=schedule)
    with policy(case.policy), without_graph_optimizers():
        parallel = train(
            case.build,
            data_of(name, samples),
            batch_size=6,
            mesh=tap.split([sum(map(len, ranks))]),
            start=plain.start,
            options={"pipeline": pipeline, "verbose": 0},
        )
    assert_same(parallel, plain, case.rtol, 1e-4 if case.policy == "float32" else 1e-2)
    assert [list(s.ranks) for s in tap.plan_of(parallel.model).stages.cost.stages] == ranks
