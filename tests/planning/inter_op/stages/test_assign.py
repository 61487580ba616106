"""Units to stages: the least that can be sent, whatever shape the model has."""

from __future__ import annotations

import random

import pulp
import pytest

from tests.cases import amounts
from tests.planning.inter_op.stages.big_m import least_sent_by_big_m
from tests.planning.inter_op.stages.chains import TOLERANCES, chain, units
from tests.planning.inter_op.stages.random_units import (
    assignments,
    least_sent_of_all,
    random_graph,
    sent,
    taken,
)
from tfpar.planning.deadline import Deadline, SearchStopped
from tfpar.planning.inter_op.stages import stage_ilp
from tfpar.planning.inter_op.stages.assign import assign
from tfpar.planning.inter_op.stages.bounds import balanced_bounds, fixed_bounds, seed_each_stage
from tfpar.planning.inter_op.stages.order_partition import partition_order, rebalance
from tfpar.planning.inter_op.stages.units import Flow, TiedWeight, Unit, UnitGraph
from tfpar.spec import ArgumentError, PlanError

# --- against all assignments ----------------------------------------------------------------


@pytest.mark.parametrize("trials", amounts(40, 200))
@pytest.mark.parametrize("fixed", [False, True])
def test_no_assignment_sends_less(trials, fixed):
    solved = refused = 0
    for seed in range(trials):
        graph, num_stages = random_graph(seed, fixed)
        possible = set(assignments(graph, num_stages))
        if not possible:
            with pytest.raises(PlanError, match="Nothing is left|be in an earlier"):
                assign(graph, num_stages)
            refused += 1
            continue
        found = assign(graph, num_stages, tolerance=TOLERANCES[seed % 3])
        assert found.stages in possible
        assert found.seconds == pytest.approx(taken(graph, found.stages, num_stages))
        assert max(found.seconds) <= found.most_seconds
        assert found.sent_bytes == pytest.approx(sent(graph, found.stages))
        least = least_sent_of_all(graph, num_stages, found.most_seconds)
        assert found.sent_bytes == pytest.approx(least)
        assert found.gap <= 1e-5
        solved += 1
    assert solved > 0.75 * trials
    assert (refused > 0) == fixed


@pytest.mark.parametrize("trials", amounts(15, 60))
@pytest.mark.parametrize("fixed", [False, True])
def test_big_m_sends_no_less(trials, fixed):
    for seed in range(trials):
        graph, num_stages = random_graph(1000 + seed, fixed)
        if not any(assignments(graph, num_stages)):
            continue
        found = assign(graph, num_stages, tolerance=TOLERANCES[seed % 3])
        least = least_sent_by_big_m(graph, num_stages, found.most_seconds)
        assert found.sent_bytes == pytest.approx(least)


@pytest.mark.parametrize("trials", amounts(50, 250))
def test_bounds_lose_no_assignment_that_is_balanced(trials):
    narrowed = 0
    for seed in range(trials):
        graph, num_stages = random_graph(seed, fixed=seed % 2 == 0)
        everything = list(assignments(graph, num_stages))
        if not everything or not graph.seconds:
            continue
        bounds = fixed_bounds(graph, num_stages)
        slowest = [max(taken(graph, stages, num_stages)) for stages in everything]
        most = random.Random(seed).choice(slowest)
        found = balanced_bounds(graph, bounds, num_stages, most)
        assert found is not None
        for stages, seconds in zip(everything, slowest, strict=True):
            if seconds <= most:
                assert all(a <= s <= b for s, (a, b) in zip(stages, found, strict=True))
        narrowed += found != bounds
        impossible = graph.seconds / num_stages * 0.99
        assert balanced_bounds(graph, bounds, num_stages, impossible) is None
    assert narrowed > 0.2 * trials


def test_a_chain_is_bounded_from_both_ends():
    graph = chain(1, 1, 1, 1, 1, 1)
    bounds = balanced_bounds(graph, fixed_bounds(graph, 3), 3, 2.0)
    assert bounds == [(0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2)]
    bounds = balanced_bounds(graph, fixed_bounds(graph, 3), 3, 3.0)
    assert bounds == [(0, 1), (0, 1), (0, 1), (1, 2), (1, 2), (1, 2)]


@pytest.mark.parametrize("trials", amounts(20, 100))
def test_the_best_cut_is_the_best_of_all_cuts_of_the_order(trials):
    for seed in range(trials):
        graph, num_stages = random_graph(seed)
        stages = partition_order(graph, fixed_bounds(graph, num_stages), num_stages)
        assert stages is not None and list(stages) == sorted(stages)
        in_order = (s for s in assignments(graph, num_stages) if list(s) == sorted(s))
        least = min(max(taken(graph, s, num_stages)) for s in in_order)
        assert max(taken(graph, stages, num_stages)) == least


