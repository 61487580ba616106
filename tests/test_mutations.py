"""Faults are planted where they say, do nothing until they are switched on, and are drawn alike."""

from __future__ import annotations

from collections import Counter

import pytest

from scripts.mutating import faults
from scripts.mutating.operators import plant, sites_of
from scripts.mutations import Reach, choose, rank

SOURCE = '''
LIMIT = 3

def clamp(x, low=0):
    """Docstring."""
    if not x or x < low and x != 7:
        raise ValueError("too small" + str(1 + 1))
    seen = []
    seen.append(x)
    return min(x + 1, LIMIT), seen, True
'''


def run(number: int, *arguments):
    """The result of `clamp` with one fault switched on."""
    found = list(sites_of(SOURCE))
    numbers = {site.identity: i for i, site in enumerate(found)}
    tree = plant(SOURCE, lambda site: numbers[site.identity])
    module = {"__fault__": lambda planted: planted == number}
    exec(compile(tree, "clamp", "exec"), module)
    return module["clamp"](*arguments)


def test_a_fault_changes_what_it_says_and_nothing_is_changed_without_one():
    sites = list(sites_of(SOURCE))
    assert Counter(site.operator for site in sites) == {
        **{"boolean": 2, "negation": 1, "compare": 2, "call dropped": 1},
        **{"function": 1, "arithmetic": 1, "constant": 3},
    }
    assert run(-1, 5) == (3, [5], True)
    results = {(s.operator, s.text): i for i, s in enumerate(sites)}
    assert run(results["call dropped", "seen.append(x)"], 5) == (3, [], True)
    assert run(results["function", "min(x + 1, LIMIT)"], 5) == (6, [5], True)
    assert run(results["arithmetic", "x + 1"], 1) == (0, [1], True)
    assert run(results["constant", "True"], 5) == (3, [5], False)


def test_an_edit_elsewhere_moves_no_fault():
    edited = SOURCE.replace("LIMIT = 3", "LIMIT = 4\n\ndef other():\n    return 1 + 1\n")
    before = {site.identity for site in sites_of(SOURCE)}
    assert before < {site.identity for site in sites_of(edited)}


@pytest.mark.slow
def test_every_area_has_its_share_of_the_draw():
    drawn = faults.draw(5)
    assert Counter(fault.area for fault in drawn) == dict.fromkeys(faults.AREAS, 5)
    assert [fault.key for fault in drawn] == [fault.key for fault in faults.draw(5)]


def test_tests_that_come_past_a_fault_run_first_and_then_others_of_their_modules():
    a = Reach("a.py::slow", 9, 9, True, {1})
    b = Reach("a.py::quick", 1, 1, True)
    c = Reach("b.py::other", 1, 1, True, {2})
    failing = Reach("a.py::failing", 1, 1, False, {1})
    assert choose(1, [b, c, a, failing], 60) == [a, b]
    assert choose(1, [b, c, a, failing], 5) == [a]
    ranked = [test.test for test, _ in rank([a, b, c])]
    assert ranked == ["b.py::other", "a.py::slow", "a.py::quick"]
