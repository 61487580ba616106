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

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tomlkit

from tfpar.cluster import units
from tfpar.cluster.description import Cluster, Device, Level, Measured, Node
from tfpar.readable import UnreadableError, parse_json, parse_toml, read_text
from tfpar.spec import ArgumentError, TfparError
from tfpar.writable import why_not_writable

Part = TypeVar("Part")

_NUMBER, _COUNT, _TEXT, _FLAG = "number", "count", "text", "flag"

# Keys of a table: (attribute, what it measures or is); the rest are read by hand.
_DEVICE = {
    "memory": ("memory_bytes", "bytes"),
    "memory_bandwidth": ("memory_bandwidth", "bytes/s"),
    "launch": ("launch_s", "seconds"),
    "half_size": ("half_size", _NUMBER),
    "functions_per_s": ("functions_per_s", _NUMBER),
    "host_bandwidth": ("host_bandwidth", "bytes/s"),
    "host_latency": ("host_latency_s", "seconds"),
    "ramp": ("ramp_s", "seconds"),
    "name": ("name", _TEXT),
}
_LEVEL = {
    "count": ("count", _COUNT),
    "bandwidth": ("bandwidth", "bytes/s"),
    "latency": ("latency_s", "seconds"),
    "topology": ("topology", _TEXT),
    "p2p": ("p2p", "bytes/s"),
    "name": ("name", _TEXT),
}
_NODE = {
    "count": ("count", _COUNT),
    "uplink": ("uplink", "bytes/s"),
    "host_memory": ("host_memory_bytes", "bytes"),
}
_MEASURED = {
    "kind": ("kind", _TEXT),
    "axis": ("axis", _COUNT),
    "startup": ("startup_s", "seconds"),
    "bandwidth": ("bandwidth", "bytes/s"),
}
_CLUSTER = {
    "name": ("name", _TEXT),
    "overlap": ("overlap", _NUMBER),
    "step": ("step_s", "seconds"),
    "one_memory": ("one_memory", _FLAG),
}

_LISTS = ("algorithms", "ranks")

_Table = dict[str, tuple[str, str]]


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
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(cluster_text(cluster))
    except OSError as error:
        file_name = os.fspath(path)
        raise TfparError(f"Cannot write the cluster file {file_name!r}: {error}.") from None


def cluster_text(cluster: Cluster) -> str:
    """Write `cluster` as a TOML file has it."""
    document = tomlkit.document()
    for key, value in _with_units(describe(cluster)).items():
        document.add(key, value)
    return tomlkit.dumps(document)


def check_writable(path: str) -> None:
    """Raise TfparError if a cluster file could not be written at `path`."""
    wrong = why_not_writable(path)
    if wrong:
        raise TfparError(f"Cannot write the cluster file {path!r}: {wrong}. Name another file.")


def cluster_of(known: Any, source: str = "") -> Cluster:
    """Make the cluster that a mapping with a file's keys describes.

    Args:
        source: where it comes from, in messages.

    Raises:
        TfparError: a key is missing, unknown or wrong.
    """
    reader = _Reader(source or "the cluster description")
    table = reader.table(known, "", {*_CLUSTER, *_LISTS, "level", "node", "measured"})
    fields = reader.fields(table, "", _CLUSTER)
    fields.setdefault("name", os.path.splitext(os.path.basename(source))[0] or "unnamed")
    if not table.get("node", True):
        raise reader.error("node", "is empty: a cluster has one [[node]] at least")
    if "node" not in table:
        raise reader.error("node", "is missing: a cluster has one [[node]] at least")
    fields |= {name: table[name] for name in _LISTS if name in table}
    nodes = tuple(reader.node(n, key) for key, n in reader.tables(table, "node", ""))
    levels = tuple(reader.level(v, key) for key, v in reader.tables(table, "level", ""))
    found = tuple(reader.measured(m, key) for key, m in reader.tables(table, "measured", ""))
    try:
        return Cluster(nodes=nodes, levels=levels, measured=found, **fields)
    except ArgumentError as error:
        raise TfparError(f"{reader.source}: {_with_key(error)}") from None
    except TfparError as error:
        raise TfparError(f"{reader.source}: {error}") from None


