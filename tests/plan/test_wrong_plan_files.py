"""Plan files that are wrong in one place: the error names it."""

from __future__ import annotations

import json
import math

import pytest

from scripts.fuzzing.samples import planned
from tfpar.plans import Plan
from tfpar.spec import PlanError

TEXT = planned().to_json()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: p["cost"].update(seconds=math.nan), "cost.seconds is nan"),
        (lambda p: p["cost"].update(seconds="1 ms"), "cost.seconds is '1 ms'"),
        (
            lambda p: p["cost"].update(compute_s=[1.0, 2.0]),
            "cost.compute_s is .*must be a list of 3",
        ),
        (lambda p: p["cost"].update(hours=1.0), "cost.hours is not known; there are seconds, "),
        (lambda p: p.update(cost=7), "cost is 7"),
        (lambda p: p.update(cluster=0), "cluster"),
        (lambda p: p.update(layouts=[["data=4"]]), r"layouts\[0\] is .*must be a list of 2 to 3"),
        (
            lambda p: p.update(layouts=[["data=4", None]]),
            r"layouts\[0\].seconds is None; it must be a finite number, 0 or more",
        ),
        (lambda p: p.update(batch_axes="data"), "batch_axes is 'data'; it must be a list"),
        (lambda p: p.update(chunks=True), "chunks is True"),
        (lambda p: p.update(cut_short="no"), "cut_short is 'no'; it must be True or False"),
        (lambda p: p.update(mesh=[["data", 2**31]]), "at most"),
        (
            lambda p: p["variables"]["m/a/kernel"]["alternatives"].append(["R,R", "soon", ""]),
            r"variables\['m/a/kernel'\].alternatives\[3\].seconds is 'soon'",
        ),
        (
            lambda p: p["variables"]["m/a/kernel"]["alternatives"].append(["R", 1.0, ""]),
            "alternative R for variable 'm/a/kernel'.* does not fit data=2 x model=2",
        ),
        (
            lambda p: p["variables"]["m/a/bias"].update(trainable=1),
            r"variables\['m/a/bias'\].trainable is 1; it must be True or False",
        ),
        (lambda p: p["ops"]["m/a/MatMul"].update({"in": "R,R"}), "MatMul'].in is 'R,R'"),
        (
            lambda p: p["tensors"].update({"m/a/add:0": "S(0/0),R"}),
            r"tensors\['m/a/add:0'\] is 'S\(0/0\),R': .*stride is 0",
        ),
        (
            lambda p: p["rivals"][0]["cost"].update(bubbles_s=0.0),
            r"rivals\[0\].cost.bubbles_s is not known \(did you mean bubble_s.*\); there are",
        ),
        (lambda p: p.update(chunk=2), r"chunk is not known \(did you mean chunks\?\)"),
        (
            lambda p: p["variables"]["m/a/bias"].pop("why"),
            r"variables\['m/a/bias'\].why is missing",
        ),
        (lambda p: p.update(batch_statistics="all"), "is 'all'; it must be one of 'exact', 'micro"),
        (
            lambda p: p["variables"]["m/a/bias"].update(shape=[2**31, 2**31]),
            "'m/a/bias' of shape .* is larger than any that can be stored",
        ),
    ],
)
def test_what_is_wrong_in_a_plan_file_is_named(change, message):
    fields = json.loads(TEXT)
    change(fields)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(fields))
