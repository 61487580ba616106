"""Bytes and seconds as text."""

import math

import pytest

from tfpar.spec.quantities import format_bytes, format_seconds


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.5 * 2**20, "1.50 MiB"),
        (2**30, "1.00 GiB"),
        (2**30 - 1, "1024.00 MiB"),
        (5000 * 2**50, "5000.00 PiB"),
        (math.inf, "inf B"),
    ],
)
def test_bytes_are_in_the_largest_unit_of_which_there_is_one(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize("count", [0.2, 1025.0, 123_456_789.3])
def test_what_is_printed_and_given_as_a_limit_is_enough(count):
    value, unit = format_bytes(count).split()
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20}[unit]
    assert float(value) * scale >= count


@pytest.mark.parametrize(
    "seconds, text",
    [
        (90.0, "90.00 s"),
        (1.0, "1.00 s"),
        (0.00125, "1.25 ms"),
        (2e-6, "2.00 us"),
        (2e-9, "0.00 us"),
    ],
)
def test_seconds_are_in_the_largest_unit_of_which_there_is_one(seconds, text):
    assert format_seconds(seconds) == text
