"""A simple description of the machines: devices, nodes and two levels of links.

What the cost model of TAP §IV-F needs, in seconds, bytes and operations (no milli, no giga).
Collectives ask a cluster for the link of a group of ranks (`link_of`), never for its fields, so
that a fuller topology can take this one's place.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from tfpar.spec import Mesh, TfparError


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator, or a rank's share of a CPU.

    Attributes:
        flops: FLOP/s that large matrix products reach, in single precision.
        half_flops: the same for 16-bit results.
        memory_bytes: what fits, in bytes.
        memory_bandwidth: bytes/s between memory and arithmetic, read and written together.
        launch_s: time before an op starts, in seconds.
    """

    flops: float
    half_flops: float
    memory_bytes: float
    memory_bandwidth: float
    launch_s: float


@dataclasses.dataclass(frozen=True)
class Link:
    """What one rank sees of a network.

    Attributes:
        bandwidth: bytes/s each way.
        latency_s: seconds a message takes to start.
    """

    bandwidth: float
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices; rank `r` is device `r % devices_per_node` of its node.

    Attributes:
        intra: the link of one device to its peers in the node.
        inter: the link of one node to the others; its devices share it.
        overlap: what part of a device's arithmetic goes on while it communicates, 0 to 1.

    Raises:
        TfparError: a size below 1, a rate that is not above 0, a negative time, or an `overlap`
            outside of 0 to 1.
    """

    name: str
    nodes: int
    devices_per_node: int
    device: Device
    intra: Link
    inter: Link
    overlap: float = 1.0

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise TfparError(
                f"Cluster {self.name!r} has {self.nodes} nodes of {self.devices_per_node} "
                f"devices; both are at least 1."
            )
        for where, part in (
            ("device", self.device), ("intra", self.intra), ("inter", self.inter)
        ):  # fmt: skip
            for key, value in dataclasses.asdict(part).items():
                what = f"Cluster {self.name!r}: {where}.{key} is {value}; it must be"
                if key in ("launch_s", "latency_s"):
                    if not 0 <= value < math.inf:
                        raise TfparError(f"{what} a time in seconds, 0 or more.")
                elif not value > 0:
                    raise TfparError(f"{what} above 0.")
        if not 0 <= self.overlap <= 1:
            raise TfparError(
                f"Cluster {self.name!r}: overlap is {self.overlap}; it must be from 0 (a device "
                f"waits for its communication) to 1 (it computes on)."
            )

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    def check(self, mesh: Mesh) -> None:
        """Raise TfparError if `mesh` has more ranks than there are devices."""
        if mesh.size > self.size:
            raise TfparError(
                f"The mesh {mesh} has {mesh.size} ranks, but cluster {self.name!r} has "
                f"{self.size} devices ({self.nodes} nodes of {self.devices_per_node}). Use a "
                f"smaller mesh, or describe a larger cluster."
            )

    def link_of(self, mesh: Mesh, axes: tuple[int, ...], pairwise: bool = False) -> Link:
        """What a rank sees of the network when all groups along `axes` communicate at once.

        Groups that stay within nodes have the intra-node link. Those that cross nodes have
        their share of the node's link: groups side by side in a node divide it. The slowest
        group counts, as all are waited for.

        Args:
            pairwise: each rank sends to all others (an all-to-all) and not along a ring, which
                enters and leaves a node once: then the members of a group in a node divide
                the node's link too.
        """
        return _link_of(self, mesh, axes, pairwise)

    def fingerprint(self) -> str:
        """A hash of everything that a cost depends on (not the name)."""
        fields = dataclasses.asdict(self)
        del fields["name"]
        # 12000000000 and 1.2e10 are one bandwidth.
        text = json.dumps(fields | {p: _floats(fields[p]) for p in ("device", "intra", "inter")})
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @classmethod
    def of(cls, value: Cluster | Mapping[str, Any] | str, mesh: Mesh | None = None) -> Cluster:
        """A cluster from itself, a mapping of its fields, a preset's name or a JSON file.

        Args:
            mesh: gives a preset its number of nodes and devices: the first axis counts nodes where
                there are several axes. Without it a preset is one device.

        Raises:
            TfparError: unknown name, unreadable file, or wrong fields.
        """
        if isinstance(value, Cluster):
            return value
        if isinstance(value, str):
            if value in PRESETS:
                return PRESETS[value](*_grid(mesh))
            value = _read(value)
        if not isinstance(value, Mapping):
            raise TfparError(
                f"Not a cluster description: {value!r} is of type {type(value).__name__}. {_FIELDS}"
            )
        known = [f.name for f in dataclasses.fields(cls)]
        _check_fields("the cluster", value, known, optional=("name", "overlap"))
        return cls(
            name=str(value.get("name", "unnamed")),
            nodes=_count("nodes", value["nodes"]),
            devices_per_node=_count("devices_per_node", value["devices_per_node"]),
            device=_part("device", Device, value["device"]),
            intra=_part("intra", Link, value["intra"]),
            inter=_part("inter", Link, value["inter"]),
            overlap=_number("overlap", value.get("overlap", 1.0)),
        )


_FIELDS = (
    "It has name, nodes, devices_per_node, device (flops, half_flops, memory_bytes, "
    "memory_bandwidth, launch_s), intra and inter (bandwidth, latency_s), and may have overlap."
)

_Part = TypeVar("_Part", Device, Link)


def _part(where: str, cls: type[_Part], value: Any) -> _Part:
    names = [f.name for f in dataclasses.fields(cls)]
    _check_fields(repr(where), value, names)
    return cls(**{name: _number(f"{where}.{name}", value[name]) for name in names})


def _check_fields(where: str, value: Any, names: list[str], optional: tuple[str, ...] = ()) -> None:
    problem = ""
    if not isinstance(value, Mapping):
        problem = f"{where} is {value!r}"
    elif missing := [n for n in names if n not in value and n not in optional]:
        problem = f"{where} lacks {', '.join(map(repr, missing))}"
    elif unknown := [n for n in value if n not in names]:
        problem = f"{where} has no field {', '.join(map(repr, unknown))}"
    if problem:
        raise TfparError(f"Not a cluster description: {problem}. {_FIELDS}")


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TfparError(f"Not a cluster description: {what} is {value!r}, not a number. {_FIELDS}")
    return float(value)


def _count(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TfparError(
            f"Not a cluster description: {what} is {value!r}, not a whole number. {_FIELDS}"
        )
    return value


def _floats(fields: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in fields.items()}


@functools.lru_cache(maxsize=4096)
def _link_of(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...], pairwise: bool) -> Link:
    per_node = cluster.devices_per_node
    if mesh.size <= per_node:
        return cluster.intra
    crossing: dict[int, float] = {}  # node -> how many times over its link is used
    for group in mesh.groups(axes):
        homes = collections.Counter(rank // per_node for rank in group)
        if len(homes) == 1:
            continue
        size = len(group)
        for home, members in homes.items():
            # Of what a member sends to the size - 1 others, size - members leave the node.
            uses = members * (size - members) / (size - 1) if pairwise else 1
            crossing[home] = crossing.get(home, 0) + uses
    if not crossing:
        return cluster.intra
    bandwidth = cluster.inter.bandwidth / max(crossing.values())
    return Link(
        min(cluster.intra.bandwidth, bandwidth),
        max(cluster.intra.latency_s, cluster.inter.latency_s),
    )


def _grid(mesh: Mesh | None) -> tuple[int, int]:
    """(nodes, devices per node) that a mesh such as `split([2, 8])` stands for."""
    if mesh is None:
        return 1, 1
    if mesh.num_axes == 1:
        return 1, mesh.size
    return mesh.shape[0], mesh.size // mesh.shape[0]


def _read(path: str) -> Mapping[str, Any]:
    if not os.path.exists(path):
        raise TfparError(
            f"There is no cluster {path!r}: neither a file nor one of "
            f"{', '.join(map(repr, sorted(PRESETS)))}."
        )
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise TfparError(f"Cannot read the cluster file {path!r}: {error}.") from None


def _v100_ethernet(nodes: int, per_node: int) -> Cluster:
    """TAP §IV-F and §V-A: V100 SXM2 32 GB, PCIe in the node, 32 Gb/s Ethernet between nodes.

    Nvidia gives 15.7 TFLOP/s (single) and 125 (half precision, tensor cores); four fifths and
    half of them are what large products reach.
    """
    return Cluster(
        "v100-ethernet", nodes, per_node,
        Device(12.5e12, 62e12, 32e9, 0.9e12, 5e-6),
        Link(12e9, 10e-6), Link(4e9, 50e-6),
    )  # fmt: skip


def _v100_nvlink(nodes: int, per_node: int) -> Cluster:
    """The same GPUs with NVLink in the node (150 GB/s each way) and 100 Gb/s between nodes."""
    return dataclasses.replace(
        _v100_ethernet(nodes, per_node),
        name="v100-nvlink", intra=Link(130e9, 5e-6), inter=Link(12e9, 15e-6),
    )  # fmt: skip


def _a100(nodes: int, per_node: int) -> Cluster:
    """A100 80 GB, NVLink 3 (300 GB/s each way) and 8 x 200 Gb/s InfiniBand a node."""
    return Cluster(
        "a100", nodes, per_node,
        Device(100e12, 200e12, 80e9, 2.0e12, 4e-6),
        Link(240e9, 4e-6), Link(180e9, 8e-6),
    )  # fmt: skip


def _cpu(nodes: int, per_node: int) -> Cluster:
    """Ranks that share this machine's cores and memory, as virtual CPU devices do.

    30 GFLOP/s a core, 8 GB/s of memory traffic a core (empirical, common servers); an op of
    TensorFlow costs some 10 us.
    """
    cores, ranks = os.cpu_count() or 1, nodes * per_node
    share = cores / ranks
    link = Link(3e9, 20e-6)
    return Cluster(
        "cpu", nodes, per_node,
        Device(30e9 * share, 30e9 * share, _host_memory() / ranks, 8e9 * share, 10e-6),
        link, link, overlap=0.0,
    )  # fmt: skip


def _cpu_processes(nodes: int, per_node: int) -> Cluster:
    """CPU ranks that are processes, some of them on one machine.

    Those talk through its loopback at 1 GB/s, machines through Ethernet of 10 Gbit/s. A round takes
    0.8 ms, most of it waiting for Horovod's next cycle (measured with Gloo on 2 cores), and more
    where ranks have to wait for a core.
    """
    cores = os.cpu_count() or 1
    share = cores / per_node
    latency = 0.8e-3 * max(1.0, 1.0 / share)
    return Cluster(
        "cpu-processes", nodes, per_node,
        Device(30e9 * share, 30e9 * share, _host_memory() / per_node, 8e9 * share, 10e-6),
        Link(1e9, latency), Link(1e9, latency), overlap=0.0,
    )  # fmt: skip


def _host_memory() -> float:
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return 16e9


PRESETS = {
    "a100": _a100, "cpu": _cpu, "cpu-processes": _cpu_processes,
    "v100-ethernet": _v100_ethernet, "v100-nvlink": _v100_nvlink,
}  # fmt: skip
"""By name: (nodes, devices per node) -> Cluster."""
