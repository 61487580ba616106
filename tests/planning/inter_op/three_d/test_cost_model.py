"""What a 3-D strategy takes, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planning.inter_op.three_d.tables import cluster, equal_layers
from tfpar.planning.inter_op.three_d.assign import balance_microbatches
from tfpar.planning.inter_op.three_d.cost_model import analytic_seconds, simulate_strategy
from tfpar.planning.inter_op.three_d.cost_table import LayerCostTable, Passes
from tfpar.planning.inter_op.three_d.memory import fits, stored_bytes
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.strategy import MemoryOptions, Strategy3D
from tfpar.planning.inter_op.three_d.strategy_cost import strategy_cost
from tfpar.spec import ArgumentError, PlanError

ALIKE = {"fast": 1.0}
LAYOUTS = ((4, 1), (2, 2), (1, 4))
FOUR = cluster(("fast", 2, 100.0, 10.0), ("fast", 2, 100.0, 10.0))


def model(batch=8, on=FOUR, layers=4, speeds=ALIKE, **fields):
    return StrategyProblem(equal_layers(layers, speeds, **fields), on, batch)


def test_a_pipeline_of_equal_stages_has_the_closed_form():
    """(M + K - 1) (F + B), of one layer a stage."""
    found = Strategy3D(1, 1, 1, (1, 1, 1, 1))
    assert analytic_seconds(model(), found) == pytest.approx((8 + 3) * 3)
    assert simulate_strategy(model(), found).seconds == pytest.approx((8 + 3) * 3)


def test_gradients_are_summed_by_equation_1():
    """Four ranks, a ring with two links of 100 and two of 10 bytes/s, 80 bytes."""
    found = Strategy3D(4, 1, 1, (4,))
    given = model(gradient_bytes=20.0)
    ring = 2 * 80 / 4 * (2 / 100 + 2 / 10)
    assert analytic_seconds(given, found) == pytest.approx(2 * 4 * 3 + ring)
    # A ring whose parts all move at once: 2 (N - 1) / N of the payload over the slowest link.
    assert simulate_strategy(given, found).seconds == pytest.approx(2 * 4 * 3 + 2 * 3 / 4 * 80 / 10)


def test_tensor_ranks_sum_in_both_passes():
    found = Strategy3D(1, 2, 1, (2, 2))
    given = model(reduced_bytes=50.0)
    forward, summing = 2 * 1 / 2, 2 * 1 / 2 * 2 * 50 / 100
    own = 3 * forward + 2 * summing
    assert simulate_strategy(given, found).seconds == pytest.approx((8 + 1) * own)


def test_the_parts_of_a_strategy_are_those_of_its_busiest_actor():
    given, found = model(reduced_bytes=50.0), Strategy3D(1, 2, 1, (2, 2))
    cost = strategy_cost(given, found)
    assert cost.compute_s[:2] == pytest.approx((8 * 2 / 2, 8 * 2 / 2 * 2))
    exchanged = 8 * 2 * 2 * 1 / 2 * 50 / 100
    assert cost.communication_s[:2] == pytest.approx((exchanged, exchanged))
    assert cost.seconds == pytest.approx(simulate_strategy(given, found).seconds)
    parts = sum(cost.compute_s) + sum(cost.communication_s) + cost.exposed_s + cost.bubble_s
    assert parts == pytest.approx(cost.seconds)
    assert cost.bubble_s == pytest.approx(2 * (3 / 2 + 2 * 1 / 2)), "of one microbatch"
    assert cost.memory_bytes == pytest.approx(max(stored_bytes(given, found)))


def issued(forward, backward):
    return {"dispatch_s": {"fast": Passes(forward, backward)}}


def test_a_task_takes_as_long_as_its_ops_take_to_be_issued():
    """A layer computes for 1 and 2 s; its host needs 3 and 1 s. A tenth of the shorter is not
    hidden."""
    found = Strategy3D(1, 1, 1, (1, 1, 1, 1))
    given = model(**issued(3.0, 1.0))
    assert simulate_strategy(given, found).seconds == pytest.approx((8 + 3) * (3.1 + 2.1))
    again = dataclasses.replace(found, memory=MemoryOptions(recompute=True))
    given = model(**issued(3.0, 1.0), input_bytes=0.0)
    assert simulate_strategy(given, again).seconds == pytest.approx((8 + 3) * (3.1 + 4.3))
    cost = strategy_cost(given, again)
    assert cost.host_wait_s == pytest.approx(8 * (2.1 + 1.3)) and sum(cost.compute_s) == 8 * (1 + 3)
    parts = sum(cost.compute_s) + sum(cost.communication_s) + cost.exposed_s + cost.bubble_s
    assert parts + cost.host_wait_s == pytest.approx(cost.seconds)


def test_each_rank_updates_its_part_of_the_weights():
    given = model(update_s={"fast": 4.0})
    times = [simulate_strategy(given, Strategy3D(*degrees, 1, (4,))).seconds for degrees in LAYOUTS]
    bare = [
        simulate_strategy(model(), Strategy3D(*degrees, 1, (4,))).seconds for degrees in LAYOUTS
    ]
    assert [a - b for a, b in zip(times, bare, strict=True)] == pytest.approx([16, 8, 4])


def test_tensor_ranks_are_best_within_a_machine():
    given = model(reduced_bytes=50.0)
    within = Strategy3D(1, 2, 1, (2, 2), ranks=(0, 1, 2, 3))
    across = Strategy3D(1, 2, 1, (2, 2), ranks=(0, 2, 1, 3))
    for price in (analytic_seconds, lambda *args: simulate_strategy(*args).seconds):
        assert price(given, within) < price(given, across)


def test_two_stages_on_the_same_machines_share_their_links():
    """Each stage has a ring over the two machines: half of 10 bytes/s for each."""
    given = model(gradient_bytes=20.0)
    found = Strategy3D(2, 1, 4, (2, 2), ranks=(0, 2, 1, 3))
    alone = 2 * 2 * 4 * 3  # one microbatch of 4 through 2 stages of 2 layers
    assert simulate_strategy(given, found).seconds == pytest.approx(alone + 2 * 1 / 2 * 40 / 5)


def test_transfers_there_and_back_are_counted_once_each():
    found = Strategy3D(1, 1, 8, (2, 2), ranks=(0, 2))
    given = model(sent_bytes=5.0)
    expected = 8 * 4 * 3 + 2 * 8 * 5 / 10
    assert analytic_seconds(given, found) == pytest.approx(expected)
    assert simulate_strategy(given, found).seconds == pytest.approx(expected)


def test_each_stage_takes_what_its_own_device_does():
    on = cluster(("fast", 1, 1.0, 10.0), ("slow", 1, 1.0, 10.0))
    given = model(on=on, speeds={"fast": 2.0, "slow": 1.0}, layers=6)
    assert simulate_strategy(given, Strategy3D(1, 1, 8, (4, 2))).seconds == pytest.approx(
        8 * (6 + 6)
    )
    assert simulate_strategy(given, Strategy3D(1, 1, 8, (2, 4))).seconds == pytest.approx(
        8 * (3 + 12)
    )


def test_a_pipeline_is_as_slow_as_its_slowest_copy():
    """Equation 2, of copies of one stage on unlike devices."""
    on = cluster(("fast", 1, 1.0, 10.0), ("slow", 1, 1.0, 10.0))
    given = model(on=on, speeds={"fast": 2.0, "slow": 1.0})
    assert analytic_seconds(given, Strategy3D(2, 1, 1, (4,))) == pytest.approx(4 * 4 * 3)


def test_memory_is_that_of_the_microbatches_in_flight():
    given = model(fixed_bytes=100.0, kept_bytes=7.0)
    found = Strategy3D(1, 2, 2, (1, 3))
    expected = (1 * (100 + 2 * 2 * 7) / 2, 3 * (100 + 1 * 2 * 7) / 2)
    assert stored_bytes(given, found) == pytest.approx(expected)
    peaks = [peak.num_bytes for peak in simulate_strategy(given, found).peaks]
    assert peaks == pytest.approx(expected)
    assert fits(given, found)
    small = StrategyProblem(given.table, cluster(("fast", 4, 100.0, 1.0), memory_bytes=160.0), 8)
    assert not fits(small, found)
    assert fits(small, Strategy3D(1, 2, 2, (2, 2)))


def test_what_does_not_fit_together_is_named():
    with pytest.raises(PlanError, match="have 3 layers, the model has 4"):
        analytic_seconds(model(), Strategy3D(1, 1, 1, (1, 2)))
    with pytest.raises(PlanError, match="has rank 7, but cluster 'small' has 4 devices"):
        analytic_seconds(model(), Strategy3D(1, 1, 1, (4,), ranks=(7,)))
    with pytest.raises(PlanError, match="batch of 8 does not divide into 3 copies"):
        analytic_seconds(model(), Strategy3D(3, 1, 1, (4,)))
    with pytest.raises(PlanError, match="'block' have no time on 'other' with tensor"):
        analytic_seconds(model(on=cluster(("other", 1, 1.0, 1.0))), Strategy3D(1, 1, 1, (4,)))
    with pytest.raises(PlanError, match="need 4 different ranks; the placement has 3"):
        Strategy3D(4, 1, 1, (4,), ranks=(0, 1, 2, 2))
    with pytest.raises(PlanError, match="each has one at least"):
        Strategy3D(1, 1, 1, (4, 0))
    with pytest.raises(PlanError, match="without layers"):
        LayerCostTable({}, ())
    with pytest.raises(PlanError, match="of kind 'head'; there are 'block'"):
        LayerCostTable(equal_layers(1, ALIKE).kinds, ("head",))


def test_computing_again_repeats_the_forward_pass_and_its_sums():
    """Of each microbatch one layer's worth, a layer's input is kept on every tensor rank."""
    given = model(reduced_bytes=50.0, fixed_bytes=100.0, kept_bytes=40.0, input_bytes=3.0)
    plain = Strategy3D(1, 2, 2, (2, 2))
    again = dataclasses.replace(plain, memory=MemoryOptions(recompute=True))
    forward, summing = 2 * 2 * 1 / 2, 2 * 2 * (2 * 1 / 2) * 50 / 100
    own = 3 * forward + 2 * summing
    assert simulate_strategy(given, plain).seconds == pytest.approx((4 + 1) * own)
    assert simulate_strategy(given, again).seconds == pytest.approx(
        (4 + 1) * (own + forward + summing)
    )
    # Equation 1 adds up both links of a ring of two.
    quick = 4 * forward + 2 * 3 * summing
    assert analytic_seconds(given, again) == pytest.approx((4 + 1) * quick)
    # Two layers' weights; two and one microbatches of 2 in flight; of one layer all that it kept.
    expected = (100 + 2 * 2 * 2 * 3 + 2 * 40 / 2, 100 + 1 * 2 * 2 * 3 + 2 * 40 / 2)
    assert stored_bytes(given, again) == pytest.approx(expected)
    peaks = [peak.num_bytes for peak in simulate_strategy(given, again).peaks]
    assert peaks == pytest.approx(expected)


def test_what_cannot_be_computed_again_is_refused():
    again = Strategy3D(1, 1, 1, (2, 2), memory=MemoryOptions(recompute=True))
    with pytest.raises(PlanError, match="has no input_bytes"):
        stored_bytes(model(), again)


def test_sharded_slots_are_stored_once_and_weights_gathered():
    """Sums of 80 bytes reach a part of the ranks each, then 40 bytes of weights reach all."""
    given = model(
        gradient_bytes=20.0, fixed_bytes=100.0, slot_bytes=60.0, weight_bytes=10.0, kept_bytes=1.0
    )
    found = Strategy3D(4, 1, 1, (4,), memory=MemoryOptions(shard_slots=True))
    assert stored_bytes(given, found) == pytest.approx([4 * (40 + 60 / 4) + 4])
    ring = (80 + 40) / 4 * (2 / 100 + 2 / 10)
    assert analytic_seconds(given, found) == pytest.approx(2 * 4 * 3 + ring)
    assert simulate_strategy(given, found).seconds == pytest.approx(
        2 * 4 * 3 + 3 / 4 * (80 + 40) / 10
    )


def test_offloaded_slots_come_to_the_device_and_go_back():
    given = model(fixed_bytes=100.0, slot_bytes=60.0, kept_bytes=1.0)
    (node,) = given.cluster.nodes[:1]
    device = dataclasses.replace(node.device, host_bandwidth=30.0, host_latency_s=0.25)
    nodes = tuple(dataclasses.replace(node, device=device) for node in given.cluster.nodes)
    given = dataclasses.replace(given, cluster=dataclasses.replace(given.cluster, nodes=nodes))
    plain = Strategy3D(4, 1, 1, (4,))
    for shard, copies in ((False, 1), (True, 4)):
        away = dataclasses.replace(plain, memory=MemoryOptions(False, shard, True))
        stays = dataclasses.replace(plain, memory=MemoryOptions(False, shard))
        slots = 60 / copies  # of a layer; those of one are on the device as it is updated
        assert stored_bytes(given, away) == pytest.approx([4 * 40 + 4 + slots - 1])
        more = 4 * 2 * (slots / 30 + 0.25)
        for seconds in (analytic_seconds, lambda *x: simulate_strategy(*x).seconds):
            assert seconds(given, away) == pytest.approx(seconds(given, stays) + more)


def test_stages_store_less_each_in_its_own_way():
    given = model(fixed_bytes=100.0, slot_bytes=60.0, kept_bytes=40.0, input_bytes=3.0)
    again, away = MemoryOptions(recompute=True), MemoryOptions(offload_slots=True)
    mixed = Strategy3D(1, 2, 2, (2, 2), memory=(again, away))
    assert str(mixed).endswith("layers 2+2, recomputed in stage 0, slots offloaded in stage 1")
    each = [stored_bytes(given, dataclasses.replace(mixed, memory=one)) for one in (again, away)]
    assert stored_bytes(given, mixed) == (each[0][0], each[1][1])
    assert mixed.recompute == (0,)
    assert dataclasses.replace(mixed, memory=(again, again)).memory == again
    with pytest.raises(PlanError, match="2 stages cannot have 3 memory options"):
        dataclasses.replace(mixed, memory=(again,) * 3)


def test_virtual_stages_have_the_closed_form_and_a_smaller_bubble():
    """(M v + p - 1) (F + B), of a quarter of the layers a stage: Narayanan et al. 2021, §2.2."""
    given = model(layers=8)
    found = Strategy3D(1, 1, 1, (1,) * 8, virtual=2)
    assert (found.stages, found.actors, found.size) == (8, 4, 4)
    assert found.stage(5) == (1,) and list(found.stages_of(1)) == [1, 5]
    expected = (8 * 2 + 4 - 1) * 3
    assert analytic_seconds(given, found) == pytest.approx(expected)
    assert simulate_strategy(given, found).seconds == pytest.approx(expected)
    assert expected < analytic_seconds(given, Strategy3D(1, 1, 1, (2,) * 4))


def test_virtual_stages_send_between_the_last_actor_and_the_first():
    given = model(layers=4, sent_bytes=10.0, batch=2)
    found = Strategy3D(1, 1, 1, (1,) * 4, ranks=(0, 2), virtual=2)
    sent = [edge for edge in simulate_strategy(given, found).transfers if edge.edge.num_bytes]
    assert len(sent) == 2 * 2 * 3
    # Of the three ways there and back, as many as actors less one are on the way with nothing else.
    assert analytic_seconds(given, found) == pytest.approx((2 * 2 + 1) * 3 + 2 * 10 / 10)


@pytest.mark.parametrize("microbatches", [4, 6, 16])
def test_memory_of_virtual_stages_is_that_of_the_schedule(microbatches):
    given = model(batch=microbatches, layers=8, fixed_bytes=100.0, kept_bytes=7.0)
    found = Strategy3D(1, 1, 1, (1,) * 8, virtual=2)
    peaks = [peak.num_bytes for peak in simulate_strategy(given, found).peaks]
    assert peaks == pytest.approx(stored_bytes(given, found))


def test_copies_of_unequal_speed_run_unequal_shares():
    """A device that is three times as fast runs three times as many microbatches."""
    on = cluster(("fast", 1, 1.0, 1e9), ("slow", 1, 1.0, 1e9))
    given = model(on=on, speeds={"fast": 3.0, "slow": 1.0}, gradient_bytes=1e9)
    even = Strategy3D(2, 1, 1, (4,))
    found = balance_microbatches(given, even)
    assert found.shares == (6, 2)
    ring = 2 * 4 / 2 * (1 + 1)
    assert analytic_seconds(given, even) == pytest.approx(4 * 4 * 3 + ring)
    assert analytic_seconds(given, found) == pytest.approx(2 * 4 * 3 + ring)
    assert simulate_strategy(given, found).seconds == pytest.approx(2 * 4 * 3 + 2 * 1 / 2 * 4)


def test_shares_are_the_best_of_all():
    on = cluster(("fast", 1, 1.0, 10.0), ("mean", 1, 1.0, 10.0), ("slow", 1, 1.0, 10.0))
    speeds = {"fast": 3.0, "mean": 1.7, "slow": 0.6}
    for batch in (3, 6, 9, 24):
        given = model(batch=batch, on=on, speeds=speeds, layers=2)
        even = Strategy3D(3, 1, 1, (2,))
        of_all = [
            dataclasses.replace(even, shares=(a, b, batch - a - b))
            for a in range(1, batch - 1)
            for b in range(1, batch - a)
        ]
        best = min(analytic_seconds(given, one) for one in of_all)
        assert analytic_seconds(given, balance_microbatches(given, even)) == pytest.approx(best)


def test_what_is_no_strategy_is_refused():
    with pytest.raises(PlanError, match="3 stages are not 2 for each"):
        Strategy3D(1, 1, 1, (1, 1, 1), virtual=2)
    with pytest.raises(PlanError, match=r"2 copies cannot run \(1, 2, 3\) microbatches"):
        Strategy3D(2, 1, 1, (1,), shares=(1, 2, 3))
    with pytest.raises(PlanError, match="batch of 8 is not 3 microbatches of 1"):
        analytic_seconds(model(), Strategy3D(2, 1, 1, (4,), shares=(1, 2)))
    with pytest.raises(ArgumentError, match="slot_bytes is 2.0; it must be 1 at most"):
        model(fixed_bytes=1.0, slot_bytes=2.0)


def test_a_strategy_says_what_it_is():
    assert str(Strategy3D(1, 1, 1, (2, 2))) == (
        "2 stages x 1 data x 1 tensor, microbatches of 1, layers 2+2"
    )
    found = Strategy3D(
        2, 1, 1, (1,) * 4, virtual=2, shares=(6, 2), memory=MemoryOptions(True, True)
    )
    assert str(found) == (
        "2 stages of 2 parts x 2 data x 1 tensor, microbatches of 1, 6+2 of them, layers 1+1+1+1, "
        "recomputed, slots sharded"
    )
