"""Small models and clusters for the tests of 3-D strategies."""

from __future__ import annotations

from tfpar.cluster import Cluster, Device, Level, Node
from tfpar.planning.inter_op.three_d.cost_table import LayerCostTable, LayerType, Passes, ProfileKey

DEGREES = (1, 2, 4)
SIZES = (1, 2, 4, 8)


def device(name: str, memory_bytes: float = 1e12) -> Device:
    return Device({"float32": 1e12}, memory_bytes, 1e12, name=name)


def cluster(*nodes: tuple[str, int, float, float], memory_bytes: float = 1e12, **fields) -> Cluster:
    """Nodes of (device, how many of them, bytes/s within, bytes/s between)."""
    found = tuple(
        Node(
            device(name, memory_bytes),
            (Level(count, inside, 0.0),) if count > 1 else (),
            uplink=outside,
        )
        for name, count, inside, outside in nodes
    )
    levels = (Level(len(nodes), max(n[3] for n in nodes), 0.0),) if len(nodes) > 1 else ()
    return Cluster("small", found, levels, algorithms=("ring",), **fields)


def kind(speeds: dict[str, float], seconds: float = 1.0, **fields) -> LayerType:
    """A layer of which a sample takes so long forward and twice that backward, at speed 1, however
    its experts are spread if it has some."""
    return LayerType(
        {
            ProfileKey(name, tensor, size, experts): Passes(
                seconds * size / tensor / speed, 2 * seconds * size / tensor / speed
            )
            for name, speed in speeds.items()
            for tensor in DEGREES
            for size in SIZES
            for experts in (DEGREES if fields.get("experts") else (1,))
        },
        **fields,
    )


def equal_layers(count: int, speeds: dict[str, float], **fields) -> LayerCostTable:
    return LayerCostTable({"block": kind(speeds, **fields)}, ("block",) * count)
