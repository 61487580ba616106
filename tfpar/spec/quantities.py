"""Amounts: as types that files are read by, and as text, the same in errors, summaries and logs."""

from __future__ import annotations

import math
import sys
from typing import Annotated

import msgspec

Amount = Annotated[
    float, msgspec.Meta(ge=0, le=sys.float_info.max, description="a finite number, 0 or more")
]
"""Seconds, bytes and what else has no sign."""

Count = Annotated[
    int, msgspec.Meta(ge=0, le=2**63 - 1, description="a whole number, 0 or more, below 2^63")
]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float) -> str:
    """Write `1.50 MiB` (1 MiB is 1024 KiB), rounded up: what is printed, given as a limit, is
    enough."""
    if math.isinf(count):
        return "inf B"
    whole = math.ceil(count)
    power = min(max(whole.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if power == 0:
        return f"{whole} B"
    hundredths = -(-100 * whole // 1024**power)
    return f"{hundredths // 100}.{hundredths % 100:02d} {_UNITS[power]}"


def format_dollars(amount: float) -> str:
    """Write `$1.25`; below ten cents in two significant digits."""
    return f"${amount:,.2f}" if amount == 0 or amount >= 0.1 else f"${amount:.2g}"


def format_seconds(seconds: float) -> str:
    """Write `1.25 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            break
    return f"{seconds / scale:.2f} {unit}"
