"""What the operating system says that this process has in memory. Linux."""

from __future__ import annotations

import ctypes
import gc


def resident(key: str) -> int:
    """`VmHWM` (the most since `forget_peak`) or `VmRSS` (now), in bytes."""
    with open("/proc/self/status", encoding="utf-8") as status:
        (line,) = (line for line in status if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    """Give back what is free, and begin a new peak; the bytes that are resident then."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as peaks:
        peaks.write("5")
    return resident("VmRSS")