@pytest.mark.parametrize("trials", amounts(15, 60))
def test_the_slowest_stage_can_be_made_as_fast_as_can_be(trials):
    for seed in range(trials):
        graph, num_stages = random_graph(seed, fixed=True)
        everything = list(assignments(graph, num_stages))
        if everything and graph.seconds:
            bounds = fixed_bounds(graph, num_stages)
            found = stage_ilp.minimize_bottleneck(graph, bounds, num_stages, Deadline())
            assert found in everything
            least = min(max(taken(graph, s, num_stages)) for s in everything)
            assert max(taken(graph, found, num_stages)) == pytest.approx(least)


@pytest.mark.parametrize("trials", amounts(40, 200))
def test_levelling_sends_no_more_and_keeps_to_what_is_asked(trials):
    moved = 0
    for seed in range(trials):
        graph, num_stages = random_graph(seed, fixed=seed % 2 == 0)
        everything = list(assignments(graph, num_stages))
        if not everything:
            continue
        before = random.Random(seed).choice(everything)
        after = rebalance(graph, fixed_bounds(graph, num_stages), num_stages, before)
        assert after in everything
        assert sent(graph, after) <= sent(graph, before)
        old, new = (sorted(taken(graph, s, num_stages), reverse=True) for s in (before, after))
        assert new <= old
        moved += new < old
    assert moved > 0.1 * trials


# --- named shapes -----------------------------------------------------------------------------


def test_a_chain_is_cut_where_it_is_narrow():
    flows = (Flow(0, (1,), 9.0), Flow(1, (2,), 1.0), Flow(2, (3,), 9.0))
    found = assign(UnitGraph(units(1, 1, 1, 1), flows), 2)
    assert found.stages == (0, 0, 1, 1)
    assert found.sent_bytes == 1.0


def test_balance_goes_before_bytes():
    flows = (Flow(0, (1,), 1.0), Flow(1, (2,), 9.0), Flow(2, (3,), 1.0))
    graph = UnitGraph(units(1, 1, 1, 1), flows)
    assert assign(graph, 2).stages == (0, 0, 1, 1)
    assert assign(graph, 2, tolerance=0.5).sent_bytes == pytest.approx(1.0)


def test_skips_of_a_unet_go_straight_to_their_reader():
    """Three levels down, a bottom, three up; each level's skip is as large as what goes down."""
    down = tuple(Flow(i, (i + 1, 6 - i), 8.0 / 2**i) for i in range(3))
    up = tuple(Flow(i, (i + 1,), 8.0 / 2 ** (5 - i)) for i in range(3, 6))
    graph = UnitGraph(units(1, 1, 1, 1, 1, 1, 1), (*down, *up))
    found = assign(graph, 3, tolerance=0.3)
    assert found.sent_bytes == least_sent_of_all(graph, 3, found.most_seconds)
    first, last = found.stages[0], found.stages[-1]
    assert (first, last) == (0, 2)
    through_the_middle = sum(f.num_bytes * (found.stages[f.readers[-1]] > 1) for f in down)
    assert found.sent_bytes < 2 * through_the_middle + 8


def test_an_encoder_is_sent_once_to_each_stage_that_attends_to_it():
    """T5: every layer of the decoder reads what the encoder makes."""
    flows = (
        *(Flow(i, (i + 1,), 4.0) for i in range(3)),
        Flow(3, (5, 6, 7, 8), 4.0),
        *(Flow(i, (i + 1,), 2.0) for i in range(4, 8)),
    )
    graph = UnitGraph(units(1, 1, 1, 1, 0, 1, 1, 1, 1), flows)
    found = assign(graph, 4, tolerance=0.0)
    assert found.stages == (0, 0, 1, 1, 2, 2, 2, 3, 3)
    assert found.sent_bytes == pytest.approx(4.0 + 4.0 + 2.0 + 4.0)


def test_a_token_embedding_goes_where_it_is_sent_least():
    """The decoder's tokens are embedded beside the decoder, not where its table comes in order."""
    flows = (Flow(0, (1,), 5.0), Flow(1, (4,), 5.0), Flow(2, (3,), 50.0), Flow(3, (4,), 50.0))
    graph = UnitGraph(units(1, 1, 0, 1, 1), flows)
    assert assign(graph, 2).stages == (0, 0, 1, 1, 1)


