"""Steps of TAP's Figs. 6 and 7, of a classifier small enough for a test."""

from __future__ import annotations

import functools

import pytest

from benchmarks import models, training_time
from benchmarks.captured import captured_step

CLASSES = 5_000_000


@pytest.fixture(scope="module")
def rows():
    step = captured_step(functools.partial(models.wide, classes=CLASSES), 1024)
    return list(training_time.plans_of(step, "resnet50"))


@pytest.mark.slow
def test_where_the_classifier_is_most_of_the_model_it_is_split(rows):
    assert [(r["devices"], r["plan"]) for r in rows] == [
        (devices, plan) for devices in (8, 16) for plan in ("tap", "data")
    ]
    for searched, data in (rows[:2], rows[2:]):
        assert searched["step_s"] < 0.5 * data["step_s"]
        assert searched["memory_bytes"] < 0.5 * data["memory_bytes"]


@pytest.mark.slow
def test_a_plan_fits_if_the_device_has_as_much_memory(rows):
    limit = 32e9
    assert {r["fits"] for r in rows} == {True, False}
    assert all(r["fits"] == (r["memory_bytes"] <= limit) for r in rows)
    assert {r["parameters"] for r in rows} == {rows[0]["parameters"]}
    assert rows[0]["parameters"] > 512 * CLASSES
