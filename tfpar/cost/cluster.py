"""A simple description of the machines: devices, nodes and two levels of links.

What the cost model of TAP §IV-F needs. Collectives ask a cluster for the link of a group of
ranks (`link_of`), never for its fields, so that a fuller topology can take this one's place.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from tfpar.spec import Mesh, TfparError


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator, or a rank's share of a CPU.

    Attributes:
        flops: FLOP/s that large matrix products reach, in single precision.
        half_flops: the same for 16-bit operands.
        memory_bytes: what fits.
        memory_bandwidth: bytes/s between memory and arithmetic.
        launch_s: time before an op starts, in seconds.
    """

    flops: float
    half_flops: float
    memory_bytes: float
    memory_bandwidth: float
    launch_s: float


@dataclasses.dataclass(frozen=True)
class Link:
    """What one rank sees of a network: `bandwidth` in bytes/s, `latency_s` in seconds a message."""

    bandwidth: float
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices; rank `r` is device `r % devices_per_node` of its node.

    Attributes:
        intra: the link of one device to its peers in the node.
        inter: the link of one node to the others; its devices share it.
        overlap: how much of a device's arithmetic goes on while it communicates, 0 to 1.
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
        for what, value in (
            ("device.flops", self.device.flops),
            ("device.half_flops", self.device.half_flops),
            ("device.memory_bytes", self.device.memory_bytes),
            ("device.memory_bandwidth", self.device.memory_bandwidth),
            ("intra.bandwidth", self.intra.bandwidth),
            ("inter.bandwidth", self.inter.bandwidth),
        ):
            if not value > 0:
                raise TfparError(f"Cluster {self.name!r}: {what} is {value}; it must be above 0.")

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

    def link_of(self, mesh: Mesh, axes: tuple[int, ...]) -> Link:
        """What a rank sees of the network when all groups along `axes` communicate at once.

        A group that stays within nodes has the intra-node link. One that crosses nodes has
        its share of the node's link: groups side by side in a node divide it.
        """
        return _link_of(self, mesh, axes)

    def fingerprint(self) -> str:
        """A hash of everything that a cost depends on (not the name)."""
        fields = dataclasses.asdict(self)
        del fields["name"]
        return hashlib.blake2b(json.dumps(fields).encode(), digest_size=8).hexdigest()

    @classmethod
    def of(cls, value: Cluster | Mapping[str, Any] | str, mesh: Mesh | None = None) -> Cluster:
        """A cluster from itself, a mapping of its fields, a preset's name or a JSON file.

        Args:
            mesh: gives a preset its number of nodes and devices: the first axis counts nodes where
                there are several.

        Raises:
            TfparError: unknown name, unreadable file, or wrong fields.
        """
        if isinstance(value, Cluster):
            return value
        if isinstance(value, str):
            if value in PRESETS:
                return PRESETS[value](*_grid(mesh))
            value = _read(value)
        try:
            return cls(
                name=str(value.get("name", "unnamed")),
                nodes=int(value["nodes"]),
                devices_per_node=int(value["devices_per_node"]),
                device=Device(**value["device"]),
                intra=Link(**value["intra"]),
                inter=Link(**value["inter"]),
                overlap=float(value.get("overlap", 1.0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TfparError(
                f"Not a cluster description: {error}. It has name, nodes, devices_per_node, "
                f"device (flops, half_flops, memory_bytes, memory_bandwidth, launch_s), intra and "
                f"inter (bandwidth, latency_s), and may have overlap."
            ) from None


@functools.lru_cache(maxsize=4096)
def _link_of(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...]) -> Link:
    per_node = cluster.devices_per_node
    if mesh.size <= per_node:
        return cluster.intra
    group = mesh.groups(axes)[0]
    homes = [rank // per_node for rank in group]
    if len(set(homes)) == 1:
        return cluster.intra
    members = max(homes.count(home) for home in set(homes))
    beside = max(per_node // members, 1)
    return Link(
        min(cluster.intra.bandwidth, cluster.inter.bandwidth / beside), cluster.inter.latency_s
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


def _host_memory() -> float:
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return 16e9


PRESETS = {
    "a100": _a100, "cpu": _cpu, "v100-ethernet": _v100_ethernet, "v100-nvlink": _v100_nvlink,
}  # fmt: skip
"""By name: (nodes, devices per node) -> Cluster."""
