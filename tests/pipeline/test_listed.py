"""Schedules made from what tasks take: against all orders, within memory, for any stages."""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from tests.cases import seeds
from tests.pipeline.greedy import ends, most_kept
from tfpar.pipeline.generators import generate
from tfpar.pipeline.generators.list_scheduling import RULES, StageDurations, list_schedule
from tfpar.pipeline.graph import check_schedule
from tfpar.pipeline.stage_graph import StageGraph, StageLink
from tfpar.pipeline.tasks import Task
from tfpar.spec import ScheduleError


def random_work(rng: random.Random, count: int) -> list[StageDurations]:
    found = []
    for _ in range(count):
        forward, inputs, weights = (rng.randint(1, 9) for _ in range(3))
        seconds = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
        found.append(StageDurations(seconds, kept=rng.choice([1, 1, 2, 3])))
    return found


def taken(orders, work) -> float:
    found = ends(orders, len(work), lambda task: work[task.stage].seconds[task.kind])
    return float("inf") if found is None else max(found.values())


@functools.cache
def all_orders(stage: int, microbatches: int, halves: bool) -> list[tuple[Task, ...]]:
    """Every order of one stage's tasks in which microbatches come one after the other."""
    kinds = "FIW" if halves else "FB"
    found = []

    def go_on(order: list[Task], done: tuple[int, ...]) -> None:
        if len(order) == microbatches * len(kinds):
            found.append(tuple(order))
        for i, kind in enumerate(kinds):
            if done[i] < (done[i - 1] if i else microbatches):
                after = (*done[:i], done[i] + 1, *done[i + 1 :])
                go_on([*order, Task(kind, stage, done[i])], after)

    go_on([], (0,) * len(kinds))
    return found


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("actors, microbatches", [(2, 2), (2, 3)])
def test_the_best_rule_is_seldom_far_from_the_best_of_all_orders(actors, microbatches, halves):
    rng = random.Random(microbatches)
    ratios = []
    for _ in range(6 if halves and microbatches > 2 else 40):
        work = random_work(rng, actors)
        orders = [all_orders(stage, microbatches, halves) for stage in range(actors)]
        least = min(taken(each, work) for each in itertools.product(*orders))
        best = min(
            taken(
                list_schedule(range(actors), microbatches, work, halves=halves, rule=rule).orders,
                work,
            )
            for rule in RULES
        )
        assert best >= least
        ratios.append(best / least)
    assert max(ratios) < 1.1
    assert sum(ratio == 1 for ratio in ratios) >= 0.8 * len(ratios)


@pytest.mark.parametrize("actors, microbatches", [(1, 3), (2, 4), (4, 8), (4, 3), (8, 16)])
def test_equal_stages_take_no_longer_than_1f1b(actors, microbatches):
    work = [StageDurations({"F": 1, "B": 2, "I": 1, "W": 1})] * actors
    most = [actors - stage for stage in range(actors)]
    found = list_schedule(range(actors), microbatches, work, most=most)
    known = generate("1f1b", actors, microbatches)
    assert taken(found.orders, work) == taken(known.orders, work)
    halved = list_schedule(range(actors), microbatches, work, halves=True, most=[actors] * actors)
    assert taken(halved.orders, work) <= taken(known.orders, work)
    assert [*map(most_kept, found.orders)] <= most
    assert max(map(most_kept, halved.orders)) <= actors


def kept_at_most(order, work) -> float:
    """The most that an actor keeps, W included."""
    kept = most = 0.0
    for task in order:
        kept += {"F": 1, "B": -1, "W": -1}.get(task.kind, 0) * work[task.stage].kept
        most = max(most, kept)
    return most


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_any_stages_within_any_memory(seed):
    """Skips, towers, several stages of an actor, links that take their time."""
    rng = random.Random(seed)
    actors = [rng.randrange(3) for _ in range(rng.randint(3, 6))]
    actors[:3] = rng.sample(range(3), 3)
    pairs = [*itertools.combinations(range(len(actors)), 2)]
    chosen = rng.sample(pairs, rng.randint(0, len(pairs)))
    stages = StageGraph(
        len(actors), tuple(StageLink(a, b, 1, rng.choice([1, None])) for a, b in sorted(chosen))
    )
    work = random_work(rng, len(actors))
    one = [sum(w.kept for w, home in zip(work, actors, strict=True) if home == a) for a in range(3)]
    most = [least * rng.choice([1, 1.5, 3]) for least in one]
    delays = {(a, b): rng.randint(0, 5) for a in range(6) for b in range(6)}
    found = list_schedule(
        actors,
        rng.randint(1, 5),
        work,
        halves=seed % 2 == 0,
        stages=stages,
        delays=delays,
        most=most,
        rule=rng.choice(RULES),
    )
    assert found.actors == tuple(actors)
    check_schedule(found, stages)
    for actor, order in enumerate(found.orders):
        assert kept_at_most(order, work) <= most[actor]


def test_less_than_a_microbatch_cannot_be_kept():
    work = [StageDurations({"F": 1, "B": 2}, kept=10), StageDurations({"F": 1, "B": 2}, kept=20)]
    with pytest.raises(ScheduleError, match=r"no more than \[10, 19\]: one microbatch takes \[10"):
        list_schedule((0, 1), 2, work, most=[10, 19])


def test_what_is_kept_for_weights_goes_when_they_are_done():
    """I leaves a third: three microbatches can wait for W where one can wait for I."""
    work = [StageDurations({"F": 1, "I": 1, "W": 5}, kept=3, kept_for_weights=1)]
    found = list_schedule((0,), 3, work, halves=True, most=[5])
    assert str(found) == "0F0,0I0,0F1,0I1,0F2,0I2,0W0,0W1,0W2"
    found = list_schedule((0,), 3, work, halves=True, most=[4])
    assert str(found) == "0F0,0I0,0F1,0I1,0W0,0F2,0I2,0W1,0W2"


def test_patience_waits_for_what_goes_first():
    """A gradient comes soon after a W could begin."""
    work = [
        StageDurations({"F": 1, "I": 1, "W": 4}),
        StageDurations({"F": 0.5, "I": 1, "W": 9}, kept_for_weights=0),
    ]
    eager, patient = (
        str(list_schedule((0, 1), 2, work, halves=True, most=[2, 1], rule=rule)).split("\n")[0]
        for rule in (RULES[0], RULES[2])
    )
    assert eager == "0F0,0F1,0I0,0W0,0I1,0W1"
    assert patient == "0F0,0F1,0I0,0I1,0W0,0W1"
