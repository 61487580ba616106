"""Pipelines on paper: closed forms, longest paths, links, memory at every event."""

import dataclasses
import itertools
import random
from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfpar as tap
from tests.pipeline.greedy import ends, most_kept
from tfpar.cluster import Cluster, Device, Level
from tfpar.cost.simulator import StageNetwork, StageProfile, StageRoute, simulate
from tfpar.pipeline import FAMILIES, Join, StageGraph, StageLink, Task, Tie, generate, task_graph
from tfpar.spec import ArgumentError

EQUAL = StageProfile({"F": 1, "B": 2, "I": 1, "W": 1})
SIZES = [*itertools.product([1, 2, 3, 4, 6], [1, 2, 4, 7, 12])]


def run(schedule, costs=EQUAL, stages=None, network=None, **asked):
    costs = [costs] * schedule.num_stages if isinstance(costs, StageProfile) else costs
    return simulate(task_graph(schedule, stages, **asked), costs, network)


# --- closed forms ---------------------------------------------------------------------------


def test_bubbles_of_equal_stages():
    for p, m in SIZES:
        assert run(generate("gpipe", p, m)).bubbles == pytest.approx([(p - 1) / m] * p)
        plain = run(generate("1f1b", p, m)).bubble
        assert plain == pytest.approx((p - 1) / m)
        if m >= p:
            assert run(generate("zb-h1", p, m)).bubble == pytest.approx(plain / 3)
            for v in (2, 3):
                assert run(generate("interleaved", p, m, v)).bubble == pytest.approx(plain / v)


def test_an_actor_without_work_does_not_wait():
    costs = [EQUAL, StageProfile({"F": 0, "B": 0})]
    found = run(generate("1f1b", 2, 3), costs)
    assert found.bubbles == (0, 0) and found.bubble == pytest.approx(1)


def test_microbatches_in_flight():
    for p, m in SIZES:
        found = run(generate("1f1b", p, m)).in_flight
        assert found == tuple(min(m, p - s) for s in range(p))
        assert run(generate("gpipe", p, m)).in_flight == (m,) * p
        halved = generate("zb-h1", p, m)
        assert run(halved).in_flight == tuple(map(most_kept, halved.orders))


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_of_equal_stages(name):
    """What is kept is what the order says, on top of what is always there."""
    schedule = generate(name, 3, 8)
    cost = dataclasses.replace(EQUAL, fixed_bytes=1000, kept_bytes=10)
    found = run(schedule, cost)
    for actor, peak in enumerate(found.peaks):
        fixed = 1000 * len(schedule.stages_of(actor))
        assert peak.num_bytes == fixed + 10 * most_kept(schedule.orders[actor])
        assert peak.task.kind == "F"
        assert found.memory[actor][0][1] == fixed + 10 * (actor == 0)  # its first task runs
        assert found.memory[actor][-1][1] == fixed


def test_1f1b_and_accumulation_do_not_grow_with_microbatches():
    cost = dataclasses.replace(EQUAL, kept_bytes=10)
    peaks = {m: [p.num_bytes for p in run(generate("1f1b", 4, m), cost).peaks] for m in (4, 8, 16)}
    assert peaks[4] == peaks[8] == peaks[16] == [40, 30, 20, 10]
    assert run(generate("1f1b", 1, 16), cost).peaks[0].num_bytes == 10
    assert run(generate("gpipe", 4, 16), cost).peaks[3].num_bytes == 160


# --- longest paths --------------------------------------------------------------------------

SECONDS = st.integers(0, 50).map(lambda n: Fraction(n, 7))


