"""What waits for what, and schedules that wait for themselves."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfpar as tap
from tests.cases import at_night
from tests.pipeline.greedy import ends
from tfpar.pipeline.generators import FAMILIES, generate
from tfpar.pipeline.graph import check_schedule, first_cycle, task_graph
from tfpar.pipeline.stage_graph import Join, StageGraph, StageLink, Tie
from tfpar.pipeline.tasks import Task
from tfpar.spec import ArgumentError, ScheduleError

# --- mutated schedules ----------------------------------------------------------------------


def refused(orders):
    try:
        check_schedule(tap.Schedule(orders))
    except ScheduleError as error:
        assert str(error)
        return True
    return False


@pytest.fixture(params=[(2, 4), *at_night((3, 6))], ids=str)
def families(request):
    """A schedule of one task, and one of as many actors and microbatches, of each name."""
    sizes = ((1, 1), request.param)
    return [generate(name, *size) for name in FAMILIES for size in sizes]


def with_order(schedule, actor, order):
    orders = list(schedule.orders)
    orders[actor] = tuple(order)
    return orders


def every_task(schedule):
    for actor, order in enumerate(schedule.orders):
        for at, task in enumerate(order):
            yield actor, at, task


def test_a_task_that_is_missing(families):
    for schedule in families:
        for actor, at, _ in every_task(schedule):
            order = list(schedule.orders[actor])
            del order[at]
            assert refused(with_order(schedule, actor, order))


def test_a_task_that_is_there_twice(families):
    for schedule in families:
        for _, at, task in every_task(schedule):
            for other in range(schedule.num_actors):
                order = list(schedule.orders[other])
                order.insert(at, task)
                assert refused(with_order(schedule, other, order))


def test_a_task_with_another_number_or_kind(families):
    for schedule in families:
        stages, micros = schedule.num_stages, schedule.num_microbatches
        for actor, at, task in every_task(schedule):
            others = [Task(task.kind, task.stage, micro) for micro in range(micros + 1)]
            others += [Task(task.kind, stage, task.micro) for stage in range(stages + 1)]
            others += [Task(kind, task.stage, task.micro) for kind in "FBIWUJ"]
            for other in others:
                if other != task:
                    order = list(schedule.orders[actor])
                    order[at] = other
                    assert refused(with_order(schedule, actor, order))


def test_two_tasks_in_each_others_places(families):
    """All pairs: refused if and only if the schedule, run by the book, never ends."""
    found = {True: 0, False: 0}
    for schedule in families:
        for actor, order in enumerate(schedule.orders):
            for i in range(len(order)):
                for j in range(i):
                    swapped = list(order)
                    swapped[i], swapped[j] = swapped[j], swapped[i]
                    orders = with_order(schedule, actor, swapped)
                    stuck = ends(orders, schedule.num_stages) is None
                    assert refused(orders) == stuck
                    found[stuck] += 1
    assert min(found.values()) > 100


@given(st.integers(0, 10**9), st.sampled_from(sorted(FAMILIES)))
@settings(deadline=None)
def test_shuffled_orders(seed, name):
    schedule = generate(name, 2, 3)
    orders = [list(order) for order in schedule.orders]
    chosen = random.Random(seed)
    for order in orders:
        for _ in range(chosen.randrange(4)):
            i = chosen.randrange(len(order) - 1)
            order[i], order[i + 1] = order[i + 1], order[i]
    assert refused(orders) == (ends(orders, schedule.num_stages) is None)


def test_a_stage_on_another_actor(families):
    for schedule in families:
        if schedule.num_actors > 1:
            for actor, at, task in every_task(schedule):
                orders = [list(order) for order in schedule.orders]
                orders[(actor + 1) % len(orders)].insert(0, orders[actor].pop(at))
                assert refused(orders), task


def test_the_error_shows_the_cycle():
    schedule = tap.Schedule.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    message = (
        "The schedule can never end, its tasks wait for each other: 0B0 needs 1B0 (actor 1), runs "
        "after 1F1 (actor 1), needs 0F1 (actor 0), runs after 0B0. Move one of them."
    )
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check_schedule(schedule)


def test_numbers_other_than_asked():
    schedule = generate("1f1b", 2, 4)
    check_schedule(schedule, StageGraph.chain(2))
    with pytest.raises(ScheduleError, match="has 2 stages, but the model is cut in 3"):
        check_schedule(schedule, StageGraph.chain(3))


@given(st.lists(st.sets(st.integers(0, 7)), min_size=8, max_size=8))
@settings(deadline=None)
def test_cycles_are_cycles(needs):
    cycle = first_cycle(needs)
    for one, other in zip(cycle, [*cycle[1:], *cycle[:1]], strict=True):
        assert other in needs[one]
    assert len(set(cycle)) == len(cycle)
    reach = [set(n) for n in needs]
    for middle in range(8):  # Warshall
        for one in range(8):
            if middle in reach[one]:
                reach[one] |= reach[middle]
    assert bool(cycle) == any(at in reach[at] for at in range(8))


# --- graphs ---------------------------------------------------------------------------------


def edges(graph, carries):
    return {
        (str(e.producer), str(e.consumer), e.num_bytes) for e in graph.edges if e.carries == carries
    }


def test_edges_of_a_chain():
    schedule = tap.Schedule.parse("0F0,0F1,0B1,0B0\n1F0,1F1,1I1,1I0,1W0,1W1")
    graph = task_graph(schedule, StageGraph.chain(2, 10.0, 20.0))
    assert edges(graph, "activations") == {("0F0", "1F0", 10.0), ("0F1", "1F1", 10.0)}
    assert edges(graph, "gradients") == {("1I0", "0B0", 20.0), ("1I1", "0B1", 20.0)}
    kept = {(a, b) for a, b, _ in edges(graph, "kept")}
    assert kept == {(f"0F{m}", f"0B{m}") for m in (0, 1)} | {
        pair for m in (0, 1) for pair in ((f"1F{m}", f"1I{m}"), (f"1I{m}", f"1W{m}"))
    }
    # In the order in which each actor makes them.
    sums = {(a, b) for a, b, _ in edges(graph, "sum")}
    assert sums == {("0B1", "0B0"), ("0B0", "0U"), ("1W0", "1W1"), ("1W1", "1U")}
    assert [str(order[-1]) for order in graph.orders] == ["0U", "1U"]
    assert {e.carries for e in graph.transfers()} == {"activations", "gradients"}


def test_updates_of_virtual_stages_run_last_in_the_order_of_their_gradients():
    graph = task_graph(generate("gpipe", 2, 2, 2))
    assert [*map(str, graph.orders[0][-3:])] == ["0B1", "2U", "0U"]
    assert all(e.num_bytes == 0 for e in graph.edges)


def test_updates_may_wait_for_all_gradients():
    graph = task_graph(generate("1f1b", 2, 2), synchronized=True)
    assert edges(graph, "sum") >= {("0B1", "0U", 0), ("1B1", "1U", 0)}
    assert edges(graph, "scalars") == {("0B1", "1U", 0), ("1B1", "0U", 0)}
    assert not edges(task_graph(generate("1f1b", 2, 2)), "scalars")


def test_tied_weights():
    """The last stage reads the first one's embedding, and sends its gradient once a step."""
    stages = StageGraph(2, StageGraph.chain(2).links, ties=(Tie(0, 1, 8.0, 7.0),))
    graph = task_graph(generate("gpipe", 2, 2), stages)
    assert ("1B1", "0U", 7.0) in edges(graph, "sum")
    assert [(str(e.producer), str(e.consumer), *e[2:]) for e in graph.given] == [
        ("0U", "1F0", "weights", 8.0)
    ]
    assert {e.carries for e in graph.transfers()} == {"activations", "gradients", "sum", "weights"}
    untrained = StageGraph(2, StageGraph.chain(2).links, ties=(Tie(0, 1, 8.0, None),))
    assert ("1B1", "0U") not in {
        e[:2] for e in edges(task_graph(generate("gpipe", 2, 2), untrained), "sum")
    }


