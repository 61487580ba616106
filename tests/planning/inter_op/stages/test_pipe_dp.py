"""`pipe_dp`: the best of all ways to cut a chain of layers."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time

import pytest

from tests.cases import amounts
from tfpar.cost import pipeline_seconds
from tfpar.planning.inter_op.stages.pipe_dp import (
    ChainLayer,
    ChainOption,
    StageDevice,
    pipe_dp,
    try_pipe_dp,
)
from tfpar.spec import ArgumentError, MemoryLimitError, PlanError


def cuts(count, num_stages):
    """Counts of layers of each stage, one at least."""
    for ends in itertools.combinations(range(1, count), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *ends, count)))


def priced(layers, places, microbatches, counts, in_flight=None):
    """Equation 4 by the book; infinite where a stage stores too much."""
    times, sent, start = [], 0.0, 0
    for stage, (place, count) in enumerate(zip(places, counts, strict=True)):
        own = layers[start : start + count]
        start += count
        times.append(sum(x.seconds for x in own) / place.speed)
        alive = in_flight[stage] if in_flight else min(microbatches, len(places) - stage)
        if sum(x.fixed_bytes + alive * x.kept_bytes for x in own) > place.memory_bytes:
            return math.inf
        if stage < len(places) - 1:
            sent += own[-1].sent_bytes / place.bandwidth
    return (microbatches - 1) * max(times) + sum(times) + sent


def some(rng, max_layers=8):
    """Layers, places and microbatches; half of them with too little memory for some cuts."""
    count = rng.randint(1, max_layers)
    layers = [
        ChainLayer(rng.randint(0, 9), rng.randint(0, 9), rng.randint(0, 4), rng.randint(0, 3))
        for _ in range(count)
    ]
    tight = rng.random() < 0.5
    places = [
        StageDevice(
            rng.choice([1.0, 1.0, 2.0, 0.5]),
            rng.choice([1.0, 4.0, math.inf]),
            rng.randint(5, 40) if tight else math.inf,
        )
        for _ in range(rng.randint(1, min(count, 4)))
    ]
    return layers, places, rng.choice([1, 2, 4, 16])


@pytest.mark.parametrize("trials", amounts(60, 400))
def test_each_stage_runs_its_layers_in_the_way_that_takes_least_and_fits(trials):
    mixed = 0
    for seed in range(trials):
        rng = random.Random(seed)
        layers, places, microbatches = some(rng, 5)
        layers = [dataclasses.replace(one, kept_bytes=4 * one.kept_bytes) for one in layers]
        options = [ChainOption(layers)]
        for _ in range(rng.randint(1, 2)):
            slower = [
                dataclasses.replace(
                    one,
                    seconds=one.seconds + rng.randint(0, 3),
                    fixed_bytes=one.fixed_bytes * rng.choice([0.5, 1.0]),
                    kept_bytes=one.kept_bytes * rng.choice([0.0, 0.5]),
                )
                for one in layers
            ]
            options.append(ChainOption(slower, rng.choice([0.0, 3.0])))

        def least(options, layers=layers, places=places, microbatches=microbatches):
            return min(
                _with_options(options, places, microbatches, counts, ways)
                for counts in cuts(len(layers), len(places))
                for ways in itertools.product(range(len(options)), repeat=len(places))
            )

        best = least(options)
        found = try_pipe_dp(options, places, microbatches)
        if found is None:
            assert math.isinf(best)
            continue
        assert found.seconds == pytest.approx(best)
        own = _with_options(options, places, microbatches, found.counts, found.options)
        assert own == pytest.approx(best)
        mixed += best < min(least([one]) for one in options)
    assert mixed > trials / 20


def _with_options(options, places, microbatches, counts, ways):
    """`priced`, where each stage runs its layers in a way of its own."""
    ends = [0, *itertools.accumulate(counts)]
    layers = [
        layer
        for way, run in zip(ways, itertools.pairwise(ends), strict=True)
        for layer in options[way].layers[slice(*run)]
    ]
    left = [
        dataclasses.replace(
            place, memory_bytes=max(1e-9, place.memory_bytes - options[way].reserved_bytes)
        )
        for way, place in zip(ways, places, strict=True)
    ]
    return priced(layers, left, microbatches, counts)


@pytest.mark.parametrize("trials", amounts(60, 400))
def test_no_cut_takes_less(trials):
    solved = refused = 0
    for seed in range(trials):
        rng = random.Random(seed)
        layers, places, microbatches = some(rng)
        in_flight = [rng.randint(1, 5) for _ in places] if seed % 3 == 0 else None
        every = cuts(len(layers), len(places))
        least = min(priced(layers, places, microbatches, c, in_flight) for c in every)
        if math.isinf(least):
            with pytest.raises(MemoryLimitError, match="layers do not fit into"):
                pipe_dp(layers, places, microbatches, in_flight=in_flight)
            refused += 1
            continue
        found = pipe_dp(layers, places, microbatches, in_flight=in_flight)
        assert found.seconds == pytest.approx(least)
        assert priced(layers, places, microbatches, found.counts, in_flight) == pytest.approx(least)
        own, sent = found.stage_seconds, found.sent_seconds
        assert found.seconds == pipeline_seconds(microbatches, max(own), sum(own), sum(sent))
        solved += 1
    assert solved > trials / 2 and refused > 2


def test_equal_layers_on_equal_devices_are_dealt_out_evenly():
    found = pipe_dp([ChainLayer(1.0)] * 12, [StageDevice()] * 4, 8)
    assert found.counts == (3, 3, 3, 3)
    assert found.seconds == 7 * 3 + 12


def test_a_device_twice_as_fast_gets_twice_the_layers():
    assert pipe_dp(
        [ChainLayer(1.0)] * 12, [StageDevice(speed=2.0), StageDevice(), StageDevice()], 64
    ).counts == (6, 3, 3)


def test_many_microbatches_ask_for_balance_and_few_for_narrow_cuts():
    layers = [ChainLayer(1.0, 9.0), ChainLayer(1.0, 9.0), ChainLayer(1.0, 0.0), ChainLayer(1.0)]
    places = [StageDevice(bandwidth=1.0), StageDevice()]
    assert pipe_dp(layers, places, 2).counts == (3, 1)
    assert pipe_dp(layers, places, 100).counts == (2, 2)


def test_a_slow_link_is_crossed_where_little_is_sent():
    layers = [ChainLayer(1.0, b) for b in (5.0, 5.0, 1.0, 5.0, 5.0, 5.0)]
    fast, slow = StageDevice(bandwidth=100.0), StageDevice(bandwidth=0.1)
    assert pipe_dp(layers, [slow, fast, fast], 2).counts[0] == 3


def test_the_first_stage_has_the_most_in_flight():
    """And so the fewest layers, where memory is short: 3, 2 and 1 microbatches of each."""
    layers = [ChainLayer(1.0, kept_bytes=1.0)] * 9
    assert pipe_dp(layers, [StageDevice(memory_bytes=12.0)] * 3, 8).counts == (3, 3, 3)
    assert pipe_dp(layers, [StageDevice(memory_bytes=6.0)] * 3, 8).counts == (2, 3, 4)
    with pytest.raises(MemoryLimitError):
        pipe_dp(layers, [StageDevice(memory_bytes=12.0)] * 3, 8, in_flight=[8] * 3)


def test_what_does_not_fit_is_said():
    layers = [ChainLayer(1.0, fixed_bytes=3 * 2.0**30)] * 4
    with pytest.raises(MemoryLimitError) as error:
        pipe_dp(
            layers,
            [StageDevice(memory_bytes=5 * 2.0**30), StageDevice(memory_bytes=8 * 2.0**30)],
            4,
        )
    assert str(error.value) == (
        "4 layers do not fit into 2 stages. In the fastest assignment stage 0 would store 6.00 GiB "
        "of the 5.00 GiB it may, with 2 microbatches in flight. Use more stages, smaller "
        "microbatches or recompute."
    )
    assert error.value.needed_bytes == 6 * 2**30


@pytest.mark.parametrize("num_stages", [0, 3])
def test_as_many_stages_as_layers_at_most(num_stages):
    with pytest.raises(PlanError, match=f"{num_stages} stages of 2 layers: there can be from 1"):
        pipe_dp([ChainLayer(1.0)] * 2, [StageDevice()] * num_stages, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ChainLayer(-1.0),
        lambda: ChainLayer(1.0, math.inf),
        lambda: StageDevice(speed=0.0),
        lambda: StageDevice(bandwidth=0.0),
        lambda: pipe_dp([ChainLayer(1.0)], [StageDevice()], 0),
        lambda: pipe_dp([ChainLayer(1.0)], [StageDevice()], 1, in_flight=[1, 2]),
    ],
)
def test_what_is_refused(make):
    with pytest.raises(ArgumentError):
        make()


def test_a_deep_model_of_unequal_layers_is_quick():
    rng = random.Random(0)
    layers = [ChainLayer(rng.uniform(1, 2), rng.uniform(1, 9), 1.0, 1.0) for _ in range(96)]
    places = [StageDevice(rng.choice([1.0, 2.0]), rng.uniform(1, 50), 400.0) for _ in range(16)]
    before = time.process_time()
    pipe_dp(layers, places, 32)
    assert time.process_time() - before < 3.0
