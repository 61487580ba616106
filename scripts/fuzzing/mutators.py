"""Mutations of files: of their bytes, of their lines, and of what their JSON holds."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

Random = random.Random

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, 1e-320),
    *(float("inf"), float("-inf"), float("nan"), "", "x", "\0", "\ud800", "\n", "[/b]", "é" * 3000),
    *("S(9)", "S(0/0)", "S(0*0)", "R", "P(sum)", "R,R,R,R", "inf", "1e999", "1e999999999"),
    *("-1 GB", "5 us", "data", "../x", "9" * 5000, [], [[]], [None], ["x", 1], {}, {"x": None}),
    *({"spec": "R"}, {"": {"": []}}),
)
"""Values that a file may hold in place of others."""

TOKENS: tuple[bytes, ...] = (
    *(b"", b"-1", b"0", b"nan", b"inf", b"-inf", b"1e999", b"true", b"''", b'""', b"[]", b"{}"),
    *(
        b"[[]]",
        b"[1, 'x']",
        b"9" * 5000,
        b"1979-05-27T07:32:00Z",
        b'"1e999 GB"',
        b'"x"',
        b'"\\uD800"',
    ),
    *(b"-0F0", b"0F99999999", b"0X0", b"(0F0;0B0)OVERLAP_F_B", b"0F0,0F0", b"null", b"\xff\xfe"),
    *(b'"""', b"{x = 1}", b"[x]", b"#", b"0x10", b"1_000", b"'" + b"x" * 100_000 + b"'"),
)
"""Text that a line may hold in place of a value."""


def mutate(sample: bytes, draw: Random) -> bytes:
    """`sample` with one to three changes; of JSON mostly in what it holds."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        sample = draw.choice(_OF_JSON if _is_json(sample) else _OF_TEXT)(sample, draw)
    return sample


_NUMBER = re.compile(rb"\d+(\.\d+)?")


def _number(sample: bytes, draw: Random) -> bytes:
    """A number somewhere, made another one."""
    found = [*_NUMBER.finditer(sample)]
    if not found:
        return _bytes(sample, draw)
    one = draw.choice(found)
    put = draw.choice((b"0", b"1", b"-" + one[0], one[0] + b"0", one[0] + b"000000000", b"2", b"7"))
    return sample[: one.start()] + put + sample[one.end() :]


def _is_json(sample: bytes) -> bool:
    return sample.lstrip()[:1] in (b"{", b"[") and sample.rstrip()[-1:] in (b"}", b"]")


# --- bytes and lines ---------------------------------------------------------------------


def _bytes(sample: bytes, draw: Random) -> bytes:
    """A bit flipped, or a piece cut out, doubled or overwritten."""
    begin = draw.randrange(len(sample) + 1)
    end = min(len(sample), begin + draw.randint(1, 40))
    piece, flipped = sample[begin:end], bytearray(sample[begin:end])
    for at in range(min(1, len(flipped))):
        flipped[at] ^= 1 << draw.randrange(8)
    put = draw.choice(
        (
            *(bytes(flipped),) * 4,
            *(
                b"",
                piece * 2,
                b"9" * 5000,
                b"[" * 50_000,
                b'{"a":' * 5000,
                b'"',
                b"\0",
                b"\xff",
                b"-",
            ),
            *(b"\xef\xbb\xbf", "é".encode(), b"\r", b"\n", b"0"),
        )
    )
    if draw.random() < 0.05:
        return sample[:begin]
    return sample[:begin] + put + sample[end:]


def _lines(sample: bytes, draw: Random) -> bytes:
    """A line dropped, doubled or swapped with another."""
    lines = sample.splitlines(keepends=True) or [b""]
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    what = draw.choice(("drop", "double", "swap"))
    if what == "drop":
        del lines[one]
    elif what == "double":
        lines.insert(other, lines[one])
    else:
        lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def _tokens(sample: bytes, draw: Random) -> bytes:
    """The key or the value of a line, or a cell of it, replaced."""
    lines = sample.split(b"\n")
    at = draw.randrange(len(lines))
    token = draw.choice(TOKENS)
    for separator in (b"=", b":", b","):
        if separator in lines[at]:
            cells = lines[at].split(separator)
            cells[draw.choice((0, len(cells) - 1, len(cells) - 1))] = b" " + token
            lines[at] = separator.join(cells)
            break
    else:
        lines[at] = token
    return b"\n".join(lines)


_OF_TEXT = (_bytes, _lines, _tokens, _number, _number)


# --- JSON --------------------------------------------------------------------------------


def _tree(sample: bytes, draw: Random) -> bytes:
    """One value of a JSON text replaced, nudged, dropped, doubled, swapped, renamed or buried."""
    try:
        tree = json.loads(sample)
    except (ValueError, RecursionError):
        return _bytes(sample, draw)
    known = _paths(tree)
    if not known:
        return _bytes(sample, draw)
    *way, last = draw.choice(known)
    inside = tree
    for key in way:
        inside = inside[key]
    _CHANGES[draw.choice([*_CHANGES, "replace", "nudge"])](inside, last, draw)
    try:
        return json.dumps(tree, indent=draw.choice((None, 1))).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return _bytes(sample, draw)


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of nested lists and dicts."""
    found = [path] if path else []
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            found += _paths(value, (*path, key))
    return found


def _replace(inside: Any, last: Any, draw: Random) -> None:
    inside[last] = copy.deepcopy(draw.choice(ODD))


def _nudge(inside: Any, last: Any, draw: Random) -> None:
    value = inside[last]
    if isinstance(value, str) and value:
        at = draw.randrange(len(value))
        inside[last] = value[:at] + draw.choice("0/*(),RSx ") + value[at + 1 :]
    elif type(value) in (int, float):
        inside[last] = draw.choice([-value, value + 1, value * 10**9, value // 2, str(value)])
    else:
        _replace(inside, last, draw)


def _drop(inside: Any, last: Any, draw: Random) -> None:
    del inside[last]


def _double(inside: Any, last: Any, draw: Random) -> None:
    if isinstance(inside, list):
        inside.insert(last, copy.deepcopy(inside[last]))
    else:
        inside[f"{last}x"] = inside[last]


def _swap(inside: Any, last: Any, draw: Random) -> None:
    others = list(inside.values()) if isinstance(inside, dict) else inside
    inside[last] = copy.deepcopy(draw.choice(others))


def _rename(inside: Any, last: Any, draw: Random) -> None:
    if isinstance(inside, dict):
        inside[draw.choice(("", "x", "format", "\0", "é"))] = inside.pop(last)


def _bury(inside: Any, last: Any, draw: Random) -> None:
    for _ in range(draw.choice((1, 3, 300))):
        inside[last] = [inside[last]]


_CHANGES: dict[str, Callable[[Any, Any, Random], None]] = {
    "replace": _replace,
    "nudge": _nudge,
    "drop": _drop,
    "double": _double,
    "swap": _swap,
    "rename": _rename,
    "bury": _bury,
}

_OF_JSON = (_bytes, _lines, _tokens, _number, _number, _tree, _tree, _tree)