def test_skips_and_towers():
    schedule = generate("1f1b", 3, 4)
    skip = StageGraph(3, (StageLink(0, 1), StageLink(1, 2), StageLink(0, 2, 5.0, None)))
    graph = task_graph(schedule, skip)
    assert ("0F3", "2F3", 5.0) in edges(graph, "activations")
    assert ("2B3", "0B3") not in {(a, b) for a, b, _ in edges(graph, "gradients")}

    # The second tower does not wait for the first: this order only runs without that link.
    towers = StageGraph(3, (StageLink(0, 2), StageLink(1, 2)))
    crossed = tap.Schedule.parse("1F0,0F0,0B0,1B0\n2F0,2B0")
    check_schedule(crossed, towers)
    with pytest.raises(ScheduleError, match="wait for each other"):
        check_schedule(crossed)


def batch_norm(num_stages, at):
    """Statistics of what stage `at` - 1 makes, and of their gradients."""
    joins = (
        Join(at, (("F", at - 1),), (("F", at),)),
        Join(at - 1, (("B", at),), (("B", at - 1),)),
    )
    return StageGraph(num_stages, StageGraph.chain(num_stages).links, joins)


def test_joins_hold_up_all_microbatches():
    graph = task_graph(generate("gpipe", 2, 2), batch_norm(2, 1))
    assert [*map(str, graph.orders[0])] == "0F0 0F1 0J0 0B0 0B1 0U".split()
    assert [*map(str, graph.orders[1])] == "1J0 1F0 1F1 1B0 1B1 1U".split()
    joined = {(a, b) for a, b, _ in edges(graph, "join")}
    assert joined >= {("0F0", "1J0"), ("0F1", "1J0"), ("1J0", "1F0"), ("1J0", "1F1")}
    assert joined >= {("1B0", "0J0"), ("1B1", "0J0"), ("0J0", "0B0"), ("0J0", "0B1")}
    assert len(joined) == 8
    halves = tap.Schedule.parse("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1F1,1I0,1I1,1W0,1W1")
    assert ("1I1", "0J0", 0) in edges(task_graph(halves, batch_norm(2, 1)), "join")