def test_towers_share_stages_or_lie_side_by_side():
    """Two towers of three units and a head: one stage each sends the least."""
    flows = (
        *(Flow(i, (i + 1,), 6.0) for i in (0, 1, 3, 4)),
        Flow(2, (6,), 1.0),
        Flow(5, (6,), 1.0),
    )
    graph = UnitGraph(units(1, 1, 1, 1, 1, 1, 0), flows)
    found = assign(graph, 2)
    assert found.sent_bytes == 1.0
    assert {found.stages[:3], found.stages[3:6]} == {(0, 0, 0), (1, 1, 1)}


def test_several_inputs_and_outputs():
    flows = (Flow(0, (2,), 1.0), Flow(1, (2,), 1.0), Flow(2, (3, 4), 1.0))
    found = assign(UnitGraph(units(1, 1, 2, 1, 1), flows), 3, tolerance=0.0)
    assert found.stages == (0, 0, 1, 2, 2)
    assert found.sent_bytes == 3.0


def test_a_tied_weight_draws_its_readers_together():
    """a sends to b, c to d, and a and c read one table: what is larger decides who lie together."""
    flows = (Flow(0, (1,), 2.0), Flow(2, (3,), 2.0))

    def found(table):
        return assign(UnitGraph(units(1, 1, 1, 1), flows, (TiedWeight((0, 2), table),)), 2)

    assert found(1.0).stages in {(0, 0, 1, 1), (1, 1, 0, 0)}
    assert found(1.0).sent_bytes == 1.0
    assert found(9.0).stages == (0, 1, 0, 1)
    assert found(9.0).sent_bytes == 4.0


def test_one_stage_sends_nothing():
    found = assign(chain(1, 2, 3), 1)
    assert (found.stages, found.sent_bytes, found.seconds) == ((0, 0, 0), 0.0, (6.0,))


def test_units_that_take_no_time():
    found = assign(chain(0, 0, 0), 2)
    assert found.stages in {(0, 0, 1), (0, 1, 1)}


def test_a_unit_too_large_for_balance():
    """No tolerance would do: the largest unit is a stage by itself."""
    found = assign(chain(1, 10, 1, 1), 3, tolerance=0.0)
    assert max(found.seconds) == 10.0
    assert found.stages[1] == 1


# --- fixed units --------------------------------------------------------------------------------


def test_fixed_units_stay():
    assert assign(chain(1, 1, 1, 1, c=0), 2).stages == (0, 0, 0, 1)
    assert assign(chain(1, 1, 1, 1, b=1), 2).stages == (0, 1, 1, 1)


def test_fixed_units_that_no_order_can_be_cut_around():
    """a and b must lie beside each other, c may come before both or after."""
    graph = UnitGraph(units(1, 1, 1, 1, b=1))
    for num_stages in (2, 3, 4):
        found = assign(graph, num_stages)
        assert found.stages[1] == 1
        assert len({*found.stages}) == num_stages


def test_stages_that_contradict_each_other_are_named():
    with pytest.raises(PlanError) as error:
        assign(chain(1, 1, 1, 1, b=1, d=0), 2)
    assert str(error.value) == (
        "'b' is to be in stage 1 and 'd' in stage 0, but 'd' reads what comes of 'b': it cannot be "
        "in an earlier stage. Change one of the two."
    )


def test_a_stage_that_there_is_not():
    with pytest.raises(PlanError, match=r"'c' is to be in stage 2, but there are 2 stages"):
        assign(chain(1, 1, 1, c=2), 2)


def test_more_stages_than_units():
    with pytest.raises(PlanError, match=r"4 stages are too many.*so 3 is the most there can be"):
        assign(chain(1, 1, 1), 4)


def test_a_stage_for_which_nothing_is_left():
    with pytest.raises(PlanError) as error:
        assign(chain(1, 1, 1, 1, c=0), 3)
    assert str(error.value) == (
        "Nothing is left for stage 2 of 3, as units are fixed: 'c' in 0. Ask for 2 stages or "
        "fewer, or fix fewer units."
    )


@pytest.mark.parametrize("trials", amounts(40, 200))
def test_as_many_stages_are_filled_as_can_be(trials):
    for seed in range(trials):
        graph, num_stages = random_graph(seed, fixed=True)
        possible = any(assignments(graph, num_stages))
        try:
            bounds = fixed_bounds(graph, num_stages)
        except PlanError:
            assert not possible
        else:
            assert possible
            assert len(seed_each_stage(bounds, num_stages)) == num_stages