@st.composite
def timed(draw):
    name = draw(st.sampled_from(sorted(FAMILIES)))
    schedule = generate(name, draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    costs = [
        StageProfile({kind: draw(SECONDS) for kind in "FBIW"}) for _ in range(schedule.num_stages)
    ]
    return schedule, costs


@given(timed(), SECONDS)
@settings(deadline=None)
def test_chains_take_as_long_as_their_longest_path(drawn, latency_s):
    schedule, costs = drawn
    pairs = [*itertools.pairwise(range(schedule.num_stages))]
    routes = {edge: (StageRoute((), latency_s),) for a, b in pairs for edge in [(a, b), (b, a)]}
    found = run(schedule, costs, network=StageNetwork({}, routes))
    expected = ends(
        schedule.orders,
        schedule.num_stages,
        lambda task: costs[task.stage].seconds[task.kind],
        lambda before, after: latency_s,
    )
    assert {ran.task: ran.end for ran in found.events if ran.task.kind != "U"} == expected
    assert found.seconds == max(expected.values())
    for ran in found.events:
        assert ran.end - ran.start == costs[ran.task.stage].seconds.get(ran.task.kind, 0)


@given(timed(), st.data())
@settings(max_examples=60, deadline=None)
def test_any_graph_of_stages_takes_as_long_as_its_longest_path(drawn, data):
    """Skips, towers, links without gradients, updates, reductions: as networkx finds it."""
    schedule, costs = drawn
    pairs = [*itertools.combinations(range(schedule.num_stages), 2)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    links = tuple(StageLink(a, b, 1, data.draw(st.sampled_from([1, None]))) for a, b in chosen)
    costs = [
        dataclasses.replace(
            cost, seconds={**cost.seconds, "U": data.draw(SECONDS)}, reduction_s=data.draw(SECONDS)
        )
        for cost in costs
    ]
    synchronized = data.draw(st.booleans())
    latency_s = data.draw(SECONDS)
    stages = StageGraph(schedule.num_stages, links)
    routes = {(a, b): (StageRoute((), latency_s),) for a in range(8) for b in range(8)}
    graph = task_graph(schedule, stages, synchronized)
    ahead = data.draw(st.sampled_from([None, 1, 2, 5]))
    found = simulate(graph, costs, StageNetwork({}, routes), ahead)

    paths = nx.DiGraph()  # from the start of a node to the start of the next
    reductions = {}
    for actor, order in enumerate(graph.orders):
        previous = None
        for task in order:
            seconds = costs[task.stage].seconds[task.kind]
            paths.add_edge(task, ("end", task), weight=seconds)
            if previous:
                paths.add_edge(("end", previous), task, weight=0)
            previous = task
        lasts = {t.stage: t for t in order if t.kind in "BW"}
        for stage in sorted(lasts, key=lambda s: order.index(lasts[s])):
            paths.add_edge(("end", lasts[stage]), ("sum", stage), weight=0)
            paths.add_edge(("sum", stage), ("summed", stage), weight=costs[stage].reduction_s)
            if actor in reductions:
                paths.add_edge(("summed", reductions[actor]), ("sum", stage), weight=0)
            reductions[actor] = stage
    for edge in graph.edges:
        if edge.consumer.kind == "U":
            paths.add_edge(("summed", edge.producer.stage), edge.consumer, weight=0)
        else:
            actor, place = graph.places[edge.consumer]
            apart = graph.places[edge.producer][0] != actor
            paths.add_edge(("end", edge.producer), ("sent", edge), weight=0)
            paths.add_edge(("sent", edge), edge.consumer, weight=latency_s if apart else 0)
            if apart and ahead and place > ahead:
                before = graph.orders[actor][place - ahead - 1]
                paths.add_edge(("end", before), ("sent", edge), weight=0)
    assert found.seconds == nx.dag_longest_path_length(paths)


# --- links ----------------------------------------------------------------------------------

TWO = tap.Schedule.parse("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1")


def test_a_transfer_runs_beside_tasks():
    network = StageNetwork({"wire": 5}, {(0, 1): (StageRoute(("wire",), 1),), (1, 0): ()})
    found = run(TWO, stages=StageGraph.chain(2, 20, 20), network=network)
    # 0F0 ends at 1 and its 20 bytes are there at 1 + 1 + 4, those of 0F1 share the link from 3 on:
    # 15 and 20 left at 2.5 bytes/s each, so the first is through at 9.
    sent = {str(s.edge.producer): (s.start, s.end) for s in found.transfers}
    assert sent["0F0"] == (1, 9) and sent["0F1"] == (2, 10)
    assert sent["1B0"][0] == sent["1B0"][1]  # all ranks keep their part
    assert [str(ran.task) for ran in found.events][:3] == ["0F0", "0F1", "1F0"]
    assert found.seconds == 9 + 1 + 1 + 2 + 2 + 2  # F, F, B, B, and 0B1


@pytest.mark.parametrize(
    ("overlap", "second_ends"),
    # 0F0 ends at 4, and its 4 bytes are on their way until 9: of 0F1, what part of these five
    # seconds the overlap says is done by then. What 0F1 sends slows 1F0.
    [(1.0, 8), (Fraction(1, 2), Fraction(21, 2)), (0.0, 13)],
)
def test_tasks_go_on_slower_while_their_actor_sends(overlap, second_ends):
    network = StageNetwork({"wire": 1}, {(0, 1): (StageRoute(("wire",), 1),), (1, 0): ()}, overlap)
    found = run(TWO, StageProfile({"F": 4, "B": 0}), StageGraph.chain(2, 4, 0), network)
    ran = {str(r.task): (r.start, r.end) for r in found.events}
    assert ran["0F0"] == (0, 4) and ran["0F1"] == (4, second_ends)
    # The receiver waits for the first, and computes it while the second is on its way.
    assert ran["1F0"][0] == 9
    second = next(sent for sent in found.transfers if str(sent.edge.producer) == "0F1")
    assert (second.start, second.end) == (second_ends, second_ends + 1 + 4)
    beside = max(0, min(ran["1F0"][1], second.end) - max(9, second_ends))
    assert ran["1F0"][1] - 9 == pytest.approx(4 + beside * (1 - overlap))
    assert found.busy_s == tuple(
        sum(r.end - r.start for r in found.events if r.actor == a) for a in (0, 1)
    )


def test_all_work_is_done_in_order_at_no_less_than_the_slower_pace():
    """On random pipelines."""
    rng = random.Random(0)
    for _ in range(40):
        stages, micro = rng.randint(2, 4), rng.randint(1, 5)
        schedule = generate(rng.choice(("gpipe", "1f1b", "zb-h1")), stages, micro)
        costs = [
            StageProfile({k: rng.randint(0, 4) for k in "FBIWU"}, reduction_s=rng.randint(0, 5))
            for _ in range(stages)
        ]
        routes = {
            pair: (StageRoute((f"{pair}",), rng.randint(0, 2)),)
            for s in range(stages - 1)
            for pair in ((s, s + 1), (s + 1, s))
        }
        wires = {f"{pair}": rng.randint(1, 4) for pair in routes}
        graph = StageGraph.chain(stages, rng.randint(0, 8), rng.randint(0, 8))
        for overlap in (1.0, 0.5, 0.0):
            found = run(schedule, costs, graph, StageNetwork(wires, routes, overlap))
            for ran in found.events:
                least, took = costs[ran.task.stage].seconds[ran.task.kind], ran.end - ran.start
                assert took >= least - 1e-9
                assert not overlap or took <= least / overlap + 1e-9
            for order in schedule.orders:
                own = [r for r in found.events if r.task in order]
                assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own))


