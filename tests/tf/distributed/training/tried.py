"""Trials on processes: all ranks run the same ones, and take the same plan."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import tfpar as tap
from tests.tf.distributed.training.pipelines import deep
from tests.tf.distributed.training.place import Case, Place, Results, regression, trained
from tfpar.tf.distributed.world import this_world
from tfpar.tf.steps import trials as module

X, Y = regression(21)  # the last batch is smaller, and divides by nothing


def machines(size: int) -> tap.Cluster:
    """As if links were so slow, and ranks as well, that stages are the fastest."""
    slow = tap.Device({"float32": 1e6, "float64": 1e6}, 1e9, 1e11)
    return tap.Cluster.regular("slow", slow, [tap.Level(size, 1e5, 1e-6)])


def planned(place: Place, **options: object) -> keras.Model:
    asked = {"pipeline": "auto", "cluster": machines(place.size), "verbose": 0, **options}
    with place.parallel(mesh=[place.size], planner="tap", **asked):
        return deep(keras.optimizers.Adam(0.01), metrics=["mae"])


def plans_are_tried(place: Place) -> Results:
    """Dropout, slots and metrics are as if nothing had been tried."""
    model = planned(place, trials=3)
    results = trained(model, X, Y, batch_size=8, shuffle=False)
    if place.size > 1:
        found = tap.plan_of(model).findings
        assert len(found.trials) == 3
        assert found.trials[0].measured_s == min(trial.measured_s for trial in found.trials)
        assert any("stages (" in trial.name for trial in found.trials)
        told = [[trial.name, trial.measured_s, trial.corrected_s] for trial in found.trials]
        _agree(place, [told, dataclasses.asdict(found.correction)])
    return results


def a_trial_fails_on_one_rank(place: Place) -> Results:
    """After all have taken its steps, one rank has no memory left: all leave the plan out."""
    original, taken = module._Trials._own, []

    def own(self, plan, captured):
        seconds = original(self, plan, captured)
        taken.append(seconds)
        if place.rank == 1 and len(taken) == 1:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")
        return seconds

    module._Trials._own = own
    try:
        model = planned(place, trials=2)
        results = trained(model, X, Y, batch_size=8, shuffle=False)
    finally:
        module._Trials._own = original
    if place.size > 1:
        ran, failed = tap.plan_of(model).findings.trials
        assert ran.measured_s is not None and failed.measured_s is None
        assert "OOM" in failed.reason
        _agree(place, [ran.name, failed.name])
    return results


def the_slowest_rank_decides(place: Place) -> Results:
    """Rank 1 takes ten seconds for what rank 0 finds fast, and the other way round."""
    original, taken = module._Trials._own, []

    def own(self, plan, captured):
        original(self, plan, captured)
        taken.append(plan)
        return [[1.0, 3.0], [10.0, 4.0]][place.rank][len(taken) - 1]

    module._Trials._own = own
    try:
        model = planned(place, trials=2)
        results = trained(model, X, Y, batch_size=8, shuffle=False)
    finally:
        module._Trials._own = original
    if place.size > 1:
        measured = [trial.measured_s for trial in tap.plan_of(model).findings.trials]
        np.testing.assert_allclose(measured, [4.0, 10.0])
    return results


def _agree(place: Place, value: object) -> None:
    """Check that all ranks say the same."""
    world = this_world()
    assert world is not None and world.size == place.size
    world.agree("trials", value, str)


CASES: list[Case] = [plans_are_tried, a_trial_fails_on_one_rank, the_slowest_rank_decides]
