"""Units to stages of unequal pace."""

from __future__ import annotations

import random

import pytest

from tests.cases import amounts
from tests.planning.inter_op.stages.chains import TOLERANCES, chain
from tests.planning.inter_op.stages.random_units import (
    assignments,
    least_sent_of_all,
    random_graph,
    random_paces,
    sent,
    taken,
)
from tfpar.planning.deadline import Deadline
from tfpar.planning.inter_op.stages import stage_ilp
from tfpar.planning.inter_op.stages.assign import assign
from tfpar.planning.inter_op.stages.bounds import balanced_bounds, fixed_bounds
from tfpar.planning.inter_op.stages.order_partition import partition_order, rebalance


@pytest.mark.parametrize("trials", amounts(40, 200))
@pytest.mark.parametrize("fixed", [False, True])
def test_no_assignment_to_unequal_stages_sends_less(trials, fixed):
    solved = moved = 0
    for seed in range(trials):
        graph, num_stages = random_graph(2000 + seed, fixed)
        paces = random_paces(seed, num_stages)
        possible = set(assignments(graph, num_stages))
        if not possible:
            continue
        tolerance = TOLERANCES[seed % 3]
        found = assign(graph, num_stages, paces=paces, tolerance=tolerance)
        assert found.stages in possible
        assert found.seconds == pytest.approx(taken(graph, found.stages, num_stages, paces))
        assert max(found.seconds) <= found.most_seconds
        least = least_sent_of_all(graph, num_stages, found.most_seconds, paces)
        assert found.sent_bytes == pytest.approx(least)
        average = graph.seconds / sum(1 / pace for pace in paces)
        fastest = min(max(taken(graph, s, num_stages, paces)) for s in possible)
        assert found.most_seconds >= max(average * (1 + tolerance), fastest) * (1 - 1e-9)
        solved += 1
        moved += found.stages != assign(graph, num_stages, tolerance=tolerance).stages
    assert solved > 0.75 * trials and moved > trials / 10


@pytest.mark.parametrize("trials", amounts(50, 250))
def test_bounds_of_unequal_stages_lose_no_assignment_that_is_balanced(trials):
    narrowed = 0
    for seed in range(trials):
        graph, num_stages = random_graph(seed, fixed=seed % 2 == 0)
        paces = random_paces(seed, num_stages)
        everything = list(assignments(graph, num_stages))
        if not everything or not graph.seconds:
            continue
        bounds = fixed_bounds(graph, num_stages)
        slowest = [max(taken(graph, stages, num_stages, paces)) for stages in everything]
        most = random.Random(seed).choice(slowest)
        found = balanced_bounds(graph, bounds, num_stages, most, paces)
        assert found is not None
        for stages, seconds in zip(everything, slowest, strict=True):
            if seconds <= most:
                assert all(a <= s <= b for s, (a, b) in zip(stages, found, strict=True))
        narrowed += found != bounds
        impossible = graph.seconds / sum(1 / pace for pace in paces) * 0.99
        assert balanced_bounds(graph, bounds, num_stages, impossible, paces) is None
    assert narrowed > 0.2 * trials


def test_a_chain_of_unequal_stages_is_bounded_from_both_ends():
    graph = chain(1, 1, 1, 1, 1, 1, 1)
    bounds = balanced_bounds(graph, fixed_bounds(graph, 3), 3, 4.0, (1.0, 2.0, 4.0))
    assert bounds == [(0, 0), (0, 0), (0, 0), (0, 0), (1, 1), (1, 1), (2, 2)]


@pytest.mark.parametrize("trials", amounts(20, 100))
def test_the_best_cut_and_the_program_make_the_slowest_of_unequal_stages_as_fast_as_can_be(trials):
    for seed in range(trials):
        graph, num_stages = random_graph(seed, fixed=seed % 2 == 0)
        paces = random_paces(seed, num_stages)
        everything = list(assignments(graph, num_stages))
        if not everything or not graph.seconds:
            continue
        seconds = {s: max(taken(graph, s, num_stages, paces)) for s in everything}
        bounds = fixed_bounds(graph, num_stages)
        found = stage_ilp.minimize_bottleneck(graph, bounds, num_stages, Deadline(), paces)
        assert seconds[found] == pytest.approx(min(seconds.values()))
        stages = partition_order(graph, bounds, num_stages, paces)
        in_order = [s for s in everything if list(s) == sorted(s)]
        if in_order:
            assert stages is not None
            assert seconds[stages] <= min(seconds[s] for s in in_order) * (1 + 1e-9)


@pytest.mark.parametrize("trials", amounts(40, 200))
def test_levelling_unequal_stages_sends_no_more_and_keeps_to_what_is_asked(trials):
    moved = 0
    for seed in range(trials):
        graph, num_stages = random_graph(seed, fixed=seed % 2 == 0)
        paces = random_paces(seed, num_stages)
        everything = list(assignments(graph, num_stages))
        if not everything:
            continue
        before = random.Random(seed).choice(everything)
        after = rebalance(graph, fixed_bounds(graph, num_stages), num_stages, before, paces)
        assert after in everything
        assert sent(graph, after) <= sent(graph, before)
        old, new = (
            sorted(taken(graph, s, num_stages, paces), reverse=True) for s in (before, after)
        )
        assert new <= old
        moved += new < old
    assert moved > 0.1 * trials


@pytest.mark.parametrize("trials", amounts(15, 60))
def test_equal_paces_change_nothing(trials):
    for seed in range(trials):
        graph, num_stages = random_graph(seed)
        plain = assign(graph, num_stages)
        assert assign(graph, num_stages, paces=[1.0] * num_stages) == plain
        assert assign(graph, num_stages, paces=[2.0] * num_stages).stages == plain.stages


def test_layers_go_by_pace():
    found = assign(chain(*[1] * 12), 3, paces=(1.0, 2.0, 2.0))
    assert found.stages == (0,) * 6 + (1,) * 3 + (2,) * 3
    assert found.seconds == (6.0, 6.0, 6.0)
