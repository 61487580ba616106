"""What chunks hide and cost."""

from __future__ import annotations

import pytest

from tfpar.cost.overlap import chunked_seconds


def test_one_chunk_hides_nothing():
    assert chunked_seconds(3.0, 2.0, 0.5, 1, 1.0) == 5.0


def test_chunks_hide_all_but_their_share_of_what_is_shorter():
    assert chunked_seconds(4.0, 2.0, 0.0, 2, 1.0) == 5.0
    assert chunked_seconds(2.0, 4.0, 0.0, 2, 1.0) == 5.0
    assert chunked_seconds(4.0, 2.0, 0.0, 4, 1.0) == pytest.approx(4.5)


def test_every_chunk_pays_for_starting():
    assert chunked_seconds(0.0, 2.0, 0.5, 4, 1.0) == 3.5
    times = [chunked_seconds(4.0, 2.0, 0.6, chunks, 1.0) for chunks in (1, 2, 4)]
    assert times[1] < times[0] < chunked_seconds(4.0, 2.0, 0.6, 16, 1.0)


def test_devices_that_cannot_overlap_gain_nothing():
    assert chunked_seconds(4.0, 2.0, 0.0, 4, 0.0) == 6.0
