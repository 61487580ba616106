"""What ranks were fed, compared at their meetings."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfpar.spec import RuntimeMismatchError
from tfpar.tf.distributed import lockstep
from tfpar.tf.distributed.input_log import InputLog, difference
from tfpar.tf.distributed.lockstep import Lockstep


class Nothing:
    def compare(self, when: str, turn: int | None = None) -> None:
        pass


class Ranks:
    """Ranks that take the same steps, one after another; seen from the last one, which hears what
    the others have said at the same moment."""

    def __init__(self, size: int) -> None:
        self.said: list[list[Any]] = [[] for _ in range(size)]
        self.heard = [0] * size
        self.locksteps = [Lockstep(Rank(self, rank)) for rank in range(size)]

    def take(self, *fed: list[Any], parts: list[str] | None = None) -> None:
        """Each takes as many steps as it is fed batches, each of one tensor."""
        for rank, batches in enumerate(fed):
            for step, batch in enumerate(batches):
                part = parts[rank] if parts else ""
                with self.locksteps[rank].step(
                    "train step", [tf.constant(batch)], part=part, shared=Nothing, first=step == 0
                ):
                    pass


class Rank:
    """One of them, as its lockstep knows the world."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.exchange = self.beacon = self

    def took(self, steps: int) -> None:
        pass

    def at(self, activity: str, within: Any = None) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def messages(self, message: Any) -> list[Any]:
        """What those before it have said at this moment; the others say the same as it."""
        said = self.ranks.said
        said[self.rank].append(message)
        moment = len(said[self.rank]) - 1
        return [s[moment] if len(s) > moment else message for s in said]


X = np.arange(48.0).reshape(8, 6)


def changed(*index: int) -> np.ndarray:
    other = X.copy()
    other[index] += 1e-9
    return other


def test_ranks_that_were_fed_the_same_go_on():
    Ranks(3).take([X, X], [X, X], [X, X])


def test_parts_are_compared_among_ranks_that_were_given_the_same():
    parts = ["0 of 2", "0 of 2", "1 of 2", "1 of 2"]
    Ranks(4).take([X], [X], [X + 1], [X + 1], parts=parts)
    with pytest.raises(RuntimeMismatchError, match="Ranks 2 and 3 were fed different batches"):
        ranks = Ranks(4)
        ranks.said = [
            [_message("0 of 2")],
            [_message("0 of 2")],
            [_message("1 of 2"), ["a"], STEP],
            [],
        ]
        ranks.take([], [], [], [X + 2], parts=parts)


def _message(part: str) -> dict[str, Any]:
    return {"fed": {part: "a"}, "bytes": 1, "stop": False, "seconds": 0.1}


STEP = {"name": "train step 1", "fed": [["float64[8, 6]", 0, [1] * 8]]}


@pytest.mark.parametrize(
    "one, other, said",
    [
        (X, changed(3, 1), r"its input (float64[8, 6]) differs in 1 of 8 samples, first in 3"),
        (X, X[[1, 0, *range(2, 8)]], "differs in 2 of 8 samples, first in 0"),
        (X, X[:7], "its input is float64[8, 6] on the one and float64[7, 6] on the other"),
        (np.float32(1), np.float32(2), "its input (float32[]) differs"),
        (["a cat", "a dog"], ["a cat", "a dig"], "(string[2]) differs in 1 of 2 samples, first in"),
        (np.zeros(2000), np.eye(1, 2000, 5)[0], "its input (float64[2000]) differs"),
    ],
)
def test_what_differs_is_told_with_the_samples(one, other, said):
    steps = []
    for value in (one, other):
        fed = InputLog()
        fed.note("train step 1", 1, [tf.constant(value)])
        steps.append((fed.digest, fed.step("", 0)))
    (digest, step), (other_digest, other_step) = steps
    assert digest != other_digest and said in difference(step, other_step)


def test_of_batches_that_take_long_to_look_at_each_sample_has_its_turn():
    fed, others = InputLog(), InputLog()
    for each in (fed, others):
        each.restart(3)
    for number in range(3):
        fed.note("", number, [tf.constant(X)])
        others.note("", number, [tf.constant(changed(4, 2))])
    differing = [a != b for a, b in zip(fed.digests(""), others.digests(""), strict=True)]
    assert sum(differing) == 1
    at = differing.index(True)
    assert "differs in 1 of 3 samples, first in 4" in difference(
        fed.step("", at), others.step("", at)
    )


class Slow:
    """What takes a while to compare; knows when that was done, and of which steps."""

    def __init__(self) -> None:
        self.of: list[str] = []

    def compare(self, when: str, turn: int | None = None) -> None:
        self.of.append(when)
        time.sleep(0.02)


def test_what_takes_long_to_compare_is_compared_less_often(monkeypatch):
    monkeypatch.setattr(lockstep, "INTERVAL_S", 0.0)  # a meeting after each step
    ranks, slow = Ranks(1), Slow()
    for step in range(60):
        with ranks.locksteps[0].step("train step", [], shared=lambda: slow, first=step == 0):
            time.sleep(0.001)
    assert slow.of[:3] == [f"in train step {n}" for n in (1, 2, 3)]
    assert len(slow.of) <= 5 and not {"in train step 4", "in train step 5"} & {*slow.of}
