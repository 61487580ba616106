"""Each family's order, in closed forms: length, what is in flight, who holds which stage."""

import itertools

import pytest

from tests.pipeline.greedy import ends, most_kept
from tfpar.pipeline.generators import FAMILIES, generate, schedule_on, schedules_on
from tfpar.pipeline.graph import check_schedule
from tfpar.spec import ArgumentError, ScheduleError

SECONDS = {"F": 1, "B": 2, "I": 1, "W": 1}
SIZES = [*itertools.product(range(1, 7), [1, 2, 3, 5, 6, 8, 13, 16])]


def makespan(schedule):
    found = ends(schedule.orders, schedule.num_stages, lambda task: SECONDS[task.kind])
    return max(found.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_schedules_of_any_size_can_run(name):
    for actors, microbatches in SIZES:
        schedule = generate(name, actors, microbatches)
        check_schedule(schedule)
        assert (schedule.num_actors, schedule.num_microbatches) == (actors, microbatches)
        assert schedule.num_stages == actors * FAMILIES[name].virtual_stages
        backward = {"I", "W"} if name.startswith("zb") else {"B"}
        assert {t.kind for order in schedule.orders for t in order} == {"F", *backward}


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b(name):
    for p, m in SIZES:
        assert makespan(generate(name, p, m)) == 3 * m + 3 * (p - 1)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_the_bubble_of_interleaved_1f1b_for_any_number_of_microbatches(v):
    for p, m in SIZES:
        if m >= p:  # fewer cannot fill the pipeline
            schedule = generate("interleaved", p, m, v)
            check_schedule(schedule)
            assert makespan(schedule) == 3 * m * v + 3 * (p - 1)


def test_the_bubble_of_zb_h1_is_a_third():
    for p, m in SIZES:
        if m >= p:
            assert makespan(generate("zb-h1", p, m)) == 3 * m + (p - 1)


def test_zb_v_has_next_to_no_bubble():
    for p, m in SIZES:
        if m >= 2 * p:
            schedule = generate("zb-v", p, m)
            assert makespan(schedule) == 6 * m + (p - 1)
            found = ends(schedule.orders, 2 * p)
            for actor, order in enumerate(schedule.orders):
                waits = found[order[-1]] - actor - len(order)  # after its first task
                assert waits in (0, 1)


def test_what_is_in_flight():
    for p, m in SIZES:
        kept = {name: [most_kept(o) for o in generate(name, p, m).orders] for name in FAMILIES}
        assert kept["gpipe"] == [m] * p
        assert kept["1f1b"] == [min(m, p - a) for a in range(p)]
        assert max(kept["zb-h1"]) == min(m, p)
        assert max(kept["zb-v"]) <= 2 * p
        if m % p == 0 and m > p:  # Megatron's
            warm_up = [(2 - 1) * p + 2 * (p - a - 1) for a in range(p)]
            assert kept["interleaved"] == [w + 1 for w in warm_up]


def test_orders_that_are_published():
    assert str(generate("1f1b", 2, 4)) == (
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"
    )
    assert str(generate("gpipe", 2, 2, 2)) == (
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1"
    )
    # Figure 4 of Narayanan et al. 2021, its first device: 4 devices, 2 stages each, 8 microbatches.
    first = generate("interleaved", 4, 8, 2).orders[0]
    assert ",".join(map(str, first[:16])) == (
        "0F0,0F1,0F2,0F3,4F0,4F1,4F2,4F3,0F4,0F5,0F6,4B0,0F7,4B1,4F4,4B2"
    )
    # Figure 3 of Qi et al. 2024, the last device waits with no weight gradients at first.
    last = generate("zb-h1", 4, 8).orders[3]
    assert ",".join(map(str, last[:9])) == "3F0,3I0,3F1,3I1,3F2,3I2,3F3,3I3,3W0"
    first = generate("zb-h1", 4, 8).orders[0]
    assert ",".join(map(str, first[:9])) == "0F0,0F1,0F2,0F3,0I0,0W0,0F4,0I1,0W1"


def test_virtual_stages_lie_on_a_ring_or_a_v():
    assert generate("interleaved", 2, 4, 3).actors == (0, 1, 0, 1, 0, 1)
    assert generate("zb-v", 3, 4).actors == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    "given, message",
    [
        (("1f2b", 2, 4), "schedule is '1f2b'; it must be one of 'gpipe', '1f1b'"),
        (("1f1b", 0, 4), "actors is 0"),
        (("1f1b", 2, 0), "microbatches is 0"),
        (("1f1b", 2, 4, 2), "virtual_stages is 2; it must be 1 with schedule '1f1b'"),
        (("zb-v", 2, 4, 1), "virtual_stages is 1; it must be a whole number, 2 or more"),
        (("zb-v", 2, 4, 3), "virtual_stages is 3; it must be 2 with schedule 'zb-v'"),
        (("interleaved", 2, 4, 0), "virtual_stages is 0"),
    ],
)
def test_what_no_family_has_is_refused(given, message):
    with pytest.raises(ArgumentError, match=message):
        generate(*given)


@pytest.mark.parametrize(
    "actors, halves, names",
    [
        ((0, 1), True, ["1f1b", "interleaved", "zb-h1", "gpipe"]),
        ((0, 1), False, ["1f1b", "interleaved", "gpipe"]),
        ((0, 1, 0, 1), True, ["interleaved", "gpipe"]),
        ((0, 1, 1, 0), True, ["zb-v"]),
    ],
)
def test_schedules_on_sets_of_ranks(actors, halves, names):
    found = dict(schedules_on(actors, 4, halves))
    assert list(found) == names
    assert all(schedule.actors == actors for schedule in found.values())
    assert schedule_on(actors, 4, halves) == found[names[0]]


def test_no_schedule_by_name_runs_stages_so():
    with pytest.raises(ScheduleError, match=r"no schedule by name for stages on actors \[0, 1, 1"):
        schedule_on((0, 1, 1, 0), 4, halves=False)
