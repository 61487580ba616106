"""Parts of a cluster, in seconds, bytes and operations (no milli, no giga).

A cluster is nodes of devices, joined by levels of links: ATP's hierarchy (§3.4). Ranks are its
devices in order, node by node.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfpar.cluster import check
from tfpar.spec import ArgumentError, Mesh, TfparError
from tfpar.spec.arguments import argument_error, integer

HOST_BANDWIDTH = 12e9
"""Bytes/s each way between a device and its host, where nothing is said: PCIe 3.0 with 16 lanes.

PCI-SIG gives 15.75, 31.5 and 63 GB/s for versions 3, 4 and 5 (8, 16 and 32 GT/s a lane, 128b/130b
code); three quarters of that are what long copies of pinned memory reach.
"""

HOST_LATENCY_S = 10e-6
"""Seconds until such a copy starts (a guess: a launch and an event on two streams)."""


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator, or a rank's share of a CPU.

    Attributes:
        flops: FLOP/s that large matrix products reach, by dtype; `float32` at least.
        memory_bytes: what fits, in bytes.
        memory_bandwidth: bytes/s between memory and arithmetic, read and written together.
        launch_s: time before an op starts, in seconds.
        half_size: length of a matrix's side at which a product reaches half of `flops`.
        functions_per_s: exponentials, logarithms and the like a second; None: as many as memory
            feeds (so on GPUs).
        host_bandwidth: bytes/s each way between its memory and that of its host; `inf` where these
            are one memory, as a CPU's.
        host_latency_s: seconds until a copy between them starts.
        dispatch_s: seconds in which its host issues an op, while the device computes: where that
            takes longer, the device waits. 0: the host keeps up, as where both are one CPU.
        xla_dispatch_s: the same of a kernel of what XLA compiled.
        ramp_s: the most seconds that an op other than a matrix product or convolution loses until
            all of the device works on it: one of fewer seconds takes twice as long.
        entries_per_s: by op type, the entries a second of ops that are slower than arithmetic and
            memory let expect: of what `cost.op_compute.entries` counts.
        price_per_hour: its rent, in dollars an hour; None: not known. No plan for given devices
            depends on it, so devices that differ in nothing else are equal.
        price_source: who asks for that price, and when; empty where nothing is said.
    """

    flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    launch_s: float = 0.0
    half_size: float = 0.0
    name: str = ""
    functions_per_s: float | None = None
    host_bandwidth: float = HOST_BANDWIDTH
    host_latency_s: float = HOST_LATENCY_S
    dispatch_s: float = 0.0
    xla_dispatch_s: float = 0.0
    ramp_s: float = 0.0
    entries_per_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    price_per_hour: float | None = dataclasses.field(default=None, compare=False)
    price_source: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        check.settle(self, check.DEVICE)

    def __hash__(self) -> int:
        return hash((*sorted(self.flops.items()), self.memory_bytes, self.memory_bandwidth))

    def flops_of(self, dtype: str) -> float:
        """Look up the FLOP/s in `dtype`; one not listed counts as the listed one of its width, or
        float32."""
        for name in (dtype, *_LIKE.get(dtype, ())):
            if name in self.flops:
                return self.flops[name]
        return self.flops["float32"]


def slowest_of(devices: Sequence[Device]) -> Device:
    """Make the device that those wait for that have the same work: the least of each rate."""
    if all(d == devices[0] for d in devices):
        return devices[0]
    dtypes = set.intersection(*(set(d.flops) for d in devices))
    slow = {op_type for d in devices for op_type in d.entries_per_s}
    functions = [d.functions_per_s for d in devices if d.functions_per_s is not None]
    return Device(
        flops={dtype: min(d.flops_of(dtype) for d in devices) for dtype in sorted(dtypes)},
        memory_bytes=min(d.memory_bytes for d in devices),
        memory_bandwidth=min(d.memory_bandwidth for d in devices),
        launch_s=max(d.launch_s for d in devices),
        half_size=max(d.half_size for d in devices),
        name="the slowest of " + ", ".join(dict.fromkeys(d.name for d in devices)),
        functions_per_s=min(functions, default=None),
        host_bandwidth=min(d.host_bandwidth for d in devices),
        host_latency_s=max(d.host_latency_s for d in devices),
        dispatch_s=max(d.dispatch_s for d in devices),
        xla_dispatch_s=max(d.xla_dispatch_s for d in devices),
        ramp_s=max(d.ramp_s for d in devices),
        entries_per_s={
            op_type: min(d.entries_per_s.get(op_type, math.inf) for d in devices)
            for op_type in sorted(slow)
        },
    )


