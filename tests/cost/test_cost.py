"""The value that a cost is."""

import dataclasses
import json

import pytest

from tfpar.cost.cost import Cost
from tfpar.readable import convert
from tfpar.spec import TfparError

COST = Cost(0.6, (0.1, 0.2, 0.0), (0.1, 0.1, 0.0), 0.3, 0.1, 4 * 2**20, 1.0, 2.0, 3.0, 4.0)


def test_a_cost_round_trips_through_json():
    assert convert(json.loads(json.dumps(dataclasses.asdict(COST))), Cost) == COST


def test_what_is_stored_at_once_is_counted_where_it_is_known():
    assert COST.memory_bytes == 10.0
    assert dataclasses.replace(COST, live_bytes=5.0).memory_bytes == 8.0


def test_a_cost_of_two_phases_is_refused():
    with pytest.raises(TfparError, match="compute_s is .*a list of 3"):
        convert({**dataclasses.asdict(COST), "compute_s": [0.1, 0.2]}, Cost)