@pytest.mark.parametrize(
    "make",
    [
        lambda: UnitGraph(()),
        lambda: UnitGraph(units(1, 1), (Flow(1, (0,), 1.0),)),
        lambda: UnitGraph(units(1, 1), (Flow(0, (2,), 1.0),)),
        lambda: UnitGraph(units(1, 1), (), (TiedWeight((0, 2), 1.0),)),
        lambda: Flow(0, (), 1.0),
        lambda: Flow(0, (0, 1), 1.0),
        lambda: Flow(0, (1,), -1.0),
        lambda: TiedWeight((), 1.0),
        lambda: Unit("a", -1.0),
        lambda: Unit("a", 1.0, stage=-1),
        lambda: assign(chain(1, 1), 0),
        lambda: assign(chain(1, 1), 1, tolerance=-0.1),
        lambda: assign(chain(1, 1), 2, paces=(1.0,)),
        lambda: assign(chain(1, 1), 2, paces=(1.0, 0.0)),
        lambda: assign(chain(1, 1), 2, paces=(1.0, float("inf"))),
    ],
)
def test_what_is_no_graph_of_units_is_refused(make):
    with pytest.raises(ArgumentError):
        make()


# --- time -----------------------------------------------------------------------------------------


def narrow_at_its_ends() -> UnitGraph:
    """A chain, and a unit beside it, of which either may come first."""
    flows = (Flow(0, (1,), 1.0), Flow(1, (2,), 9.0), Flow(2, (3,), 1.0), Flow(0, (4,), 0.0))
    return UnitGraph(units(1, 1, 1, 1, 0), flows)


def test_without_time_the_best_cut_is_used():
    deadline = Deadline(-1.0)
    found = assign(narrow_at_its_ends(), 2, tolerance=0.5, deadline=deadline)
    assert found.stages[:4] in {(0, 0, 1, 1), (0, 1, 1, 1), (0, 0, 0, 1)}
    assert found.gap == float("inf")
    assert deadline.cut_short


@pytest.mark.parametrize("trials", amounts(40, 200))
def test_without_time_fixed_units_stay_all_the_same(trials):
    cut_short = 0
    for seed in range(trials):
        graph, num_stages = random_graph(seed, fixed=True)
        possible = set(assignments(graph, num_stages))
        if possible:
            deadline = Deadline(-1.0)
            assert assign(graph, num_stages, deadline=deadline).stages in possible
            cut_short += deadline.cut_short
    assert cut_short > 0.25 * trials


def test_one_program_takes_no_longer_than_its_limit_however_long_the_search_may(monkeypatch):
    monkeypatch.setattr(stage_ilp, "TIME_LIMIT_S", 0.0)
    graph, num_stages = random_graph(0)
    deadline = Deadline()
    found = assign(graph, num_stages, deadline=deadline)
    assert found.stages in set(assignments(graph, num_stages))
    assert deadline.cut_short and found.gap > 0


def test_what_the_solver_has_found_in_time_is_used(monkeypatch):
    monkeypatch.setattr(stage_ilp, "gap_of", lambda problem: 0.25)
    deadline = Deadline(60.0)
    found = assign(narrow_at_its_ends(), 2, tolerance=0.5, deadline=deadline)
    assert (found.sent_bytes, found.gap) == pytest.approx((1.0, 0.25))
    assert deadline.cut_short


@pytest.mark.parametrize("graph", [chain(1, 1, 1), narrow_at_its_ends()])
def test_a_search_that_is_given_up(graph):
    deadline = Deadline()
    deadline.stop()
    with pytest.raises(SearchStopped):
        assign(graph, 2, deadline=deadline)


def long_chain(layers: int) -> UnitGraph:
    """A GPT of that many layers: an embedding, blocks that read a mask too, and tied logits."""
    blocks = tuple(Unit(f"block {i}", 1.0) for i in range(layers))
    flows = tuple(Flow(i, (i + 1,), 100.0) for i in range(layers + 1))
    mask = Flow(0, tuple(range(2, layers + 1)), 1.0)
    table = TiedWeight((0, layers + 1), 300.0)
    return UnitGraph((Unit("tokens", 0.1), *blocks, Unit("logits", 1.5)), (*flows, mask), (table,))


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_the_program_of_96_layers_is_small(num_stages):
    """Bounds leave each unit few stages, and the solver next to nothing to try."""
    graph = long_chain(96)
    found = assign(graph, num_stages)
    assert found.gap <= 1e-5
    assert found.sent_bytes == pytest.approx(300.0 + 100.0 * (num_stages - 1) + (num_stages - 1))
    bounds = balanced_bounds(graph, fixed_bounds(graph, num_stages), num_stages, found.most_seconds)
    assert bounds is not None
    program = stage_ilp.StageIlp(graph, bounds, num_stages)
    binaries = [v for v in program.problem.variables() if v.cat == pulp.LpInteger]
    assert len(binaries) <= 110
