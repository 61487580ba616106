"""Time that devices wait for their hosts, which issue their ops one by one (`Device.dispatch_s`).

A host runs ahead of its device (CUDA C++ Programming Guide, asynchronous concurrent execution): the
longer of the two counts, and a part of the shorter.
"""

from __future__ import annotations

from collections.abc import Sequence

UNHIDDEN = 0.1
"""The part of the shorter of what hosts issue and what devices run that is not hidden behind the
longer, so that less work for devices is always less time. Of 0, 0.05, 0.1, 0.15, 0.2 and 0.3 it
predicts the steps best that constants may be fitted to (`benchmarks.measured_steps`): 6.2 % off on
average, 7.9 % with 0."""


def waiting_for_host(dispatch_s: float, running_s: float) -> float:
    """Find how long a device waits for its host, which issues ops for `dispatch_s` seconds while
    the device needs `running_s` for them."""
    return max(0.0, dispatch_s - running_s) + UNHIDDEN * min(dispatch_s, running_s)


def issued_in_order(layers: Sequence[tuple[int, float, float]]) -> float:
    """Return the seconds of layers whose ops a host issues one by one, each of which a device runs
    once it is issued and those before it have run.

    A device that waits for layer k at last takes T = max_k (sum_{j < k} h_j + sum_{j >= k} r_j),
    which of equal layers is largest at the first or behind the last of them.

    Args:
        layers: how many are equal, the seconds r_j that one runs, and those h_j in which its ops
            are issued.
    """
    whole = running = sum(count * runs for count, runs, _ in layers)
    found, issued = running, 0.0
    for count, runs, issues in layers:
        issued += count * issues
        running -= count * runs
        found = max(found, issued + running)
    return found + UNHIDDEN * min(issued, whole)
