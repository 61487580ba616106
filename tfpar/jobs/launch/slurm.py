"""Slurm's compressed lists: of nodes, and of the tasks on each.

A few characters can stand for more entries than memory holds (`n[0-99999999]`): they are counted
before they are written out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tfpar.spec.errors import TfparError

MOST_NODES = 100_000  # more than any cluster has
_NUMBER = r"(\d{1,18})"  # far from the length at which Python refuses to read a number
_SHOWN = 200  # characters of a text that cannot be used


@dataclass(frozen=True, slots=True)
class _Range:
    """Numbers, written in as many digits as the first is."""

    first: int
    last: int
    digits: int

    def names(self) -> Iterator[str]:
        return (str(n).zfill(self.digits) for n in range(self.first, self.last + 1))


@dataclass(frozen=True, slots=True)
class _Part:
    """`r[1-2]n[3,5-7]`: texts, and the ranges between each two of them."""

    texts: tuple[str, ...]
    numbers: tuple[tuple[_Range, ...], ...]

    def count(self) -> int:
        count = 1
        for ranges in self.numbers:
            count *= sum(r.last - r.first + 1 for r in ranges)
        return count

    def names(self) -> Iterator[str]:
        choices = [[name for r in ranges for name in r.names()] for ranges in self.numbers]
        first, *others = self.texts
        for chosen in itertools.product(*choices):
            yield first + "".join(n + text for n, text in zip(chosen, others, strict=True))


def expand_nodelist(text: str, variable: str) -> list[str]:
    """The names of a compressed list: `node[01-03,7],gpu5` has five.

    Args:
        variable: where the text is from; errors name it.

    Raises:
        TfparError: brackets or ranges that are malformed, or more than `MOST_NODES` names.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(parts) != text:
        raise _unreadable(text, variable)
    read = [_part(part, text, variable) for part in parts]
    _check_count(sum(part.count() for part in read), text, variable)
    return [name for part in read for name in part.names()]


def expand_tasks(text: str, variable: str) -> list[int]:
    """The tasks on each node: `2(x3),1` is 2, 2, 2, 1.

    Args:
        variable: where the text is from; errors name it.

    Raises:
        TfparError: another form, or numbers for more than `MOST_NODES` nodes.
    """
    entry = re.compile(rf"{_NUMBER}(?:\(x{_NUMBER}\))?", re.ASCII)
    matches = [entry.fullmatch(item) for item in text.split(",")]
    pairs = [(int(m[1]), int(m[2] or 1)) for m in matches if m]
    if len(pairs) < len(matches):
        raise _unreadable(text, variable)
    _check_count(sum(times for _, times in pairs), text, variable)
    return [count for count, times in pairs for _ in range(times)]


def _part(part: str, text: str, variable: str) -> _Part:
    pieces = re.split(r"\[([^\]]*)\]", part)
    numbers = [tuple(_range(item, text, variable) for item in p.split(",")) for p in pieces[1::2]]
    return _Part(tuple(pieces[::2]), tuple(numbers))


def _range(item: str, text: str, variable: str) -> _Range:
    match = re.fullmatch(rf"{_NUMBER}(?:-{_NUMBER})?", item, re.ASCII)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise _unreadable(text, variable)
    return _Range(int(match[1]), int(match[2] or match[1]), len(match[1]))


def _check_count(count: int, text: str, variable: str) -> None:
    if count > MOST_NODES:
        raise TfparError(
            f"{variable}={text[:_SHOWN]} stands for {count:,} nodes; at most {MOST_NODES:,} are "
            f"read. Name the hosts with -H."
        )


def _unreadable(text: str, variable: str) -> TfparError:
    return TfparError(f"{variable}={text[:_SHOWN]} cannot be read. Name the hosts with -H.")