def test_a_join_that_holds_up_no_task_of_its_actor_comes_after_what_it_waits_for():
    join = Join(0, (("F", 0),), (("F", 1),))
    graph = task_graph(generate("gpipe", 2, 2), StageGraph(2, StageGraph.chain(2).links, (join,)))
    assert [*map(str, graph.orders[0])] == "0F0 0F1 0J0 0B0 0B1 0U".split()


def test_a_join_that_waits_for_its_own_actor_alone_comes_after_that():
    """Stage 1, which lies elsewhere, and stage 2 wait for it, long before stage 0 does again."""
    join = Join(0, (("F", 0),), (("F", 1), ("B", 0)))
    schedule = tap.Schedule.parse("0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,1B0,1B1")
    graph = task_graph(schedule, StageGraph(3, StageGraph.chain(3).links, (join,)))
    order = "0F0 0F1 0J0 2F0 2F1 2B0 2B1 0B0 0B1 2U 0U"
    assert [*map(str, graph.orders[0])] == order.split()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zb-v"])
def test_schedules_that_go_on_with_a_microbatch_cannot_have_joins(name):
    schedule = generate(name, 2, 6)
    check_schedule(generate("gpipe", 2, 6), batch_norm(2, 1))
    with pytest.raises(ScheduleError, match="wait for each other: .*J0"):
        check_schedule(schedule, batch_norm(schedule.num_stages, 1))


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: StageLink(1, 1), ScheduleError, "reads of stage 1; stages are numbered"),
        (lambda: StageLink(-1, 1), ArgumentError, "source is -1"),
        (lambda: StageLink(0, 1, -1.0), ArgumentError, "forward_bytes is -1"),
        (lambda: StageLink(0, 1, 0, float("nan")), ArgumentError, "backward_bytes is nan"),
        (lambda: StageGraph(0, ()), ArgumentError, "num_stages is 0"),
        (lambda: StageGraph(1, (StageLink(0, 1),)), ScheduleError, "there are 1 stages"),
        (
            lambda: StageGraph(2, (StageLink(0, 1), StageLink(0, 1, 2.0))),
            ScheduleError,
            "Two links lead from stage 0 to stage 1",
        ),
        (lambda: Join(0, (("W", 0),), (("F", 0),)), ScheduleError, "not W"),
        (lambda: Join(0, (), (("F", 0),)), ScheduleError, "nothing before or after"),
        (
            lambda: StageGraph(1, (), (Join(0, (("F", 0),), (("F", 3),)),)),
            ScheduleError,
            "A join names stage 3, but there are 1 stages",
        ),
        (lambda: Tie(1, 1), ScheduleError, "Stage 1 reads its own weight"),
        (lambda: Tie(0, 1, -1), ArgumentError, "num_bytes is -1"),
        (lambda: Tie(0, 1, 1, -1), ArgumentError, "gradient_bytes is -1"),
        (lambda: StageGraph(1, (), ties=(Tie(1, 0),)), ScheduleError, "A tie names stage 1"),
    ],
)
def test_what_is_no_graph_of_stages_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
