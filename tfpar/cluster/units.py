"""Quantities as people write them, `"600 GB/s"`, `"5 us"`, to base units and back.

Bytes, bytes/s, seconds, FLOP/s. A plain number is in base units. `b` is a bit and `B` a byte; `M`
is 10^6 and `Mi` 2^20, wherever sizes are read or printed.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from tfpar.spec.arguments import is_number, shown

# Exact, so that 10 us is 1e-5 and not its neighbour.
_ONE = Fraction(1)
_PREFIXES = {p: _ONE * 10**e for p, e in dict(k=3, K=3, M=6, G=9, T=12, P=15).items()} | {"": _ONE}
_BINARY = {p: _ONE * 2**e for p, e in dict(Ki=10, Mi=20, Gi=30, Ti=40, Pi=50).items()}
_TIMES = {u: _ONE / 10**e for u, e in {"s": 0, "ms": 3, "us": 6, "µs": 6, "ns": 9}.items()}

_SIZES = {f"{p}B": n for p, n in (_PREFIXES | _BINARY).items()}
_BITS = {f"{p}{b}": n / 8 for p, n in _PREFIXES.items() for b in ("b", "bit")}
_RATES = {f"{unit}/s": n for unit, n in (_SIZES | _BITS).items()}
_RATES |= {f"{p}bps": n / 8 for p, n in _PREFIXES.items()}
_FLOPS = {f"{p}{f}": n for p, n in _PREFIXES.items() for f in ("FLOP/s", "FLOPS", "FLOPs")}

UNITS = {"bytes": _SIZES, "bytes/s": _RATES, "seconds": _TIMES, "FLOP/s": _FLOPS, "": {}}
"""By what is measured: unit -> how many base units it is; nothing of a mere number."""

EXAMPLES = {
    "bytes": "80 GB",
    "bytes/s": "25 GB/s or 200 Gbit/s",
    "seconds": "5 us",
    "FLOP/s": "312 TFLOP/s",
    "": "0.9",
}

_QUANTITY = re.compile(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?|[-+]?inf)\s*(\S*)\s*")


def parse(value: object, measure: str) -> float:
    """Parse `value`, a number or text such as `"600 GB/s"`, in base units of `measure`.

    Raises:
        ValueError: says what is wrong, without saying where.
    """
    if is_number(value):
        try:
            return float(value)  # type: ignore[arg-type]
        except OverflowError:
            raise ValueError(f"is {shown(value)}, which no number can hold") from None
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"is {shown(value)}, not {expected(measure)}")
    number, unit = found.groups()
    known = UNITS[measure]
    if unit and unit not in known:
        raise ValueError(f"is {shown(value)}: {shown(unit)} is no unit of {expected(measure)}")
    if number.endswith("inf"):
        return float(number)
    try:
        if _is_huge(number):
            raise OverflowError
        return float(Fraction(number) * known.get(unit, _ONE))
    except OverflowError:
        raise ValueError(f"is {shown(value)}, which no number can hold") from None
    except ValueError:
        raise ValueError(f"is {shown(value)}, not {expected(measure)}") from None


def _is_huge(number: str) -> bool:
    """Whether its exponent is beyond all floats: its fraction would have as many digits."""
    return abs(int(re.split("[eE]", number + "e0")[1])) > 400


def expected(measure: str) -> str:
    """Say in words what `parse` reads."""
    return f"{measure or 'a number'} such as {EXAMPLES[measure]}"


_WRITTEN = {
    "bytes": {f"{p}B": n for p, n in _PREFIXES.items() if p != "K"},
    "bytes/s": {f"{p}B/s": n for p, n in _PREFIXES.items() if p != "K"},
    "FLOP/s": {f"{p}FLOP/s": n for p, n in _PREFIXES.items() if p != "K"},
    "seconds": {u: n for u, n in _TIMES.items() if u.isascii()},
}


def write(value: float, measure: str) -> str | float:
    """Write the text for which `parse` gives `value`, in the largest unit that it fills; else
    `value`, or the word for infinity, which is no number of JSON."""
    known = _WRITTEN.get(measure, {})
    filled = [unit for unit in known if known[unit] <= abs(value)]
    if math.isinf(value):
        return "inf"
    if not filled:
        return value
    unit = max(filled, key=known.__getitem__)
    text = f"{float(Fraction(value) / known[unit]):.12g} {unit}"
    return text if parse(text, measure) == value else value
