"""Searches agree with each other where all can be tried, and are never worse than Megatron's."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from benchmarks.alpa_simulation import simulate_alpa
from tests.cases import amounts, at_night, nightly
from tests.planning.inter_op.three_d.random_models import mixed, some
from tests.planning.inter_op.three_d.tables import cluster, equal_layers, kind
from tfpar.planning.inter_op.three_d.anneal import anneal
from tfpar.planning.inter_op.three_d.baselines import alpa, megatron, random_search
from tfpar.planning.inter_op.three_d.cost_model import simulate_strategy
from tfpar.planning.inter_op.three_d.cost_table import LayerCostTable
from tfpar.planning.inter_op.three_d.evaluation import Evaluation, lower_bound
from tfpar.planning.inter_op.three_d.exhaustive import exhaustive
from tfpar.planning.inter_op.three_d.memory import fits
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.searches import find
from tfpar.planning.inter_op.three_d.space import ParallelDegrees, StrategyPoint, StrategySpace
from tfpar.planning.inter_op.three_d.strategy import MemoryOptions
from tfpar.spec import MemoryLimitError, PlanError

MODELS = [*map(some, range(1000, 1028)), *map(mixed, (1, 4, 10, 31, 39, 58))]
FEW_MODELS = [*map(some, (1002, 1009, 1013)), *map(mixed, (1, 4))]


def every_point(model):
    """Seconds of all points as simulated, by degrees, none left out."""
    space = StrategySpace(model)
    evaluation = Evaluation(space)
    return {d: min(map(evaluation.simulate, space.points(d))) for d in space.degrees}


@pytest.mark.slow
@pytest.mark.parametrize("models", [FEW_MODELS, *at_night(MODELS)], ids=len)
def test_annealing_finds_what_exhaustive_search_does(models):
    compared = []
    for seed, model in enumerate(models):
        try:
            best = exhaustive(model)
        except MemoryLimitError:
            with pytest.raises(MemoryLimitError):
                anneal(model, seed=seed)
            continue
        assert best.complete
        found = anneal(model, seed=seed).best
        assert found.simulated_s == pytest.approx(best.best.simulated_s)
        compared.append(best.best.strategy)
    assert len(compared) >= 0.8 * len(models)
    assert any(strategy.virtual > 1 for strategy in compared)
    assert any(strategy.shares for strategy in compared)
    assert any(one.options(s).shard_slots for one in compared for s in range(one.stages))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "seconds"), [(7005, 70.9333), nightly(7029, 238.7950)])
def test_annealing_gets_to_where_single_machines_lead_only_by_worse_places(seed, seconds):
    """Copies in pairs of equal machines: one that moves breaks two pairs up."""
    assert anneal(mixed(seed), seed=seed).best.simulated_s == pytest.approx(seconds, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", amounts(4, 12))
def test_pruning_loses_nothing(seeds):
    for seed in range(12 - seeds, 12):
        model = some(seed)
        prices = every_point(model)
        for degrees, seconds in prices.items():
            assert lower_bound(model, degrees) <= seconds * (1 + 1e-9)
        best = min(prices.values())
        if math.isinf(best):
            with pytest.raises(MemoryLimitError, match="None of .* strategies fits"):
                exhaustive(model)
        else:
            found = exhaustive(model)
            assert found.complete
            assert found.best.simulated_s == pytest.approx(best)


@pytest.mark.parametrize("seeds", amounts(10, 25))
def test_what_is_found_is_never_worse_than_megatron_s_heuristic(seeds):
    better = 0
    for seed in range(seeds):
        model = some(seed)
        theirs = [simulate_strategy(model, strategy).seconds for strategy in megatron(model)]
        if theirs:
            ours = find(model, seed=seed, iterations=20).best
            assert ours.simulated_s <= min(theirs)
            assert fits(model, ours.strategy)
            better += ours.simulated_s < 0.99 * min(theirs)
    assert better >= seeds / 5


@pytest.mark.nightly
def test_annealing_beats_random_search_at_equal_budget():
    ours, theirs = [], []
    for seed, model in enumerate(MODELS[15:]):
        try:
            drawn = random_search(model, seed=seed, trials=40)
        except MemoryLimitError:
            continue
        ours.append(anneal(model, seed=seed, iterations=40).best.simulated_s)
        theirs.append(drawn.best.simulated_s)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    assert len(ratios) >= 15
    assert math.prod(ratios) ** (1 / len(ratios)) < 1


def test_the_same_seed_finds_the_same():
    model = some(10)
    found = [anneal(model, seed=3, iterations=60) for _ in range(2)]
    assert found[0] == found[1]
    assert random_search(model, seed=3) == random_search(model, seed=3)


def test_searches_say_what_they_are_at():
    model = some(10)
    for search in (find, anneal, exhaustive, random_search):
        told = []
        found = search(model, progress=lambda what, priced, told=told: told.append((what, priced)))
        assert [priced for _, priced in told] == [*range(1, found.evaluated + 1)]
        assert all("stages x" in what and "data x" in what for what, _ in told)


def test_all_orders_of_machines_are_points_once():
    nodes = [("fast", 1, 100.0, 10.0)] * 3 + [("slow", 1, 100.0, 10.0)] * 2
    space = StrategySpace(
        StrategyProblem(equal_layers(8, {"fast": 1.0, "slow": 2.0}), cluster(*nodes), 8)
    )
    lying = [p.order for d in space.degrees[:1] for p in space.points(d) if not any(p.standing)]
    assert lying == sorted(set(itertools.permutations(space.plain_order)))


def test_clusters_may_have_thousands_of_machines():
    on = cluster(*[("fast", 1, 100.0, 10.0)] * 2000)
    space = StrategySpace(StrategyProblem(equal_layers(2, {"fast": 1.0}), on, 2000))
    whole = next(degrees for degrees in space.degrees if degrees.data == 2000)
    assert [point.order for point in space.points(whole)] == [(0,) * 2000]


def test_more_of_the_same_layers_ask_for_no_more_strategies():
    on = cluster(*[("fast", 2, 100.0, 10.0)] * 2)
    few, many = (
        exhaustive(StrategyProblem(equal_layers(layers, {"fast": 1.0}), on, 8))
        for layers in (32, 320)
    )
    assert few.evaluated == many.evaluated
    assert many.best.simulated_s == pytest.approx(10 * few.best.simulated_s)


def test_a_search_ends_when_its_time_is_over():
    model = some(12)
    assert anneal(model, seconds=0.0).evaluated == 1
    assert random_search(model, seconds=0.0).evaluated == 1
    with pytest.raises(MemoryLimitError, match="None of 0 .* Another does .* search for longer"):
        exhaustive(model, seconds=0.0)
    assert not exhaustive(model, seconds=0.0, starts=megatron(model)).complete


def test_what_does_not_fit_is_computed_again():
    """Only then: it takes longer."""
    on = cluster(("fast", 2, 100.0, 10.0), memory_bytes=130.0)
    small = equal_layers(4, {"fast": 1.0}, fixed_bytes=40.0, kept_bytes=30.0, input_bytes=1.0)
    found = find(StrategyProblem(small, on, 8)).best.strategy
    assert found.memory.recompute
    large = dataclasses.replace(on, nodes=cluster(("fast", 2, 100.0, 10.0)).nodes)
    assert not find(StrategyProblem(small, large, 8)).best.strategy.memory.recompute


def test_stages_are_computed_again_that_have_most_in_flight():
    """The first of three stages keeps three microbatches, 90 B, the second 60 B and the last 30."""
    on = cluster(*[("fast", 1, 1.0, 10.0)] * 3, memory_bytes=101.0)
    table = equal_layers(3, {"fast": 1.0}, fixed_bytes=20.0, kept_bytes=30.0, input_bytes=1.0)
    space = StrategySpace(StrategyProblem(table, on, 8))
    found = space.strategy(space.lying(ParallelDegrees(1, 1, 1), space.plain_order))
    assert [found.options(stage).recompute for stage in range(3)] == [True, False, False]
    assert found.recompute == (0,)


@pytest.mark.parametrize("room", [None, 1.0])
def test_slots_are_sharded_where_they_have_to_be(room):
    """In the second of two stages, which is not waited for: weights take longer to gather than
    gradients to sum. Devices compute in the memory of hosts, or these have no room for slots."""
    on = cluster(*[("fast", 1, 1.0, 10.0)] * 4, memory_bytes=115.0)
    nodes = tuple(
        dataclasses.replace(
            node,
            device=dataclasses.replace(node.device, host_bandwidth=1e9 if room else math.inf),
            host_memory_bytes=room,
        )
        for node in on.nodes
    )
    kinds = {
        name: kind(
            {"fast": 1.0},
            fixed_bytes=fixed_bytes,
            slot_bytes=60.0,
            kept_bytes=10.0,
            gradient_bytes=20.0,
            weight_bytes=40.0,
        )
        for name, fixed_bytes in (("block", 70.0), ("head", 130.0))
    }
    on, table = dataclasses.replace(on, nodes=nodes), LayerCostTable(kinds, tuple(kinds))
    space = StrategySpace(StrategyProblem(table, on, 8))
    found = space.strategy(space.lying(ParallelDegrees(2, 1, 1), space.plain_order))
    assert found.memory == (MemoryOptions(), MemoryOptions(shard_slots=True))


@pytest.mark.parametrize(
    ("bandwidth", "host_bytes", "expected"),
    [
        pytest.param(1e3, None, {"slots offloaded"}, id="quickly there and back"),
        pytest.param(1e3, 160.0, {"recomputed"}, id="hosts have no room"),
        pytest.param(0.1, None, {"recomputed"}, id="slowly"),
        pytest.param(math.inf, None, {"recomputed"}, id="in the memory of the host"),
    ],
)
def test_what_takes_least_is_done_to_store_less(bandwidth, host_bytes, expected):
    """Two stages that lack 20 B and less: slots of 80 B come and go once a step."""
    on = cluster(("fast", 2, 100.0, 10.0), memory_bytes=200.0)
    (node,) = on.nodes
    device = dataclasses.replace(node.device, host_bandwidth=bandwidth, host_latency_s=0.0)
    on = dataclasses.replace(
        on, nodes=(dataclasses.replace(node, device=device, host_memory_bytes=host_bytes),)
    )
    table = equal_layers(
        2, {"fast": 1.0}, fixed_bytes=160.0, slot_bytes=120.0, kept_bytes=30.0, input_bytes=1.0
    )
    space = StrategySpace(StrategyProblem(table, on, 8))
    found = space.strategy(space.lying(ParallelDegrees(1, 1, 1), space.plain_order))
    assert {text for text in ("recomputed", "slots offloaded") if text in str(found)} == expected


def test_slots_are_sharded_where_weights_are_less_than_gradients():
    on = cluster(*[("fast", 1, 1.0, 10.0)] * 4)
    for weight_bytes, sharded in [(10.0, True), (20.0, False)]:
        table = equal_layers(
            2,
            {"fast": 1.0},
            fixed_bytes=80.0,
            slot_bytes=60.0,
            gradient_bytes=20.0,
            weight_bytes=weight_bytes,
        )
        space = StrategySpace(StrategyProblem(table, on, 8))
        strategy = space.strategy(space.lying(ParallelDegrees(4, 1, 1), space.plain_order))
        assert strategy.memory.shard_slots == sharded


def test_dominoes_lie_or_stand():
    on = cluster(*[("fast", 4, 100.0, 10.0)] * 2)
    space = StrategySpace(StrategyProblem(equal_layers(4, {"fast": 1.0}), on, 8))
    degrees = ParallelDegrees(2, 2, 1)
    ranks = {p.standing: space.strategy(p).ranks for p in space.points(degrees)}
    assert ranks == {(False,): (0, 1, 2, 3, 4, 5, 6, 7), (True,): (0, 1, 4, 5, 2, 3, 6, 7)}


def test_machines_follow_in_any_order_of_their_kinds():
    """Equal ones are not told apart."""
    on = cluster(("slow", 1, 1.0, 1.0), ("fast", 1, 1.0, 1.0), ("slow", 1, 1.0, 1.0))
    space = StrategySpace(StrategyProblem(equal_layers(6, {"fast": 1.0, "slow": 0.5}), on, 8))
    ranks = {space.strategy(p).ranks for p in space.points(ParallelDegrees(1, 1, 1))}
    assert ranks == {(0, 2, 1), (0, 1, 2), (1, 0, 2)}


def test_slow_devices_get_fewer_layers_and_alpa_does_not_see_it():
    on = cluster(*[("fast", 1, 1.0, 100.0)] * 2, *[("slow", 1, 1.0, 100.0)] * 2)
    model = StrategyProblem(equal_layers(8, {"fast": 3.0, "slow": 1.0}, gradient_bytes=1e4), on, 8)
    best = find(model).best
    slowest = max(range(best.strategy.stages), key=lambda s: best.strategy.stage(s)[-1])
    assert best.strategy.counts[slowest] < 8 / best.strategy.stages
    assert best.simulated_s < simulate_alpa(model, alpa(model)).seconds


def test_megatron_takes_the_smallest_product_that_holds_the_model():
    on = cluster(*[("fast", 2, 100.0, 10.0)] * 2, memory_bytes=250.0)
    model = StrategyProblem(equal_layers(4, {"fast": 1.0}, fixed_bytes=100.0), on, 8)
    assert [s.tensor * s.stages for s in megatron(model)] == [2, 2, 2, 4]
    assert all(s.tensor == 2 for s in megatron(model))


def test_a_table_without_the_cluster_s_devices_has_no_strategy():
    on = cluster(("other", 2, 1.0, 1.0))
    with pytest.raises(PlanError, match="No strategy: the table has no times"):
        find(StrategyProblem(equal_layers(4, {"fast": 1.0}), on, 8))


def test_a_point_says_all_but_the_layers():
    model = some(3)
    space = StrategySpace(model)
    point = space.lying(space.degrees[0], space.plain_order)
    assert isinstance(point, StrategyPoint)
    strategy = space.strategy(point)
    assert strategy.ranks == tuple(range(model.cluster.size))
    assert sum(strategy.counts) == len(model.table)


@pytest.mark.parametrize(
    ("fields", "message", "needed"),
    [
        (
            {"fixed_bytes": 100.0},
            r"The nearest \(2 stages x 1 data x 1 tensor, .*\) needs 200 B on a fast with 60 B, "
            r"140 B more than there is. Weights, .* alone are 200 B. Use more .* slot_bytes",
            200.0,
        ),
        (
            {"fixed_bytes": 20.0, "kept_bytes": 40.0},
            r"needs 120 B on .* alone are 40 B. Use smaller microbatches, .* input_bytes",
            120.0,
        ),
        (
            {"fixed_bytes": 100.0, "slot_bytes": 60.0, "kept_bytes": 9.0, "input_bytes": 1.0},
            r"recomputed, slots sharded, slots offloaded\) needs .* Weights and gradients alone "
            r"are .* or devices with more memory\.$",
            None,
        ),
    ],
)
def test_what_fits_nowhere_says_by_how_much_and_what_would_help(fields, message, needed):
    on = cluster(("fast", 2, 100.0, 10.0), memory_bytes=60.0)
    with pytest.raises(MemoryLimitError, match=message) as error:
        find(StrategyProblem(equal_layers(4, {"fast": 1.0}, **fields), on, 8))
    assert math.isfinite(error.value.needed_bytes)
    assert needed is None or error.value.needed_bytes == pytest.approx(needed)
