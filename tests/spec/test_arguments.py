"""What arguments may be, as numbers."""

import numpy as np
import pytest

from tfpar.spec import ArgumentError
from tfpar.spec.arguments import integer


@pytest.mark.parametrize("value", [0, 7, np.int32(7), 2**63 - 1])
def test_whole_numbers(value):
    assert integer("size", value, 0) == value


@pytest.mark.parametrize(
    "value, message",
    [
        (-1, "size is -1; it must be a whole number, 0 or more"),
        (1.0, "size is 1.0"),
        (True, "size is True"),
        (2**63, r"below 2\^63"),
        (10**400, r"below 2\^63"),
    ],
)
def test_what_is_no_size_is_refused(value, message):
    with pytest.raises(ArgumentError, match=message):
        integer("size", value, 0)
