"""Checks of arguments, and what is said of those that are refused.

Every function takes the argument's name, for messages, and what was given; it returns that in the
one form that the program computes with, or raises an ArgumentError.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

import numpy as np

from tfpar.spec.errors import ArgumentError

T = TypeVar("T")

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80


def argument_error(name: str, value: Any, expected: str) -> ArgumentError:
    """Make the error for a `value` that is not `expected`."""
    return ArgumentError(f"{name} is {shown(value)}; it must be {expected}.")


def shown(value: Any) -> str:
    """Write `value` as a message shows it: on one line, and not long."""
    return " ".join(_SHOWN.repr(value).split())


def written(value: Any) -> str:
    """Write `value` as code has it where it is text, else as a message shows it."""
    return repr(value) if isinstance(value, str) else shown(value)


def optional(read: Callable[[str, Any], T], name: str, value: Any) -> T | None:
    """Read None, or what `read` makes of `value`."""
    return None if value is None else read(name, value)


def integer(name: str, value: Any, least: int | None = None, expected: str = "") -> int:
    """Read a whole number, Python's or numpy's, of `least` or more and of 64 bits.

    Args:
        expected: what is said to be expected, if there is more to say.
    """
    expected = expected or "a whole number" + (f", {least} or more" if least is not None else "")
    found = to_integer(value)
    if found is None or (least is not None and found < least):
        raise argument_error(name, value, expected)
    if abs(found) >= 2**63:
        raise argument_error(name, value, f"{expected}, below 2^63")
    return found


def to_integer(value: Any) -> int | None:
    """Convert `value` to an int if it is a whole number, Python's or numpy's; None if not."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    return None


def number(
    name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf, expected: str = ""
) -> float:
    """Read a number, Python's or numpy's, above `above` and of `least` or more."""
    if not expected:
        expected = "a number"
        expected += f" above {above:g}" if above > -math.inf else ""
        expected += f", {least:g} or more" if least > -math.inf else ""
    found = math.nan
    if is_number(value):
        with contextlib.suppress(OverflowError):  # an int beyond all floats
            found = float(value)
    if not (found > above and found >= least):
        raise argument_error(name, value, expected)
    return found


def finite(name: str, value: Any, above: float | None = None) -> float:
    """Read a number that has an end, above `above` or, without it, of 0 or more."""
    found = number(name, value, least=0) if above is None else number(name, value, above=above)
    if math.isinf(found):
        raise argument_error(name, value, "finite")
    return found


def is_number(value: Any) -> bool:
    """Whether `value` is a real number, Python's or numpy's; truth values are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def flag(name: str, value: Any) -> bool:
    """Read True or False, Python's or numpy's."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise argument_error(name, value, "True or False")


def text(name: str, value: Any, expected: str = "a string that is not empty") -> str:
    """Read a string with something in it."""
    if not isinstance(value, str) or not value:
        raise argument_error(name, value, expected)
    return value


def path(name: str, value: Any, expected: str = "a path: a string or a pathlib.Path") -> str:
    """Read the path of a file or a folder, as a string that a file system can have."""
    if isinstance(value, str | os.PathLike):
        found = os.fspath(value)
        with contextlib.suppress(UnicodeEncodeError):
            if isinstance(found, str) and found and b"\0" not in os.fsencode(found):
                return found
    raise argument_error(name, value, expected)


def check_list(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    """Read the entries of something that has them in an order: no text, no mapping, no set."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Set):
        with contextlib.suppress(TypeError):  # of numpy, an array without dims
            return tuple(value)
    raise argument_error(name, value, expected)


def instances(name: str, value: Any, kind: type[T]) -> Sequence[T]:
    """Read a list or a tuple of objects of one class."""
    if isinstance(value, list | tuple) and all(isinstance(one, kind) for one in value):
        return value
    raise argument_error(name, value, f"a list, each entry of it {_article(kind)}")


def instance(name: str, value: Any, kind: type[T]) -> T:
    """Read an object of a class."""
    if isinstance(value, kind):
        return value
    raise argument_error(name, value, _article(kind))


def mapping(name: str, value: Any, kind: type[T]) -> Mapping[str, T]:
    """Read a mapping from texts to objects of one class."""
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and isinstance(v, kind) for k, v in value.items()):
            return value
    raise argument_error(name, value, f"a mapping from texts, each to {_article(kind)}")


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOaeio' else 'a'} {kind.__name__}"


def check_choice(name: str, value: Any, known: Iterable[T]) -> T:
    """Read the one of `known` that `value` equals."""
    known = tuple(known)
    number = to_integer(value)
    given = value if number is None else number
    for one in known:
        if isinstance(given, type(one)) and not isinstance(given, bool) and given == one:
            return one
    raise argument_error(name, value, f"one of {', '.join(map(repr, known))}")
