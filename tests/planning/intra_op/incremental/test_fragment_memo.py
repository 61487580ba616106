"""What segments gave before: found again by what was read, and exchanged for one another."""

import pytest

from tests.propagation.by_hand import ByHand, specs
from tfpar.cost import Terms
from tfpar.ir import FORWARD
from tfpar.planning.intra_op.incremental.fragment_memo import (
    ABSENT,
    FragmentMemo,
    FragmentOutcome,
    step_between,
)
from tfpar.planning.intra_op.incremental.incremental import Ledger

WHOLE, ROWS, COLUMNS = specs("R", "S(0)", "S(1)")


def tensors(count=3):
    build = ByHand()
    return [build.fed(name, 4, 6) for name in "xyz"[:count]]


def terms(seconds=0.0):
    found = Terms(1)
    found.compute[FORWARD] = seconds
    return found


# --- found again -----------------------------------------------------------------------------


def test_an_outcome_is_found_by_all_that_was_read():
    x, y, _ = tensors()
    known, both, other = FragmentMemo(), FragmentOutcome({}, terms()), FragmentOutcome({}, terms())
    assert known.find(1, {}, {x: ROWS, y: WHOLE}) is None, "it never ran"
    known.note({x: ROWS, y: WHOLE}, both)
    known.note({x: ROWS, y: ROWS}, other)
    assert known.find(1, {}, {x: ROWS, y: WHOLE}) is both
    assert known.find(1, {}, {x: ROWS, y: ROWS}) is other
    assert known.find(1, {}, {x: ROWS, y: COLUMNS}) is None
    assert known.find(1, {}, {x: WHOLE, y: WHOLE}) is None


def test_what_is_read_next_may_hang_on_what_was_read_before():
    x, y, z = tensors()
    known, by_y, by_z = FragmentMemo(), FragmentOutcome({}, terms()), FragmentOutcome({}, terms())
    known.note({x: ROWS, y: WHOLE}, by_y)
    known.note({x: WHOLE, z: WHOLE}, by_z)
    assert known.find(1, {}, {x: ROWS, y: WHOLE, z: ROWS}) is by_y
    assert known.find(1, {}, {x: WHOLE, y: ROWS, z: WHOLE}) is by_z


def test_a_segment_that_reads_nothing_always_gives_the_same():
    known, outcome = FragmentMemo(), FragmentOutcome({}, terms())
    known.note({}, outcome)
    assert known.find(1, {}, {}) is outcome


def test_only_what_earlier_segments_laid_is_seen():
    (x,) = tensors(1)
    known, outcome = FragmentMemo(), FragmentOutcome({}, terms())
    known.note({x: ROWS}, outcome)
    assert known.find(2, {x: (1, ROWS)}, {x: WHOLE}) is outcome
    assert known.find(1, {x: (1, ROWS)}, {x: WHOLE}) is None, "it laid it itself, in its last run"


def test_a_tensor_that_is_open_is_not_one_that_is_not_laid():
    (x,) = tensors(1)
    known, open_, absent = (
        FragmentMemo(),
        FragmentOutcome({}, terms()),
        FragmentOutcome({}, terms()),
    )
    known.note({x: None}, open_)
    known.note({x: ABSENT}, absent)
    assert known.find(0, {}, {x: None}) is open_
    assert known.find(0, {}, {}) is absent


# --- exchanged -------------------------------------------------------------------------------


def test_a_step_holds_what_changes():
    x, y, z = tensors()
    one, two, three = ((t, WHOLE, ROWS) for t in (x, y, z))
    before = FragmentOutcome({x: ROWS, y: ROWS}, terms(1.0), ((one, terms()), (two, terms())))
    after = FragmentOutcome({x: ROWS, z: ROWS}, terms(3.0), ((two, terms()), (three, terms())))
    step = step_between(before, after, {})
    assert step.terms.compute[FORWARD] == 2.0
    assert [change for change, _ in step.wants] == [three]
    assert [change for change, _ in step.drops] == [one]
    assert step.lays == [(z, ROWS)] and step.leaves == [y]


def test_weights_are_always_said_anew():
    """Which of several segments lays a weight may change, and its spec stay what it is."""
    build = ByHand()
    handle = build.variable("w", 4, 6)
    (weight,) = build.graph.variables
    same = FragmentOutcome({handle: ROWS}, terms())
    step = step_between(same, FragmentOutcome({handle: ROWS}, terms()), {handle: weight})
    assert step.lays == [(handle, ROWS)]
    gone = step_between(same, FragmentOutcome({}, terms()), {handle: weight})
    assert gone.leaves == [handle]


# --- what a run reads ------------------------------------------------------------------------


class Around:
    """Surroundings in which `x` lies by rows in all plans, and `y` in this one."""

    def __init__(self, x, y):
        self.specs, self.varying = {x: ROWS, y: ROWS}, {y}

    def seen(self, tensor, at):
        return self.specs.get(tensor, ABSENT)

    def varies(self, tensor, at):
        return tensor in self.varying


def test_a_ledger_notes_what_plans_differ_in():
    x, y, z = tensors()
    ledger = Ledger(Around(x, y), 0)
    assert ledger[x] == ROWS and not ledger.read
    assert ledger[y] == ROWS and ledger.read == {y: ROWS}
    with pytest.raises(KeyError):
        ledger[z]
    assert ledger.get(z, WHOLE) == WHOLE and not dict(ledger)


def test_a_ledger_sees_what_the_run_lays_before_its_surroundings():
    x, y, z = tensors()
    ledger = Ledger(Around(x, y), 0)
    ledger[y] = COLUMNS
    assert ledger.get(y) == ledger[y] == COLUMNS and not ledger.read
    assert ledger.setdefault(x, WHOLE) == ROWS and x not in dict(ledger)
    assert ledger.setdefault(z, WHOLE) == WHOLE and dict(ledger)[z] == WHOLE


def test_what_was_read_stays_as_it_was_read():
    """A run sees one value of a tensor, whatever is laid around it meanwhile."""
    x, y, _ = tensors()
    around = Around(x, y)
    ledger = Ledger(around, 0)
    assert ledger.get(y) == ROWS
    around.specs[y] = WHOLE
    assert ledger.get(y) == ROWS
