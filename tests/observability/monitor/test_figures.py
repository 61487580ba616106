"""Which steps are timed, and what they took."""

from __future__ import annotations

import itertools
import math

import pytest

from tfpar.observability.monitor.figures import Lap, Meter, Tally


class Program:
    """What a step runs."""


class Clock:
    """Is put forward by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_compiles_and_warms_up_does_not_count():
    clock, step = Clock(), Program()
    meter = Meter(clock)
    laps = []
    for seconds in (9.0, 5.0, 1.0, 2.0):
        meter.start()
        clock.now += seconds
        laps.append(meter.lap([step]))
    assert laps == [None, None, Lap(1.0, [step]), Lap(2.0, [step])]
    other = Program()  # a last, smaller batch, say
    for seconds, ran in ((7.0, other), (3.0, step), (1.0, other)):
        clock.now += seconds
        laps.append(meter.lap([ran]))
    assert laps[4:] == [None, None, Lap(1.0, [other])]


def test_time_runs_from_the_end_of_a_call_to_the_end_of_the_next_but_where_it_is_stopped():
    clock, step = Clock(), Program()
    meter = Meter(clock)
    meter.start()
    for _ in range(2):
        meter.lap([step])
    clock.now += 0.5  # a callback after the step, or data that is waited for
    meter.start()
    clock.now += 1.0
    assert meter.lap([step]) == Lap(1.5, [step])
    meter.stop()
    clock.now += 100.0  # an evaluation
    meter.start()
    clock.now += 2.0
    assert meter.lap([step], read_s=0.25) == Lap(2.0, [step], 0.25)


def test_calls_that_train_nothing_do_not_count():
    clock, step = Clock(), Program()
    meter = Meter(clock)
    meter.start()
    for _ in range(2):
        meter.lap([step])
    clock.now += 1.0
    assert meter.lap([]) is None  # what a resumed training passes over
    clock.now += 2.0
    assert meter.lap([step, step]) == Lap(2.0, [step, step])


def test_a_tally_adds_up_calls_of_several_steps():
    one, other = Program(), Program()
    tally = Tally()
    assert tally.steps == 0 and math.isnan(tally.step_s) and math.isnan(tally.step_s_of(one))
    for seconds, ran in ((2.0, [one, one]), (3.0, [one, other]), (1.0, [other]), (6.0, [one])):
        tally.add(Lap(seconds, ran, read_s=0.5))
    assert tally.steps == 6 and tally.step_s == 2.0 and tally.read_s == 2.0
    assert tally.step_s_of(one) == pytest.approx(8.0 / 3) and tally.step_s_of(other) == 1.0
    assert dict(tally.ran) == {one: 4, other: 2}


def test_programs_that_are_gone_are_known_no_more():
    """A new one at the same place in memory is another one."""
    meter = Meter(itertools.count().__next__)
    meter.start()
    for _ in range(5):
        assert meter.lap([Program()]) is None
