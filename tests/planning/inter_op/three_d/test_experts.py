"""Experts over copies: what is exchanged, summed and stored, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.cases import amounts
from tests.planning.inter_op.three_d.random_models import with_experts
from tests.planning.inter_op.three_d.tables import cluster, equal_layers, kind
from tfpar.planning.inter_op.three_d.anneal import anneal
from tfpar.planning.inter_op.three_d.assign import balance_microbatches
from tfpar.planning.inter_op.three_d.baselines import megatron
from tfpar.planning.inter_op.three_d.cost_model import analytic_seconds, simulate_strategy
from tfpar.planning.inter_op.three_d.cost_table import Experts, LayerCostTable, Passes, ProfileKey
from tfpar.planning.inter_op.three_d.evaluation import Evaluation, lower_bound
from tfpar.planning.inter_op.three_d.exhaustive import exhaustive
from tfpar.planning.inter_op.three_d.memory import stored_bytes
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.searches import find
from tfpar.planning.inter_op.three_d.space import StrategySpace
from tfpar.planning.inter_op.three_d.strategy import MemoryOptions, Strategy3D
from tfpar.spec import ArgumentError, MemoryLimitError, PlanError

ALIKE = {"fast": 1.0}
FOUR = cluster(("fast", 2, 100.0, 10.0), ("fast", 2, 100.0, 10.0))


def model(experts, batch=8, on=FOUR, layers=4, speeds=ALIKE, **fields):
    return StrategyProblem(equal_layers(layers, speeds, experts=experts, **fields), on, batch)


@pytest.mark.parametrize(
    ("degree", "seconds"),
    [
        (1, 0.0),
        # Half of 50 bytes go to the other rank of the machine.
        (2, 25 / 100),
        # A quarter to each of two ranks of the other machine, from both ranks of this one.
        (4, 2 * 25 / 10),
    ],
)
def test_tokens_go_to_their_experts_and_back_in_both_passes(degree, seconds):
    given = model(Experts(routed_bytes=50.0))
    found = Strategy3D(4, 1, 1, (4,), experts=degree)
    expected = 2 * 4 * (3 + 2 * 2 * seconds)
    assert analytic_seconds(given, found) == pytest.approx(expected)
    assert simulate_strategy(given, found).seconds == pytest.approx(expected)


def test_tokens_go_to_their_experts_again_when_layers_are_computed_again():
    given = model(Experts(routed_bytes=50.0), input_bytes=1.0)
    found = Strategy3D(4, 1, 1, (4,), experts=2, memory=MemoryOptions(recompute=True))
    assert simulate_strategy(given, found).seconds == pytest.approx(2 * 4 * (4 + 3 * 2 * 25 / 100))


def test_each_tensor_rank_has_whole_tokens():
    """A part of each expert needs them: two groups of two cross the machines, of 50 bytes each."""
    given = model(Experts(routed_bytes=50.0))
    found = Strategy3D(2, 2, 1, (4,), experts=2)
    assert simulate_strategy(given, found).seconds == pytest.approx(
        4 * 4 * (1.5 + 2 * 2 * 25 * 2 / 10)
    )


def test_copies_with_the_same_experts_sum_their_gradients():
    given = model(Experts(gradient_bytes=15.0), gradient_bytes=20.0)
    compute = 2 * 4 * 3
    # All four copies in a ring over both machines, or two rings that share the link between.
    dense, pairs = 2 * 3 / 4 * 4 * 5 / 10, 2 * 1 / 2 * 4 * 15 / 2 / (10 / 2)
    for degree, seconds in [
        (1, 2 * 3 / 4 * 4 * 20 / 10),
        (2, dense + pairs),
        (4, dense),
    ]:
        found = Strategy3D(4, 1, 1, (4,), experts=degree)
        assert simulate_strategy(given, found).seconds == pytest.approx(compute + seconds)


def test_experts_are_stored_once_in_each_group():
    experts = Experts(fixed_bytes=80.0, slot_bytes=48.0)
    given = model(experts, fixed_bytes=100.0, slot_bytes=60.0)
    whole = Strategy3D(4, 1, 1, (4,), experts=4)
    assert stored_bytes(given, whole) == pytest.approx([4 * (20 + 80 / 4)])
    halves = Strategy3D(2, 2, 1, (4,), experts=2)
    assert stored_bytes(given, halves) == pytest.approx([4 * (20 + 80 / 2) / 2])
    sharded = Strategy3D(4, 1, 1, (4,), experts=2, memory=MemoryOptions(shard_slots=True))
    # Slots of weights that all copies have are shared by four, those of experts by two.
    expected = 4 * (20 - 12 + 12 / 4 + (80 - 48 + 48 / 2) / 2)
    assert stored_bytes(given, sharded) == pytest.approx([expected])
    peaks = [peak.num_bytes for peak in simulate_strategy(given, sharded).peaks]
    assert peaks == pytest.approx([expected])


def test_layers_with_experts_have_times_of_their_own_for_each_degree():
    """Few tokens for each of many experts take longer than many for a few."""
    seconds = {
        ProfileKey("fast", 1, 1, degree): Passes(4 / degree, 8 / degree) for degree in (1, 2, 4)
    }
    sparse = dataclasses.replace(kind(ALIKE, experts=Experts()), seconds=seconds)
    table = LayerCostTable({"dense": kind(ALIKE), "sparse": sparse}, ("dense", "sparse"))
    given = StrategyProblem(table, FOUR, 8)
    for degree in (1, 2, 4):
        found = Strategy3D(4, 1, 1, (2,), experts=degree)
        assert simulate_strategy(given, found).seconds == pytest.approx(2 * (3 + 12 / degree))
    assert find(given).best.strategy.experts == 4
    with pytest.raises(PlanError, match="'sparse' have no time .* microbatches of 1, experts over"):
        analytic_seconds(
            dataclasses.replace(given, cluster=cluster(("fast", 8, 1.0, 1.0))),
            Strategy3D(8, 1, 1, (2,), experts=8),
        )


def test_experts_are_spread_where_they_do_not_fit():
    experts = Experts(fixed_bytes=80.0, gradient_bytes=10.0, routed_bytes=50.0)
    small = cluster(*[("fast", 2, 100.0, 10.0)] * 2, memory_bytes=170.0)
    given = model(experts, on=small, fixed_bytes=100.0, gradient_bytes=20.0)
    assert max(stored_bytes(given, Strategy3D(4, 1, 1, (4,)))) > 170
    assert any(degrees.experts == 4 for degrees in StrategySpace(given).degrees)
    assert find(given).best.simulated_s <= min(
        simulate_strategy(given, one).seconds for one in megatron(given)
    )
    assert megatron(given)[0].experts == 4


def test_copies_that_share_experts_run_as_many_microbatches():
    """Each pair has one of the slow devices, so that none gets more than another; a pair of fast
    devices gets more."""
    on = cluster(*[("fast", 1, 1.0, 10.0), ("slow", 1, 1.0, 10.0)] * 2)
    given = model(Experts(), on=on, speeds={"fast": 3.0, "slow": 1.0})
    even = Strategy3D(4, 1, 1, (4,), experts=2)
    assert balance_microbatches(given, even) is even
    apart = Strategy3D(4, 1, 1, (4,), ranks=(0, 2, 1, 3), experts=2)
    assert balance_microbatches(given, apart).shares == (3, 3, 1, 1)
    assert simulate_strategy(given, even).seconds == pytest.approx(2 * 4 * 3)
    # The slow one of a pair is waited for in each microbatch, whatever the shares.
    assert simulate_strategy(given, balance_microbatches(given, apart)).seconds == pytest.approx(
        3 * 4
    )


def test_what_is_no_strategy_is_refused():
    with pytest.raises(PlanError, match="4 copies are no groups of 3 for the experts"):
        Strategy3D(4, 1, 1, (4,), experts=3)
    with pytest.raises(PlanError, match=r"of \(1, 2, 1, 2\) groups of 2 do not"):
        Strategy3D(4, 1, 1, (4,), shares=(1, 2, 1, 2), experts=2)
    with pytest.raises(
        ArgumentError, match=r"experts\.gradient_bytes is 2.0; it must be 1 at most"
    ):
        model(Experts(gradient_bytes=2.0), gradient_bytes=1.0)
    with pytest.raises(ArgumentError, match=r"experts\.routed_bytes is -1.0"):
        Experts(routed_bytes=-1.0)


SEEDS = (3, 5, 7, 11, 13, 14, 39, 51, 59)


@pytest.mark.slow
@pytest.mark.parametrize("count", amounts(4, len(SEEDS)))
def test_searches_agree_on_models_with_experts(count):
    """No bound leaves out what is better, and annealing finds what exhaustive search does."""
    spread = 0
    for seed in SEEDS[-count:]:
        given = with_experts(seed)
        space = StrategySpace(given)
        evaluation = Evaluation(space)
        prices = {d: min(map(evaluation.simulate, space.points(d))) for d in space.degrees}
        for degrees, seconds in prices.items():
            assert lower_bound(given, degrees) <= seconds * (1 + 1e-9)
        best = min(prices.values())
        if math.isinf(best):
            with pytest.raises(MemoryLimitError):
                exhaustive(given)
            continue
        for found in (exhaustive(given), anneal(given, seed=seed)):
            assert found.best.simulated_s == pytest.approx(best)
        spread += found.best.strategy.experts > 1
    assert spread >= count / 3


def test_a_strategy_says_how_its_experts_are_spread():
    assert str(Strategy3D(4, 2, 1, (4,), experts=2)) == (
        "1 stages x 4 data x 2 tensor, experts over 2, microbatches of 1, layers 4"
    )