def test_pipelines_side_by_side_share_an_uplink():
    """Two ranks a stage, on two nodes: both transfers leave by the node's uplink."""
    cluster = Cluster.regular(
        "two", Device({"float32": 1e9}, 1e9, 1e9), [Level(2, 10.0, 0.5), Level(2, 100.0, 0.1)]
    )
    sent = {(0, 1): [(0, 2, 0.5), (1, 3, 0.5)], (1, 0): [(2, 0, 0.5), (3, 1, 0.5)]}
    stages = StageGraph.chain(2, 20, 20)
    slow = run(generate("1f1b", 2, 1), stages=stages, network=StageNetwork.of(cluster, sent))
    # 0.5 s and 20 bytes at 10 bytes/s, there and back.
    assert slow.seconds == pytest.approx(1 + 1 + 2 + 2 + 2 * 2.5)
    inside = {(0, 1): [(0, 1, 1.0)], (1, 0): [(1, 0, 1.0)]}
    fast = run(generate("1f1b", 2, 1), stages=stages, network=StageNetwork.of(cluster, inside))
    assert fast.seconds == pytest.approx(1 + 1 + 2 + 2 + 2 * 0.3)
    half = dataclasses.replace(cluster, overlap=0.5)
    assert StageNetwork.of(half, sent).overlap == 0.5
    same = {(0, 1): [(0, 0, 1.0)], (1, 0): [(0, 0, 1.0)]}
    assert (
        run(generate("1f1b", 2, 1), stages=stages, network=StageNetwork.of(cluster, same)).seconds
        == 6
    )


