"""Files with something changed in them, as hypothesis strategies."""

from __future__ import annotations

import copy
import math
from typing import Any

from hypothesis import strategies as st

ODD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    10**400,
    0.5,
    -0.0,
    1e308,
    1e-320,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "x",
    "S(9)",
    "S(0/0)",
    "S(0*0)",
    "R",
    "P(sum)",
    "R,R,R,R",
    "inf",
    "1e999",
    "1e999999999",
    "-1 GB",
    "5 us",
    "data",
    [],
    [[]],
    [None],
    ["x", 1],
    {},
    {"x": None},
    {"spec": "R"},
    "\ud800",
    "\n",
    "[/b]",
]


def paths(tree: Any, path: tuple = ()) -> list[tuple]:
    """The way to every value of nested lists and dicts."""
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        below = (*path, key)
        found += paths(value, below) if isinstance(value, dict | list) and value else [below]
    return found


@st.composite
def mutated(draw: st.DrawFn, tree: Any) -> Any:
    """`tree` with one to three values replaced, left out, doubled, swapped or renamed."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        known = paths(tree)
        if not known:
            break
        *way, last = draw(st.sampled_from(known))
        inside = tree
        for key in way:
            inside = inside[key]
        what = draw(st.sampled_from(["replace", "replace", "nudge", "drop", "double", "swap"]))
        value = inside[last]
        if what == "drop":
            del inside[last]
        elif what == "double" and isinstance(inside, list):
            inside.insert(last, copy.deepcopy(value))
        elif what == "double":
            inside[f"{last}x"] = value
        elif what == "swap":
            other = draw(st.sampled_from(list(inside) if isinstance(inside, dict) else inside))
            inside[last] = copy.deepcopy(inside[other] if isinstance(inside, dict) else other)
        elif what == "nudge" and type(value) in (int, float):
            inside[last] = draw(st.sampled_from([-value, value + 1, value * 10**9, value // 2]))
        elif what == "nudge" and isinstance(value, str) and value:
            at = draw(st.integers(0, len(value) - 1))
            inside[last] = value[:at] + draw(st.sampled_from("0/*(),RSx ")) + value[at + 1 :]
        else:
            inside[last] = copy.deepcopy(draw(st.sampled_from(ODD)))
    return tree


@st.composite
def mutated_text(draw: st.DrawFn, text: str) -> str:
    """`text` with a piece cut out, doubled, or overwritten."""
    begin = draw(st.integers(0, len(text) - 1))
    end = min(len(text), begin + draw(st.integers(1, 40)))
    put = draw(st.sampled_from(["", text[begin:end] * 2, "9" * 5000, "[" * 5000, '"', "\0", "é"]))
    return text[:begin] + put + text[end:]