_LIKE = {
    "bfloat16": ("float16",),
    "float16": ("bfloat16",),
    "half": ("float16", "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class Level:
    """Links that join `count` members: devices, or groups of them.

    Attributes:
        bandwidth: bytes/s each way between one member and all the others together (ATP's group
            bandwidth); of a bus, what all have together.
        latency_s: seconds a message takes to start.
        topology: one of `check.TOPOLOGIES`.
        p2p: bytes/s each way between two members that are joined; by default what the topology
            gives: all of `bandwidth`, of direct links one part in count - 1, of a ring half.
    """

    count: int
    bandwidth: float
    latency_s: float
    topology: str = "switch"
    p2p: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        check.settle(self, check.LEVEL)

    @property
    def pair_bandwidth(self) -> float:
        """`p2p`, or what the topology gives."""
        if self.p2p is not None:
            return self.p2p
        parts = {"direct": self.count - 1, "ring": min(self.count - 1, 2)}.get(self.topology, 1)
        return self.bandwidth / max(parts, 1)


@dataclasses.dataclass(frozen=True)
class Node:
    """`count` equal machines.

    Attributes:
        levels: of the links in the node, from outside in; none if it has a single device.
        uplink: bytes/s between the node and the others; by default the bandwidth of the level
            that joins the nodes.
        host_memory_bytes: of one of them, for what its devices have offloaded; None: not known, and
            so without a limit.
    """

    device: Device
    levels: tuple[Level, ...] = ()
    count: int = 1
    uplink: float | None = None
    host_memory_bytes: float | None = None

    def __post_init__(self) -> None:
        check.settle(self, check.NODE)
        check.settle(self, {"device": check.part(Device), "levels": check.parts(Level)})

    @property
    def size(self) -> int:
        """Number of devices in one of them."""
        return math.prod(level.count for level in self.levels)


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
    """Measured time of a collective on the groups of ranks along a mesh axis.

    Of kind `check.TRANSFER` it is no collective: each rank sends a tensor to the next of its group.

    Attributes:
        mesh: the sizes of the mesh; its last axis walks the devices in order.
        axis: position in `mesh`.
        startup_s: seconds whatever the size.
        bandwidth: bytes of payload a second, as `reshard.step_bytes` counts them.
        group: the one among these groups that took so long, while all communicated; none: the
            slowest of them.
    """

    kind: str
    mesh: tuple[int, ...]
    axis: int
    startup_s: float
    bandwidth: float
    group: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check.settle(self, check.MEASURED)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes and what joins them; see the module.

    Attributes:
        nodes: kinds of machines, in the order of their ranks.
        levels: of the links between nodes, from outside in; the last one joins nodes.
        overlap: what part of a device's arithmetic goes on while it communicates, 0 to 1.
        algorithms: those of `check.ALGORITHMS` that its communication library knows; the
            fastest one is used.
        measured: what calibration found; it goes before what the links let expect.
        step_s: seconds that a step takes whatever it holds: what starts it.
        one_memory: devices are cores with one memory and ranks of one process: what several ranks
            would store or compute alike is there once, and computed by the cores of all.
        ranks: of a part of a cluster (see `part`): the devices that it has, by their ranks in the
            whole, which `nodes` and `levels` describe. None: all, in order.

    Raises:
        ArgumentError: (of all parts) a size below 1, a rate that is not above 0, a negative time,
            or what is no number; names the field.
        TfparError: levels that do not hold the nodes, ranks that are none of theirs.
    """

    name: str
    nodes: tuple[Node, ...]
    levels: tuple[Level, ...] = ()
    overlap: float = 1.0
    algorithms: tuple[str, ...] = ("ring", "tree", "halving")
    measured: tuple[MeasuredCollective, ...] = ()
    step_s: float = 0.0
    one_memory: bool = False
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check.settle(self, check.CLUSTER)
        check.settle(
            self,
            {
                "nodes": check.parts(Node, 1),
                "levels": check.parts(Level),
                "measured": check.parts(MeasuredCollective),
            },
        )
        check.check_cluster(self)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        links = self.nodes, self.levels, self.algorithms, self.measured
        return hash((*links, self.overlap, self.step_s, self.one_memory, self.ranks))

    @classmethod
    def regular(
        cls,
        name: str,
        device: Device,
        levels: Sequence[Level],
        node_levels: int = 1,
        **fields: Any,
    ) -> Cluster:
        """Make a cluster of equal nodes.

        Args:
            levels: all levels of links, from outside in.
            node_levels: how many of them are within a node.
            fields: others of `Cluster`.
        """
        levels = check.parts(Level)("levels", levels)
        at = len(levels) - integer("node_levels", node_levels, 0)
        if at < 0:
            raise argument_error(
                "node_levels", node_levels, f"{len(levels)} at most, as many as levels"
            )
        count = math.prod(level.count for level in levels[:at])
        node = Node(device, tuple(levels[at:]), count)
        return cls(name, (node,), tuple(levels[:at]), **fields)

    @property
    def num_nodes(self) -> int:
        """Number of machines, of the whole."""
        return sum(node.count for node in self.nodes)

    @property
    def num_devices(self) -> int:
        """Number of devices, of the whole."""
        return sum(node.count * node.size for node in self.nodes)

    @property
    def size(self) -> int:
        """Number of devices that ranks can have: of a part, its own."""
        return self.num_devices if self.ranks is None else len(self.ranks)

    def part(self, ranks: Sequence[int]) -> Cluster:
        """Take the part of the cluster that some ranks make up: rank `i` of it is `ranks[i]`.

        It remains where it is: groups of its ranks share the links of the whole. So ranks of two
        nodes have the slow link between these, and side by side they have a part of it each.

        Args:
            ranks: each at most once, in any order.

        Raises:
            ArgumentError: not a list of whole numbers.
            TfparError: a rank that the cluster does not have, or has twice.
        """
        found = check.ranks("ranks", ranks)
        if self.ranks is not None:
            own = dict(enumerate(self.ranks))
            found = tuple(own.get(rank, self.num_devices) for rank in found)
        everyone = found == tuple(range(self.num_devices))
        return dataclasses.replace(self, ranks=None if everyone else found)

    def places(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Find what these ranks are in the whole; see `ranks`."""
        return tuple(ranks if self.ranks is None else map(self.ranks.__getitem__, ranks))

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """The device of each rank."""
        everyone = [node.device for node in self.nodes for _ in range(node.count * node.size)]
        return tuple(everyone[place] for place in self.places(range(self.size)))

    @functools.cached_property
    def machines(self) -> tuple[int, ...]:
        """The number, in the whole, of the machine that each rank is in."""
        machines = (node.size for node in self.nodes for _ in range(node.count))
        everyone = [number for number, size in enumerate(machines) for _ in range(size)]
        return tuple(everyone[place] for place in self.places(range(self.size)))

    @functools.cached_property
    def device(self) -> Device:
        """Device that a step waits for if it gives all ranks the same work: the least of each
        rate."""
        return slowest_of([node.device for node in self._kinds_of_nodes()])

    @functools.cached_property
    def host_share_bytes(self) -> float:
        """The host memory that each device may fill: an even part of what its machine has, of the
        machine where that is least; infinite where it is not known."""
        rooms = (
            math.inf if node.host_memory_bytes is None else node.host_memory_bytes / node.size
            for node in self._kinds_of_nodes()
        )
        return min(rooms)

    def with_host_memory(self, memory_bytes: float | None) -> Cluster:
        """Give each machine so much memory."""
        nodes = (dataclasses.replace(n, host_memory_bytes=memory_bytes) for n in self.nodes)
        return dataclasses.replace(self, nodes=tuple(nodes))

    @property
    def in_host_memory(self) -> bool:
        """Whether devices compute in the memory of their hosts: what is offloaded saves nothing."""
        return self.one_memory or math.isinf(self.device.host_bandwidth)

    def at_pace_of(self, ranks: Iterable[int]) -> Cluster:
        """Make all devices as slow as the slowest of these ranks; links are kept."""
        device = slowest_of([self.devices[rank] for rank in ranks])
        nodes = tuple(dataclasses.replace(node, device=device) for node in self.nodes)
        return dataclasses.replace(self, nodes=nodes)

    def _kinds_of_nodes(self) -> list[Node]:
        """Its nodes; of a part, those in which it has ranks."""
        found, first = [], 0
        for node in self.nodes:
            here = range(first, first + node.count * node.size)
            if self.ranks is None or any(rank in here for rank in self.ranks):
                found.append(node)
            first = here.stop
        return found

    def with_device(self, **changes: Any) -> Cluster:
        """Change fields of the cluster's devices."""
        nodes = tuple(
            dataclasses.replace(n, device=dataclasses.replace(n.device, **changes))
            for n in self.nodes
        )
        return dataclasses.replace(self, nodes=nodes)

    def with_prices(self, prices: Mapping[str, float]) -> Cluster:
        """Set what devices are rented for; the others keep their price.

        Args:
            prices: dollars an hour of one device, by the name of the device.

        Raises:
            ArgumentError: a price is no number of 0 or more, or no device has such a name.
        """
        if not isinstance(prices, Mapping):
            raise argument_error("prices", prices, "dollars an hour, by the names of devices")
        known = [node.device.name for node in self.nodes]
        for name in prices:
            if name not in known:
                names = ", ".join(map(repr, dict.fromkeys(known)))
                raise ArgumentError(f"Cluster {self.name!r} has no device {name!r}, but {names}.")
        nodes = []
        for node in self.nodes:
            device, price = node.device, prices.get(node.device.name)
            if price is not None:
                device = dataclasses.replace(device, price_per_hour=price, price_source="")
            nodes.append(dataclasses.replace(node, device=device))
        return dataclasses.replace(self, nodes=tuple(nodes))

    def with_memory(self, memory_bytes: float | None) -> Cluster:
        """Limit the memory of devices that may be used; None: all they have."""
        return self if memory_bytes is None else self.with_device(memory_bytes=memory_bytes)

    def check(self, mesh: Mesh) -> None:
        """Raise TfparError if `mesh` has more ranks than there are devices."""
        if mesh.size > self.size:
            raise TfparError(
                f"The mesh {mesh} has {mesh.size} ranks, but cluster {self.name!r} has "
                f"{self.size} devices ({self.shape_text()}). Use a smaller mesh, or describe a "
                f"larger cluster."
            )

    def shape_text(self) -> str:
        """Write `2 nodes of 8`, kind by kind; of a part `4 of 2 nodes of 8`."""
        whole = ", ".join(
            f"{n.count} node{'s' if n.count > 1 else ''} of {n.size}" for n in self.nodes
        )
        return whole if self.ranks is None else f"{self.size} of {whole}"

    def fingerprint(self) -> str:
        """Hash everything that a cost depends on (not the names, nor the rent)."""
        fields = dataclasses.asdict(self)
        # The same as before there were parts, entries of one group, and the later fields of a
        # device, for plans that are saved.
        if self.ranks is None:
            del fields["ranks"]
        for entry in fields["measured"]:
            if not entry["group"]:
                del entry["group"]
        for node in fields["nodes"]:
            del node["device"]["price_per_hour"], node["device"]["price_source"]
            for name, default in _LATER.items():
                if node["device"][name] == default:
                    del node["device"][name]
        text = json.dumps(_without_names(fields), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


_LATER = {
    "dispatch_s": 0.0,
    "xla_dispatch_s": 0.0,
    "host_bandwidth": HOST_BANDWIDTH,
    "host_latency_s": HOST_LATENCY_S,
    "ramp_s": 0.0,
    "entries_per_s": {},
}


def _without_names(value: Any) -> Any:
    """12000000000 and 1.2e10 are one bandwidth; names change nothing."""
    if isinstance(value, Mapping):
        return {k: _without_names(v) for k, v in value.items() if k != "name"}
    if isinstance(value, list | tuple):
        return [_without_names(v) for v in value]
    return float(value) if isinstance(value, int | float) else value