@given(timed(), st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_no_link_carries_more_than_it_can(drawn, forward, back):
    schedule, costs = drawn
    num_stages = schedule.num_stages
    stages = StageGraph.chain(num_stages, Fraction(forward), Fraction(back))
    routes = {
        (a, b): (StageRoute(("both",), Fraction(1, 3)), StageRoute((f"from {a}", "both"), 0, 1))
        for a in range(num_stages)
        for b in range(num_stages)
    }
    bandwidth = {"both": Fraction(5), **{f"from {a}": Fraction(3) for a in range(num_stages)}}
    found = run(schedule, costs, stages, StageNetwork(bandwidth, routes))
    alone = run(schedule, costs, stages)
    assert found.seconds >= alone.seconds
    moved = 2 * sum(sent.edge.num_bytes for sent in found.transfers)  # along both routes
    if moved:
        first = min(sent.start for sent in found.transfers)
        last = max(sent.end for sent in found.transfers)
        assert moved / bandwidth["both"] <= last - first
    ended = {ran.task: ran.end for ran in found.events}
    started = {ran.task: ran.start for ran in found.events}
    for sent in found.transfers:
        assert sent.start == ended[sent.edge.producer]
        assert sent.end <= started[sent.edge.consumer]
        assert sent.end - sent.start >= Fraction(1, 3)
    for actor, order in enumerate(schedule.orders):  # one task at a time, in order
        ran = [ran for ran in found.events if ran.actor == actor]
        assert [r.task for r in ran][: len(order)] == [*order]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(ran))


def test_more_transfers_at_once_than_one_by_one():
    """Links in float seconds: what is left over by rounding does not keep a transfer under way."""
    network = StageNetwork(
        {"wire": 0.3, "other": 0.7},
        {(a, b): (StageRoute(("wire", "other"), 0.1),) for a in range(8) for b in range(8)},
    )
    cost = StageProfile({"F": 0.1, "B": 0.2, "I": 0.1, "W": 0.1})
    for name in FAMILIES:
        schedule = generate(name, 4, 8)
        found = run(schedule, cost, StageGraph.chain(schedule.num_stages, 0.1, 0.1), network)
        assert len(found.events) == sum(map(len, schedule.orders)) + schedule.num_stages


# --- memory ---------------------------------------------------------------------------------


def test_memory_at_every_event():
    schedule = tap.Schedule.parse("0F0,0I0,0W0")
    cost = StageProfile(
        {"F": 1, "I": 2, "W": 3, "U": 1},
        fixed_bytes=100,
        kept_bytes=10,
        kept_for_weights_bytes=4,
        working_bytes={"F": 1, "I": 7, "W": 20, "U": 50},
    )
    found = run(schedule, cost)
    assert found.memory == (((0, 111), (1, 117), (3, 124), (6, 150), (7, 100)),)
    assert found.peaks[0] == (150, 6, Task("U", 0))


def test_gradients_that_w_needs_may_be_more_than_was_kept():
    cost = StageProfile({"F": 1, "I": 1, "W": 1}, kept_bytes=4, kept_for_weights_bytes=10)
    found = run(tap.Schedule.parse("0F0,0I0,0W0"), cost)
    assert found.memory == (((0, 4), (2, 10), (3, 0)),)
    assert found.peaks[0] == (10, 2, Task("I", 0, 0))


