"""What may be given for a timeline's file and steps."""

from __future__ import annotations

import pytest

from tfpar.observability.timeline.request import DEFAULT_STEPS, TimelineRequest
from tfpar.spec import ArgumentError, TfparError


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (None, DEFAULT_STEPS),
        ((10, 12), (10, 12)),
        ([1, 1], (1, 1)),
        ("7-9", (7, 9)),
        ("7", (7, 7)),
    ],
)
def test_steps(given, steps, tmp_path):
    asked = TimelineRequest.of(tmp_path / "t.json", given)
    assert (asked.first, asked.last) == steps


@pytest.mark.parametrize(
    "given",
    [(12, 10), (0, 2), (1, 2, 3), (1.5, 2), 3, "3-", "a-b", "5-3", "", (True, 2), "9" * 5000],
)
def test_steps_that_are_none(given, tmp_path):
    with pytest.raises(ArgumentError, match="steps is .*; it must be the first and the last step"):
        TimelineRequest.of(tmp_path / "t.json", given)


@pytest.mark.parametrize(
    ("path", "why"),
    [("nowhere/t.json", "there is no folder"), (".", "it is a folder")],
)
def test_files_that_cannot_be_written_are_told_at_once(path, why, tmp_path):
    with pytest.raises(TfparError, match=f"Cannot write the timeline .*: {why}"):
        TimelineRequest.of(tmp_path / path)
    TimelineRequest.of(tmp_path / path, writes=False)  # it is another machine that has the folder


def test_a_path_is_a_path():
    with pytest.raises(ArgumentError, match="path is 3"):
        TimelineRequest.of(3)
