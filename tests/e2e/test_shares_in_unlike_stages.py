"""Unequal shares of the batch within stages on unlike numbers of ranks.

Ranks of such stages share each microbatch; the numbers are those of one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.cases import nightly
from tests.e2e.test_mixed_precision import policy
from tests.e2e.test_shares_in_pieces import BATCH, EQUAL, MODELS, SAMPLES, on_one_device
from tests.equivalence import Trained, assert_same, train, without_graph_optimizers


def with_shares(
    name: str, pipeline: tap.Pipeline, shares: Mapping[int, Sequence[int]], **planned: Any
) -> tap.Plan:
    """A plan for full batches of one of `MODELS`.

    Args:
        shares: by the number of ranks of a stage.
    """
    case = MODELS[name]
    keras.utils.clear_session(free_memory=False)
    batch = keras.tree.map_structure(lambda a: a[:BATCH], tuple(case.data))
    size = sum(map(len, pipeline.ranks))
    planned = {"mesh": [size], "cluster": EQUAL, "planner": "tap", **planned}
    plan = tap.plan(case.build, batch, pipeline=pipeline, **planned)

    def changed(layout):
        found = {"data": tuple(shares[layout.mesh.size])} if layout.mesh.size in shares else {}
        return dataclasses.replace(layout, shares=found)

    stages = dataclasses.replace(plan.stages, layouts=tuple(map(changed, plan.stages.layouts)))
    return dataclasses.replace(plan, shares=changed(plan.layout).shares, stages=stages)


def test_try():
    name = "mlp"
    pipeline = tap.Pipeline(ranks=[[0], [1, 2]], microbatches=2)
    plan = with_shares(
        name, pipeline, {2: (12, 4)}, constraints=[tap.batch("data"), tap.replicate(".*")]
    )
    case, plain = MODELS[name], on_one_device(name)
    print(plan.stages.layout_of, plan.by_layout)
    with policy(case.policy), without_graph_optimizers():
        keras.utils.clear_session(free_memory=False)
        parallel = train(
            case.build,
            case.data,
            mesh=plan.whole_mesh,
            batch_size=BATCH,
            start=plain.start,
            options={"plan": plan, "pipeline": plan.pipeline, "verbose": 0, "strict": True},
        )
    for p in parallel.executable().compiled.programs.programs.values():
        print(p.mesh)
    assert_same(parallel, plain, case.rtol, 1e-4)