def test_what_is_on_its_way_is_held_at_both_ends():
    network = StageNetwork(
        {"wire": 10}, {(0, 1): (StageRoute(("wire",)),), (1, 0): (StageRoute(("wire",)),)}
    )
    found = run(tap.Schedule.parse("0F0,0B0\n1F0,1B0"), EQUAL, StageGraph.chain(2, 20, 40), network)
    # Activations for 2 s from 1 on, read until 4; gradients for 4 s from 6 on, read until 12.
    assert found.memory[0] == ((0, 0), (1, 20), (3, 0), (6, 40), (12, 0))
    assert found.memory[1] == ((0, 0), (1, 20), (4, 0), (6, 40), (10, 0))
    assert found.peaks[1] == (40, 6, Task("B", 1, 0))
    assert found.peaks[0] == (40, 6, Task("B", 0, 0))


def test_a_receiver_may_keep_transfers_waiting():
    """Of three microbatches, the second stage is slow: what is sent ahead piles up there."""
    schedule = generate("gpipe", 2, 3)
    costs = [StageProfile({"F": 1, "B": 2}), StageProfile({"F": 10, "B": 2})]
    network = StageNetwork(
        {"wire": 10}, {(0, 1): (StageRoute(("wire",)),), (1, 0): (StageRoute(("wire",)),)}
    )
    graph = task_graph(schedule, StageGraph.chain(2, 10))
    ahead, later = simulate(graph, costs, network), simulate(graph, costs, network, 1)
    assert ahead.seconds == later.seconds == 1 + 1 + 30 + 3 * 2 + 2
    assert (ahead.peaks[1].num_bytes, later.peaks[1].num_bytes) == (30, 20)
    # 0F2 ends at 3: what it made is held until 1F1 begins at 12, and a second more.
    assert ahead.memory[0] == ((0, 0), (1, 10), (4, 0))
    assert later.memory[0] == ((0, 0), (1, 10), (13, 0))
    assert later.transfers[2][:2] == (12, 13)


def test_of_equal_peaks_the_first_is_named():
    found = run(generate("1f1b", 2, 4), dataclasses.replace(EQUAL, kept_bytes=10))
    assert found.memory[0].count((1, 20)) == 1 and found.memory[0][-2][1] == 10
    assert found.peaks[0] == (20, 1, Task("F", 0, 1))
    assert found.peaks[1] == (10, 1, Task("F", 1, 0))


