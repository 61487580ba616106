"""The plots of the documentation show the results that lie beside the benchmarks."""

from __future__ import annotations

from unittest import mock
from xml.etree import ElementTree

import pytest

from benchmarks.results import Result
from scripts import benchmark_plots
from scripts.benchmark_columns.cells import source

COMMAND = "python -m scripts.benchmark_plots"


@pytest.mark.parametrize("name", sorted(benchmark_plots.PLOTS))
def test_images_show_the_results_that_there_are(name):
    result_name, _ = benchmark_plots.PLOTS[name]
    image = ElementTree.parse(benchmark_plots.IMAGES / f"{name}.svg")
    said = image.findtext(".//{http://purl.org/dc/elements/1.1/}source")
    assert said == source(Result.load(result_name)), f"Results have changed. Run {COMMAND}"


def drawn(panel, rows):
    """What a panel draws: (x, y) of each point, by the name of its line."""
    axes = mock.Mock()
    panel(axes, rows)
    return {
        call.kwargs["label"]: list(zip(*call.args[:2], strict=True))
        for call in axes.plot.call_args_list
        if "label" in call.kwargs
    }


def searched(case, parameters, seconds):
    return {
        "case": case,
        "parameters": parameters,
        "search_s": seconds,
        "total_s": 2 * seconds,
    }


def test_searches_are_drawn_over_parameters_with_what_the_paper_says():
    rows = [searched("t5-12", 20, 3.0), searched("t5-6", 10, 2.0), searched("gpt-12", 5, 1.0)]
    found = drawn(benchmark_plots.search_over_depth, rows)
    assert found.pop("TAP, as published") == [(770e6, 360)]
    assert found.pop("Alpa, as published") == [(770e6, 11_820)]
    assert found == {
        "tfpar, its search": [(10, 2.0), (20, 3.0)],
        "tfpar, from model to plan": [(10, 4.0), (20, 6.0)],
    }


def test_steps_are_drawn_by_plan_and_number_of_gpus_and_hollow_where_they_do_not_fit():
    rows = [
        {"case": "resnet50-1k", "plan": plan, "devices": devices, "parameters": 7, "step_s": s}
        for plan, devices, s in (("tap", 8, 1.0), ("tap", 16, 0.5), ("data", 16, 0.75))
    ]
    for row in rows:
        row["fits"] = row["plan"] == "tap"
    axes = mock.Mock()
    benchmark_plots.step_over_classes(axes, rows)
    filled = [call.kwargs.get("fillstyle") for call in axes.plot.call_args_list]
    assert [f for f in filled if f] == ["full", "full", "none"]
    assert drawn(benchmark_plots.step_over_classes, rows) == {
        "TAP's planner, 8 GPUs": [(7, 1.0)],
        "TAP's planner, 16 GPUs": [(7, 0.5)],
        "data parallelism, 16 GPUs": [(7, 0.75)],
    }


def test_predictions_are_drawn_beside_what_was_measured():
    plan = {"model": "gpt", "predicted_s": 0.05, "measured_s": 0.04}
    rows = [
        {"setting": f"{where}, {count} ranks", "plans": [plan]}
        for where in ("in-process", "loopback")
        for count in (2, 4)
    ]
    found = drawn(benchmark_plots.predicted_on_loopback, rows)
    assert found["gpt, 2 ranks"] == found["gpt, 4 ranks"] == [(50, 40)]
    assert found["as predicted"] == [(36, 36), pytest.approx((55, 55))]
