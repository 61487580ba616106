"""Values are read by their schema, and what is wrong with one is said with its key."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import pytest

from tfpar.readable import FieldError, convert
from tfpar.spec import Amount, Count


class Point(NamedTuple):
    x: Amount
    y: Amount = 0.0


@dataclasses.dataclass(frozen=True)
class Size:
    width: Count
    kind: Literal["small", "large"] = "small"


class Even(int):
    expected = "an even number"


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"sizes": "size"}):
    sizes: dict[str, Size]
    points: tuple[Point, ...] = ()
    pair: tuple[int, str] | None = None
    even: Even | None = None
    names: dict[Annotated[str, msgspec.Meta(pattern="^n", description="a name: n*")], bool] = {}


def even(kind: Any, value: Any) -> Any:
    if not isinstance(value, int) or value % 2:
        raise ValueError(f"is {value!r}, which is odd")
    return kind(value)


def test_what_is_right_is_read():
    data = {"size": {"a": {"width": 3}}, "points": [[1], [1, 2.5]], "pair": [1, "x"], "even": 4}
    found = convert(data, Table, even)
    assert found.sizes == {"a": Size(3)} and found.points == ((1.0, 0.0), (1.0, 2.5))
    assert (found.pair, found.even) == ((1, "x"), 4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the content is []; it must be an object with fields"),
        ({}, "size is missing; it must be an object with fields"),
        ({"sizes": {}}, "sizes is not known (did you mean size?); there are size, points, pair, "),
        ({"size": {"a/b": {}}}, "size['a/b'].width is missing; it must be a whole number, 0 or"),
        ({"size": {"a": {"width": -1}}}, "size.a.width is -1; it must be a whole number, 0 or mo"),
        ({"size": {"a": {"width": True}}}, "size.a.width is True; it must be a whole number, 0 or"),
        (
            {"size": {"a": {"width": 1}, "b": {"width": 1, "kinds": "small"}}},
            "size.b.kinds is not known (did you mean kind?); there are width, kind",
        ),
        (
            {"size": {"a": {"width": 1, "kind": "tiny"}}},
            "size.a.kind is 'tiny'; it must be one of 'small', 'large'",
        ),
        ({"size": {}, "points": [[]]}, "points[0] is []; it must be a list of 1 to 2"),
        (
            {"size": {}, "points": [[1, 2], [1, math.nan]]},
            "points[1].y is nan; it must be a finite number, 0 or more",
        ),
        ({"size": {}, "points": [[math.inf]]}, "points[0].x is inf; it must be a finite number"),
        ({"size": {}, "pair": [1]}, "pair is [1]; it must be a list of 2, or null"),
        ({"size": {}, "pair": ["x", "x"]}, "pair[0] is 'x'; it must be a whole number"),
        ({"size": {}, "even": 3}, "even is 3, which is odd"),
        ({"size": {}, "names": {"x": True}}, "names.x is 'x'; it must be a name: n*"),
        ({"size": {}, "names": {"n": 1}}, "names.n is 1; it must be True or False"),
    ],
)
def test_what_is_wrong_is_named(data, message):
    with pytest.raises(FieldError) as error:
        convert(data, Table, even)
    assert str(error.value).startswith(message)


def test_keys_that_a_dataclass_lacks_may_be_passed_over():
    assert convert({"width": 1, "height": 2}, Size, lax=True) == Size(1)
    with pytest.raises(FieldError, match="width is missing"):
        convert({"height": 2}, Size, lax=True)