@given(timed(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_memory_is_what_events_say(drawn, fixed, kept, weights):
    """Counted anew between every two events, from their starts and ends alone."""
    schedule, costs = drawn
    costs = [
        dataclasses.replace(
            cost,
            fixed_bytes=fixed,
            kept_bytes=kept,
            kept_for_weights_bytes=weights,
            working_bytes={"F": 3, "W": 2},
        )
        for cost in costs
    ]
    found = run(schedule, costs)
    times = sorted({t for ran in found.events for t in (ran.start, ran.end)})
    for actor in range(schedule.num_actors):
        peak = fixed * len(schedule.stages_of(actor))
        for one in times[:-1]:
            held = fixed * len(schedule.stages_of(actor))
            done = {r.task: r.end <= one for r in found.events if r.actor == actor}
            begun = {r.task for r in found.events if r.actor == actor and r.start <= one}
            for r in found.events:
                if r.actor == actor and r.start <= one < r.end:
                    held += {"F": 3, "W": 2}.get(r.task.kind, 0)
            for task in begun:
                if task.kind == "F":
                    whole, half, last = (Task(k, task.stage, task.micro) for k in "BIW")
                    if done.get(whole, False) or done.get(last, False):
                        continue
                    held += weights if done.get(half, False) else kept
            at = max(t for t, _ in found.memory[actor] if t <= one)
            assert dict(found.memory[actor])[at] == held
            peak = max(peak, held)
        if all(s for cost in costs for s in cost.seconds.values()):
            assert found.peaks[actor].num_bytes == peak


# --- updates, reductions, joins -------------------------------------------------------------


def test_reductions_run_beside_other_tasks_and_before_updates():
    """The first to be ready is that of the last stage of an actor."""
    cost = StageProfile({"F": 1, "B": 2, "U": 1}, reduction_s=10)
    found = run(generate("gpipe", 1, 1, 2), cost)
    assert found.reductions == ((4, 14, 1), (14, 24, 0))
    updates = [ran for ran in found.events if ran.task.kind == "U"]
    assert updates == [(14, 15, 0, Task("U", 1)), (24, 25, 0, Task("U", 0))]
    assert found.busy_s == (8,) and found.seconds == 25


def test_synchronized_updates_wait_for_all_reductions():
    costs = [StageProfile({"F": 1, "B": 2, "U": 1}, reduction_s=s) for s in (0, 30)]
    free = run(generate("1f1b", 2, 2), costs)
    held = run(generate("1f1b", 2, 2), costs, synchronized=True)
    updates = {
        name: [r.start for r in f.events if r.task.kind == "U"]
        for name, f in (("free", free), ("held", held))
    }
    assert sorted(updates["free"]) == [9, 37]
    assert updates["held"] == [37, 37]


def test_tied_weights_go_there_as_the_step_begins_and_back_after_the_reduction():
    stages = StageGraph(2, StageGraph.chain(2).links, ties=(Tie(0, 1, 30, 30),))
    network = StageNetwork(
        {"wire": 10}, {(0, 1): (StageRoute(("wire",)),), (1, 0): (StageRoute(("wire",), 1),)}
    )
    cost = StageProfile({"F": 1, "B": 2, "U": 1}, fixed_bytes=100, reduction_s=5)
    found = run(tap.Schedule.parse("0F0,0B0\n1F0,1B0"), cost, stages, network)
    starts = {str(ran.task): ran.start for ran in found.events}
    # The value takes 3 s; the backward passes end at 6 (and, 1 s later there, at 9), and the sum of
    # the last stage's gradients at 11: it is there at 11 + 1 + 3, after that of the first at 14.
    assert (starts["1F0"], starts["1U"], starts["0U"]) == (3, 11, 15)
    assert [(str(s.edge.producer), s.start, s.end) for s in found.transfers] == [
        ("0U", 0, 3),
        ("0F0", 1, 1),
        ("1B0", 6, 7),
        ("1B0", 11, 15),
    ]
    # The copy of the weight is always held, its gradient while it is on its way and until U ends.
    assert found.memory[0] == ((0, 100), (11, 130), (16, 100))
    assert found.memory[1] == ((0, 100), (11, 130), (15, 100))


def test_joins_take_their_time_and_hold_up_all_microbatches():
    stages = StageGraph(2, StageGraph.chain(2).links, (Join(1, (("F", 0),), (("F", 1),)),))
    cost = StageProfile({"F": 1, "B": 2, "J": 5})
    found = run(generate("gpipe", 2, 3), cost, stages)
    starts = {str(ran.task): ran.start for ran in found.events}
    assert starts["1J0"] == 3 and starts["1F0"] == 8


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: simulate(task_graph(TWO), [EQUAL]), "There are 1 costs for 2 stages"),
        (
            lambda: run(TWO, StageProfile({"F": 1})),
            "stage 0 has no seconds for B, .* schedule has 0B0",
        ),
        (
            lambda: run(TWO, stages=StageGraph.chain(2, 8), network=StageNetwork({}, {})),
            "0F0 sends 8 bytes to 1F0, but the network has no route from stage 0 to stage 1",
        ),
        (
            lambda: run(TWO, network=StageNetwork({"a": 1}, {(0, 1): (StageRoute(("a", "b")),)})),
            "from stage 0 to stage 1 crosses 'b'",
        ),
        (lambda: simulate(task_graph(TWO), [EQUAL] * 2, None, 0), "receive_ahead is 0"),
        (lambda: StageProfile({"F": -1}), r"seconds\['F'\] is -1"),
        (lambda: StageProfile({}, fixed_bytes=float("nan")), "fixed_bytes is nan"),
        (lambda: StageProfile({}, kept_for_weights_bytes=-1), "kept_for_weights_bytes is -1"),
        (lambda: StageProfile({}, working_bytes={"F": "1"}), r"working_bytes\['F'\] is '1'"),
    ],
)
def test_what_cannot_be_simulated(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()
