"""How slow a machine is said to be, and what that makes of time limits."""

from __future__ import annotations

import pytest

from benchmarks import machine
from tests import time_limits


def test_a_machine_that_takes_twice_the_time_says_two(monkeypatch, capsys):
    twice = {part: 2 * cpu_s for part, cpu_s in machine.REFERENCE_S.items()}
    monkeypatch.setattr(machine, "measure", lambda: twice)
    monkeypatch.setattr("sys.argv", ["machine", "--factor"])
    machine.main()
    assert capsys.readouterr().out == "2.00\n"
    monkeypatch.setattr("sys.argv", ["machine"])
    machine.main()
    *parts, whole = capsys.readouterr().out.splitlines()
    assert len(parts) == 3 and all(line.endswith(" 2.00") for line in parts) and " 2.00 " in whole


@pytest.mark.parametrize(("python", "factor"), [(0.5, 1.0), (2.5, 2.5)])
def test_time_limits_grow_with_a_slow_machine_and_never_shrink(monkeypatch, python, factor):
    monkeypatch.delenv(time_limits.VARIABLE)
    monkeypatch.setattr(time_limits, "python_factor", lambda: python)
    measured = time_limits.machine_factor.__wrapped__
    assert measured() == factor
    monkeypatch.setattr(time_limits, "python_factor", lambda: 7.0)
    assert measured() == factor  # as a process that this one starts is told
    monkeypatch.setattr(time_limits, "machine_factor", measured)
    assert time_limits.time_limit(30) == 30 * factor
