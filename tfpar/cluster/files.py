"""Cluster files: TOML (or JSON) to a `Cluster` and back.

name = "two-nodes"

[[level]]                    # joins the nodes; more of them, from outside in
count = 2
bandwidth = "200 Gbit/s"
latency = "8 us"

[[node]]                     # one for each kind of machine
count = 2

[node.device]
memory = "80 GB"
memory_bandwidth = "1.6 TB/s"
launch = "4 us"
flops = { float32 = "100 TFLOP/s", float16 = "220 TFLOP/s" }

[[node.level]]               # the links in a node, from outside in
count = 8
topology = "switch"
bandwidth = "250 GB/s"
latency = "4 us"
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
import tomlkit

from tfpar.cluster import units
from tfpar.cluster.description import Cluster, Device, Level, MeasuredCollective, Node
from tfpar.readable import FieldError, UnreadableError, convert, parse_json, parse_toml, read_text
from tfpar.spec import ArgumentError, TfparError
from tfpar.writable import write_whole

# --- the schema --------------------------------------------------------------------------


class _Number(float):
    """A number; of what is measured, files may have it with a unit."""

    measure, expected = "", units.expected("")

    def __init_subclass__(cls, measure: str) -> None:
        cls.measure, cls.expected = measure, units.expected(measure)


class _Bytes(_Number, measure="bytes"): ...


class _Rate(_Number, measure="bytes/s"): ...


class _Seconds(_Number, measure="seconds"): ...


class _Flops(_Number, measure="FLOP/s"): ...


class _FlopsByDtype(dict[str, _Flops]):
    """FLOP/s by dtype; in files one number is that of float32."""


_KEYS = {
    **{"memory_bytes": "memory", "launch_s": "launch", "host_latency_s": "host_latency"},
    **{"dispatch_s": "dispatch", "xla_dispatch_s": "xla_dispatch", "ramp_s": "ramp"},
    **{"latency_s": "latency", "host_memory_bytes": "host_memory"},
    **{"startup_s": "startup", "step_s": "step", "levels": "level", "nodes": "node"},
}
"""The keys that are not called as the attributes that they become."""


class _Table(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename=_KEYS,
):
    """A table of a file; its fields are those of the part of a cluster that it becomes."""

    becomes: ClassVar[type]


class _LevelTable(_Table, frozen=True, kw_only=True):
    becomes = Level
    count: int
    bandwidth: _Rate
    latency_s: _Seconds
    topology: str | None = None
    p2p: _Rate | None = None
    name: str | None = ""


_LevelTables = Annotated[
    tuple[_LevelTable, ...], msgspec.Meta(description="tables, each below [[level]]")
]


class _DeviceTable(_Table, frozen=True, kw_only=True):
    becomes = Device
    memory_bytes: _Bytes
    memory_bandwidth: _Rate
    launch_s: _Seconds | None = None
    half_size: _Number | None = None
    functions_per_s: _Number | None = None
    host_bandwidth: _Rate | None = None
    host_latency_s: _Seconds | None = None
    dispatch_s: _Seconds | None = None
    xla_dispatch_s: _Seconds | None = None
    ramp_s: _Seconds | None = None
    price_per_hour: _Number | None = None
    price_source: str = ""
    name: str | None = ""
    flops: _FlopsByDtype
    entries_per_s: dict[str, Any] = {}


class _NodeTable(_Table, frozen=True, kw_only=True):
    becomes = Node
    count: int | None = None
    uplink: _Rate | None = None
    host_memory_bytes: _Bytes | None = None
    device: _DeviceTable
    levels: _LevelTables = ()


class _MeasuredTable(_Table, frozen=True, kw_only=True):
    becomes = MeasuredCollective
    kind: str
    axis: int
    startup_s: _Seconds
    bandwidth: _Rate
    mesh: tuple[int, ...]
    group: tuple[int, ...] = ()


class _ClusterTable(_Table, frozen=True, kw_only=True):
    becomes = Cluster
    name: str | None = None
    overlap: _Number | None = None
    step_s: _Seconds | None = None
    one_memory: bool | None = None
    algorithms: Any = None
    ranks: Any = None
    levels: _LevelTables = ()
    nodes: Annotated[
        tuple[_NodeTable, ...],
        msgspec.Meta(min_length=1, description="one or more tables, each below [[node]]"),
    ]
    measured: tuple[_MeasuredTable, ...] = ()


def _read_custom(kind: Any, value: Any) -> Any:
    if kind is not _FlopsByDtype:
        return kind(units.parse(value, kind.measure))
    rates = value if isinstance(value, Mapping) else {"float32": value}
    return kind(convert(rates, dict[str, _Flops], _read_custom))


def _write_table(cluster: Cluster, *, with_units: bool) -> dict[str, Any]:
    """The tables of a file that describe `cluster`."""

    def write(value: Any) -> Any:
        if isinstance(value, dict):
            return dict(value)
        return units.write(float(value), value.measure if with_units else "")

    table = msgspec.convert(cluster, _ClusterTable, from_attributes=True, dec_hook=_read_custom)
    # By JSON, whose lists are equal to those of what other ranks send.
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(table, enc_hook=write))
    return found


def _build_part(table: _Table, where: str = "") -> Any:
    """Build the part of a cluster that a table describes.

    Args:
        where: the table's key, in errors before that of a field.
    """
    fields = {}
    for name in table.__struct_fields__:
        value, at = getattr(table, name), f"{where}{_KEYS.get(name, name)}"
        if isinstance(value, _Table):
            value = _build_part(value, f"{at}.")
        elif isinstance(value, tuple) and isinstance(next(iter(value), None), _Table):
            value = tuple(_build_part(each, f"{at}[{i}].") for i, each in enumerate(value))
        if value is not None:
            fields[name] = value
    try:
        return table.becomes(**fields)
    except ArgumentError as error:
        name, space, rest = str(error).partition(" ")
        raise TfparError(f"{where}{_KEYS.get(name, name)}{space}{rest}") from None


# --- files -------------------------------------------------------------------------------


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read the cluster that a TOML or JSON file describes.

    Raises:
        TfparError: it cannot be read, or a key is missing, unknown or wrong; names file and key.
    """
    path = os.fspath(path)
    try:
        text = read_text(path)
        known = parse_json(text) if path.endswith(".json") else parse_toml(text)
    except UnreadableError as error:
        raise TfparError(f"Cannot read the cluster file {path!r}: {error}.") from None
    return cluster_of(known, path)


