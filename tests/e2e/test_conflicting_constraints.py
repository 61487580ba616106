"""Constraints that leave no plan, as users meet them: which to leave out is said."""

from __future__ import annotations

import pytest

import tfpar as tap
from tests.graphs.models import MODELS
from tests.planning.test_conflicts import HEAD, OTHER
from tfpar.spec import MemoryLimitError, SpecError

build, DATA = MODELS["three_layers"]


@pytest.mark.slow
def test_planning_a_model_says_which_constraint_to_leave_out():
    arguments = dict(mesh=[1, 2], cluster="v100-ethernet", memory_limit="3 MB")
    with tap.auto_parallel(constraints=[OTHER, HEAD], **arguments):
        model = build()
    with pytest.raises(MemoryLimitError) as error:
        model.fit(*DATA, batch_size=16, verbose=0)
    text = str(error.value)
    assert f"under this constraint: {HEAD}. Leave out {HEAD}: the best plan then stores" in text
    assert str(OTHER) not in text


def test_constraints_that_contradict_each_other_are_both_named():
    one, other = tap.shard("head/.*", 0, "model"), tap.shard("head/k.*", 1, "model")
    for constraints in ([one, other], [tap.batch("data"), tap.batch("model")]):
        with pytest.raises(SpecError, match="contradict each other") as error:
            tap.plan(build, DATA, [1, 2], "v100-ethernet", constraints)
        assert all(str(constraint) in str(error.value) for constraint in constraints)
