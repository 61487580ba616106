"""Grouping of names that differ in one number, so that repeated blocks are shown once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(\d+)")

MOST_GROUPS = 12
"""How many groups are shown: a model's unlike layers are seldom more."""


def format_name_groups(names: Iterable[str]) -> str:
    """`'block_0..block_11/fc1/kernel' (12), 'head/kernel'`: each group, and how many it is."""
    groups = group_names(names)
    shown = [_text(group) for group in groups[:MOST_GROUPS]]
    left = len(groups) - len(shown)
    return ", ".join(shown) + (f" and {left} more such groups" if left else "")


def group_names(names: Iterable[str]) -> list[list[str]]:
    """The names by what they are but for one number, each group in the order of that number.

    Of several numbers that differ, the one with most values varies within a group. A part without a
    number at its end is the first of those with one, as Keras counts them: `dense`, `dense_1`.
    """
    alike: dict[tuple[str, ...], dict[tuple[int, ...], str]] = defaultdict(dict)
    for name in names:
        texts, numbers = _parts(name)
        alike[texts][numbers] = name
    found = []
    for members in alike.values():
        values = [set(column) for column in zip(*members, strict=True)]
        varies = max(range(len(values)), key=lambda i: (len(values[i]), -i))
        apart: dict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
        for numbers, name in members.items():
            others = (*numbers[:varies], *numbers[varies + 1 :])
            apart[others].append((numbers[varies], name))
        found += [[name for _, name in sorted(group)] for group in apart.values()]
    return found


def _parts(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split a name into texts and the numbers between; -1 where a part ends without one."""
    texts: list[str] = []
    numbers: list[int] = []
    for part in name.split("/"):
        counted = part if re.search(r"_\d+$", part) else f"{part}_"
        pieces = _NUMBER.split(counted)
        texts += pieces[::2]
        numbers += map(int, pieces[1::2])
        if counted != part:
            numbers.append(-1)
            texts.append("")
    return tuple(texts), tuple(numbers)


def _text(group: Sequence[str]) -> str:
    if len(group) <= 2:  # a range would say less, and is hardly shorter
        return ", ".join(map(repr, group))
    first, last = group[0].split("/"), group[-1].split("/")
    parts = (a if a == b else f"{a}..{b}" for a, b in zip(first, last, strict=True))
    return f"{'/'.join(parts)!r} ({len(group)})"