def write_cluster(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Write `cluster` as a TOML file that `read_cluster` reads.

    Raises:
        TfparError: the file cannot be written.
    """
    write_whole("cluster file", os.fspath(path), cluster_text(cluster))


def cluster_text(cluster: Cluster) -> str:
    """Write `cluster` as a TOML file has it."""
    document = tomlkit.document()
    for key, value in _write_table(cluster, with_units=True).items():
        document.add(key, value)
    return tomlkit.dumps(document)


def describe(cluster: Cluster) -> dict[str, Any]:
    """The mapping of which `cluster_of` makes the cluster; plain numbers in base units."""
    return _write_table(cluster, with_units=False)


def cluster_of(known: Any, source: str = "") -> Cluster:
    """Make the cluster that a mapping with a file's keys describes.

    Args:
        source: where it comes from, in messages.

    Raises:
        TfparError: a key is missing, unknown or wrong.
    """
    name = os.path.splitext(os.path.basename(source))[0] or "unnamed"
    source = source or "the cluster description"
    try:
        table = convert(known, _ClusterTable, _read_custom)
        named = table if table.name is not None else msgspec.structs.replace(table, name=name)
        found: Cluster = _build_part(named)
        return found
    except FieldError as error:
        raise TfparError(f"{source}: {error}.") from None
    except TfparError as error:
        raise TfparError(f"{source}: {error}") from None
