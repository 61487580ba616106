"""The fastest schedule for a step's stages: never slower than those by name that fit."""

from __future__ import annotations

import dataclasses

import pytest

from tests.cases import some_first
from tests.planning.inter_op.stages.steps import Staged
from tfpar.cost import compare_schedules
from tfpar.cost import schedule_search as fastest_module
from tfpar.pipeline import FAMILIES, generate, list_schedule
from tfpar.spec import ScheduleError


def fastest(prices, actors, microbatches):
    """And what is said of it is what simulations say."""
    found = compare_schedules(prices, actors, microbatches)
    for schedule, price in found:
        assert price.seconds == pytest.approx(prices.run(schedule).seconds + prices.step_s)
        assert price.memory_bytes == peak(prices, schedule)
    names = [price.name for _, price in found]
    assert len(names) == len({*names}) and "gpipe" in names
    return found[0].schedule


def peak(prices, schedule) -> float:
    return max(found.num_bytes for found in prices.run(schedule).peaks)


@pytest.mark.parametrize(
    ("name", "num_stages"), some_first([("gpt", 2), ("unet", 2)], [("t5_3_layers", 3)])
)
def test_it_is_never_slower_than_schedules_by_name(name, num_stages):
    prices = Staged.of(name, num_stages).priced(4)
    found = fastest(prices, range(num_stages), 4)
    seconds = prices.run(found).seconds
    for family in ("gpipe", "1f1b", "zb-h1"):
        assert seconds <= prices.run(generate(family, num_stages, 4)).seconds


def test_stages_that_differ_have_a_faster_order_than_any_by_name():
    prices = Staged.of("unet", 2).priced(8)
    seconds = prices.run(fastest(prices, (0, 1), 8)).seconds
    known = [prices.run(generate(f, 2, 8)).seconds for f in ("gpipe", "1f1b", "zb-h1")]
    assert seconds < min(known)


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_it_keeps_to_the_memory_that_there_is(name):
    prices = Staged.of(name, 2).priced(8)
    most = peak(prices, generate("gpipe", 2, 8))
    least = peak(prices, generate("1f1b", 2, 8))
    for limit in (least, (most + least) / 2, most):
        found = fastest(dataclasses.replace(prices, limits=(limit, limit)), (0, 1), 8)
        assert peak(prices, found) <= limit
        assert prices.run(found).seconds <= prices.run(generate("1f1b", 2, 8)).seconds
    nothing = fastest(dataclasses.replace(prices, limits=(1.0, 1.0)), (0, 1), 8)
    assert peak(prices, nothing) <= least


def test_virtual_stages():
    prices = Staged.of("gpt", 4).priced(4, actors=(0, 1, 0, 1))
    found = fastest(prices, (0, 1, 0, 1), 4)
    assert found.actors == (0, 1, 0, 1)
    assert prices.run(found).seconds <= prices.run(generate("interleaved", 2, 4)).seconds


@pytest.mark.slow
def test_where_microbatches_join_the_order_is_one_by_name():
    prices = Staged.of("resnet", 2).priced(4)
    found = fastest(prices, (0, 1), 4)
    assert found in [generate(name, 2, 4) for name in FAMILIES if name != "zb-v"]


def test_stages_that_no_schedule_by_name_has():
    prices = Staged.of("gpt", 3).priced(4, actors=(0, 1, 1))
    with pytest.raises(ScheduleError, match=r"by name for stages on actors \[0, 1, 1\]"):
        fastest(prices, (0, 1, 1), 4)


@pytest.mark.parametrize(
    ("name", "num_stages"), some_first([("unet", 2)], [("gpt", 2), ("t5_3_layers", 3)])
)
def test_lists_that_cannot_be_the_fastest_are_not_simulated(name, num_stages, monkeypatch):
    prices, actors = Staged.of(name, num_stages).priced(8), range(num_stages)
    found = compare_schedules(prices, actors, 8)
    simulated: list[int] = []
    run = type(prices).run
    monkeypatch.setattr(
        type(prices), "run", lambda *given: (simulated.append(len(simulated)), run(*given))[1]
    )
    again = compare_schedules(prices, actors, 8)
    few = len(simulated)

    def patient(*given, latest=None, **options):
        return list_schedule(*given, **options)

    monkeypatch.setattr(fastest_module, "list_schedule", patient)
    all_of_them = compare_schedules(prices, actors, 8)
    assert found[0] == again[0] == all_of_them[0]
    assert few < len(simulated) - few


def test_of_many_tasks_schedules_that_cannot_fit_are_left_out_where_others_may(monkeypatch):
    prices = Staged.of("unet", 2).priced(8)
    least = peak(prices, generate("1f1b", 2, 8))
    tight = dataclasses.replace(prices, limits=(least, least))
    few = compare_schedules(tight, (0, 1), 8)
    monkeypatch.setattr(fastest_module, "_MANY", 0)
    many = compare_schedules(tight, (0, 1), 8)
    fitting = {price.name for _, price in few if not price.excess_bytes}
    assert "gpipe" in {price.name for _, price in few}
    assert "gpipe" not in {price.name for _, price in many} >= fitting - {"list"}
    nothing = compare_schedules(dataclasses.replace(prices, limits=(1.0, 1.0)), (0, 1), 8)
    assert "gpipe" in {price.name for _, price in nothing}
