"""Units with names, and chains of them."""

from __future__ import annotations

from tfpar.planning.inter_op.stages.units import Flow, Unit, UnitGraph

TOLERANCES = (0.0, 0.1, 0.5)


def units(*seconds: float, **stages: int) -> tuple[Unit, ...]:
    """Named a, b, ...; some in given stages."""
    names = [chr(ord("a") + i) for i in range(len(seconds))]
    return tuple(Unit(n, s, stage=stages.get(n)) for n, s in zip(names, seconds, strict=True))


def chain(*seconds: float, num_bytes: float = 1.0, **stages: int) -> UnitGraph:
    flows = tuple(Flow(i, (i + 1,), num_bytes) for i in range(len(seconds) - 1))
    return UnitGraph(units(*seconds, **stages), flows)
