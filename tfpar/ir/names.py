"""Matching of a model's variables with names that were written down elsewhere.

Keras names a variable by the scopes that were open when it was built, so that one weight has
several names: `net/a/kernel` in a Sequential model built by code, `a/kernel` once that came
through `load_model`. A variable is therefore known by its *path* and by its *place*: the names of
the layers that hold it, from the model on. Plans and checkpoints are matched by `pair`, constraints
by `user_names`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_REPEATED = re.compile(r"#\d+$")
_COUNT = re.compile(r"_(\d+)$")


class VariableName(NamedTuple):
    """Names of a variable.

    Attributes:
        path: unique in its step; Keras's.
        trainable: whether it is a weight.
        place: the layers that hold it, from the model on, and its own name; empty where that is
            not known.
    """

    path: str
    trainable: bool
    place: str = ""


def user_names(name: str, place: str) -> tuple[str, ...]:
    """Return the names by which a user may call a variable."""
    return (name, place) if place and place != name else (name,)


def pair(
    written: Iterable[str], places: Mapping[str, str], counted: Iterable[str] = ()
) -> dict[str, str]:
    """Return the name that each of the `written` names has now, where there is no doubt.

    Equal names are one variable. Of the others, a name is that of the variable whose place or path
    has most of its last parts, if one is the end of the other: `net/a/kernel` is `a/kernel`. An
    optimizer's slot goes with its weight. Where two variables could be meant, or none, the name is
    left out.

    Args:
        written: of all variables of a plan or a checkpoint.
        places: of all variables of the model, by path.
        counted: those of the model's paths that are numbered by when they were made in a process
            (seeds, metrics): what is left of them is paired in that order.
    """
    written = list(written)
    repeated = {_plain(n) for n in _differently_repeated(written, places)}
    pairs = {n: n for n in written if n in places and _plain(n) not in repeated}
    keys, wanted = _keys(written, {}), _keys(places, places)
    left = {n: wanted[n] for n in places if n not in pairs}
    for name in sorted(set(written) - set(pairs), key=lambda n: (-len(keys[n]), n)):
        found = _best(keys[name], left)
        if found is not None:
            pairs[name] = found
            del left[found]
    pairs.update(_in_order([n for n in written if n not in pairs], left.keys() & set(counted)))
    return pairs


def _differently_repeated(written: Iterable[str], now: Iterable[str]) -> set[str]:
    """Names numbered because several variables have one path, on one side only.

    Which of them came first depends on who else is called so.
    """
    return {n for n in written if _number(n)} ^ {n for n in now if _number(n)}


def _keys(names: Iterable[str], places: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The parts of each name, without the model's own where its place is known.

    Those of a slot (`adam/net_a_kernel_velocity`) are its weight's, and one more.
    """
    parts, weights = {}, {}
    for name in names:
        place = places.get(name, "").partition("/")[2]
        parts[name] = tuple((place or _plain(name)).split("/"))
        weights[_plain(name).replace("/", "_") + _number(name)] = name
    keys = dict(parts)
    for name in parts:
        owner, _, slot = _plain(name).partition("/")
        words = slot.split("_")
        for end in range(len(words) - 1, 0, -1):
            weight = weights.get("_".join(words[:end]) + _number(name))
            if weight is not None:
                kind = f"{_COUNT.sub('', owner)} {'_'.join(words[end:])}"
                keys[name] = (*parts[weight], kind)
                break
    return keys


def _plain(name: str) -> str:
    """`name` without the number that tells it from others of the same path."""
    return _REPEATED.sub("", name)


def _number(name: str) -> str:
    return name[len(_plain(name)) :]


def _best(key: Sequence[str], candidates: Mapping[str, Sequence[str]]) -> str | None:
    """The one candidate that has most of the last parts of `key`; None if several have."""
    shared: dict[int, list[str]] = defaultdict(list)
    for name, other in candidates.items():
        count = min(len(key), len(other))
        if tuple(key[-count:]) == tuple(other[-count:]):
            shared[count].append(name)
    if not shared:
        return None
    best = shared[max(shared)]
    exact = [n for n in best if tuple(candidates[n]) == tuple(key)]
    best = exact or best
    return best[0] if len(best) == 1 else None


def _in_order(written: Iterable[str], now: Iterable[str]) -> dict[str, str]:
    """Pairs of names that differ in their numbers alone, each side in the order of these."""
    groups: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, names in enumerate((written, now)):
        for name in names:
            alike = "/".join(_COUNT.sub("", part) for part in name.split("/"))
            groups[alike][side].append(name)
    pairs: dict[str, str] = {}
    for before, after in groups.values():
        if len(before) == len(after):
            pairs.update(
                zip(sorted(before, key=_numbers), sorted(after, key=_numbers), strict=True)
            )
    return pairs


def _numbers(name: str) -> list[int]:
    found = (_COUNT.search(part) for part in name.split("/"))
    return [int(number[1]) if number else -1 for number in found]