class _Reader:
    """Turns tables into the parts of a cluster; its errors name source and key."""

    def __init__(self, source: str) -> None:
        self.source = source

    def error(self, key: str, problem: str) -> TfparError:
        return TfparError(f"{self.source}: `{key}` {problem}.")

    def table(self, value: Any, key: str, known: set[str]) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {value!r}, not a table")
        for name in value:
            if name not in known:
                at = f"{key}.{name}" if key else name
                raise self.error(at, f"is not known; there are {', '.join(sorted(known))}")
        return value

    def tables(self, table: Mapping[str, Any], name: str, key: str) -> list[tuple[str, Any]]:
        """List (key, table) of each entry of an array of tables; none if it is absent."""
        where = f"{key}.{name}" if key else name
        entries = table.get(name, ())
        if isinstance(entries, Mapping) or not isinstance(entries, Sequence | tuple):
            raise self.error(where, f"is {entries!r}; write it as [[{where}]]")
        return [
            (f"{where}[{i}]" if len(entries) > 1 else where, entry)
            for i, entry in enumerate(entries)
        ]

    def fields(self, table: Mapping[str, Any], key: str, known: _Table) -> dict[str, Any]:
        found = {}
        for name, (attribute, measure) in known.items():
            if name in table and table[name] is not None:
                found[attribute] = self.value(
                    table[name], f"{key}.{name}" if key else name, measure
                )
        return found

    def value(self, value: Any, key: str, measure: str) -> Any:
        if measure == _TEXT:
            if not isinstance(value, str):
                raise self.error(key, f"is {value!r}, not text")
            return value
        if measure == _FLAG:
            if not isinstance(value, bool):
                raise self.error(key, f"is {value!r}, neither true nor false")
            return value
        if measure == _COUNT:
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.error(key, f"is {value!r}, not a whole number")
            return value
        try:
            return units.parse(value, "" if measure == _NUMBER else measure)
        except ValueError as error:
            raise self.error(key, str(error)) from None

    def required(self, fields: Mapping[str, Any], key: str, known: _Table, *names: str) -> None:
        for name in names:
            if known[name][0] not in fields:
                raise self.error(f"{key}.{name}", "is missing")

    def node(self, value: Any, key: str) -> Node:
        table = self.table(value, key, {*_NODE, "device", "level"})
        if "device" not in table:
            raise self.error(f"{key}.device", "is missing")
        levels = tuple(self.level(v, at) for at, v in self.tables(table, "level", key))
        device = self.device(table["device"], f"{key}.device")
        fields = self.fields(table, key, _NODE)
        return self.made(Node, key, device=device, levels=levels, **fields)

    def device(self, value: Any, key: str) -> Device:
        table = self.table(value, key, {*_DEVICE, "flops", "entries_per_s"})
        fields = self.fields(table, key, _DEVICE)
        self.required(fields, key, _DEVICE, "memory", "memory_bandwidth")
        if "flops" not in table:
            raise self.error(f"{key}.flops", "is missing")
        rates = table["flops"]
        if not isinstance(rates, Mapping):
            rates = {"float32": rates}
        flops = {
            str(dtype): self.value(rate, f"{key}.flops.{dtype}", "FLOP/s")
            for dtype, rate in rates.items()
        }
        if "entries_per_s" in table:
            fields["entries_per_s"] = table["entries_per_s"]
        return self.made(Device, key, flops=flops, **fields)

    def level(self, value: Any, key: str) -> Level:
        fields = self.fields(self.table(value, key, set(_LEVEL)), key, _LEVEL)
        self.required(fields, key, _LEVEL, "count", "bandwidth", "latency")
        return self.made(Level, key, **fields)

    def measured(self, value: Any, key: str) -> Measured:
        table = self.table(value, key, {*_MEASURED, "mesh", "group"})
        fields = self.fields(table, key, _MEASURED)
        self.required(fields, key, _MEASURED, "kind", "axis", "startup", "bandwidth")
        if "mesh" not in table:
            raise self.error(f"{key}.mesh", "is missing")
        fields |= {"group": table["group"]} if "group" in table else {}
        return self.made(Measured, key, mesh=table["mesh"], **fields)

    def made(self, part: Callable[..., Part], key: str, /, **fields: Any) -> Part:
        """Make a part of the cluster; what is wrong with its fields is said with the table's
        key."""
        try:
            return part(**fields)
        except ArgumentError as error:
            raise TfparError(f"{self.source}: {key}.{_with_key(error)}") from None


def _with_key(error: ArgumentError) -> str:
    """Say what is wrong, of the key of a file and not of the attribute that it becomes."""
    name, space, rest = str(error).partition(" ")
    return _KEYS.get(name, name) + space + rest


def describe(cluster: Cluster) -> dict[str, Any]:
    """Make the mapping of which `cluster_of` makes the cluster; plain numbers in base units."""
    found: dict[str, Any] = _fields(cluster, _CLUSTER)
    found["algorithms"] = list(cluster.algorithms)
    if cluster.ranks is not None:
        found["ranks"] = list(cluster.ranks)
    if cluster.levels:
        found["level"] = [_fields(level, _LEVEL) for level in cluster.levels]
    found["node"] = []
    for node in cluster.nodes:
        table = _fields(node, _NODE)
        table["device"] = {**_fields(node.device, _DEVICE), "flops": dict(node.device.flops)}
        if node.device.entries_per_s:
            table["device"]["entries_per_s"] = dict(node.device.entries_per_s)
        if node.levels:
            table["level"] = [_fields(level, _LEVEL) for level in node.levels]
        found["node"].append(table)
    if cluster.measured:
        found["measured"] = [
            {
                **_fields(m, _MEASURED),
                "mesh": list(m.mesh),
                **({"group": list(m.group)} if m.group else {}),
            }
            for m in cluster.measured
        ]
    return found


def _fields(part: Any, known: _Table) -> dict[str, Any]:
    values = {key: getattr(part, attribute) for key, (attribute, _) in known.items()}
    return {
        key: "inf" if value == math.inf else value  # which is no number of JSON
        for key, value in values.items()
        if value is not None and value != ""
    }


_KEYS = {
    attribute: key
    for table in (_CLUSTER, _DEVICE, _LEVEL, _NODE, _MEASURED)
    for key, (attribute, _) in table.items()
}

_MEASURES = {
    key: measure
    for table in (_CLUSTER, _DEVICE, _LEVEL, _NODE, _MEASURED)
    for key, (_, measure) in table.items()
}


def _with_units(value: Any, measure: str = "") -> Any:
    if isinstance(value, Mapping):
        return {
            key: _with_units(v, "FLOP/s" if key == "flops" else _MEASURES.get(key, measure))
            for key, v in value.items()
        }
    if isinstance(value, list):
        return [_with_units(v) for v in value]
    return units.write(value, measure) if isinstance(value, float) else value
