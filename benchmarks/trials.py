"""Measured trials of 3-D strategies, as AMP (NeurIPS 2022) published them, and what we predict.

A file of trials gives, for each setting, the machines and their links, the global batch and the
strategies with what a step took; beside that the forward time of each layer at microbatch 1, by
model, device and tensor degree. Nothing here is fitted to the trials. What the file does not say:

    the backward pass takes twice the forward pass: so AMP has it, with these layer times
    a block sums two activations over its tensor ranks in each pass, of 2 bytes an entry
        (Megatron-LM, §3: one after attention, one after the two dense layers; fp16)
    gradients are summed in 4 bytes, as mixed precision keeps them (Micikevicius et al. 2018)
    gpt2: GPT-2 with 24 layers, hidden 1,024, sequence 1,024, vocabulary 52,256 (AMP, §5)
    transgan: TransGAN's generator (Jiang et al. 2021): 8 x 8 patches of 1,024 channels; its length
        grows 16-fold and the channels fall as much, so what layers send remains the same
    T4 and V100: bytes/s of their memories, from NVIDIA's data sheets; G4 and P3 are the instances
        of AWS that have them

How a layer's time grows with the microbatch follows from the same layer times. At tensor degree 1 a
sample is at most the whole of what is measured there, and on a device with faster memory at most
what the slower one's time lets expect: the layers are short of bandwidth, of arithmetic they would
take a tenth. A degree of t leaves 1/t of that, and adds what its ranks sum. What is measured above
that is time to start: once a microbatch, whatever its size.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.cluster.description import Cluster, Device, Level, Node
from tfpar.planning.inter_op.three_d.cost_table import LayerCostTable, LayerType, Passes, ProfileKey
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.spec import ArgumentError, TfparError
from tfpar.spec.arguments import integer, number

GBIT = 1e9 / 8
ENTRY_BYTES = 2
GRADIENT_BYTES = 4
BACKWARD = 2
SUMS = 2

_T4 = Device({"float32": 8.1e12, "float16": 65e12}, 16e9, 320e9, name="T4")
_V100 = Device({"float32": 15.7e12, "float16": 125e12}, 16e9, 900e9, name="V100")
DEVICES = {"G4": _T4, "P3": _V100}
"""By the last part of a table's name, as in `gpt2_G4`."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Layers that are blocks of a transformer, or hold weights.

    Attributes:
        layers: their numbers.
        parameters: of each.
        sums: whether tensor ranks sum activations in it.
    """

    layers: range
    parameters: float
    sums: bool = False


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a table of layer times does not say of its layers.

    Attributes:
        layers: how many there are.
        entries: of a sample, that a layer sends to the next.
    """

    layers: int
    entries: int
    blocks: tuple[Block, ...]


def _transformer(hidden: int) -> int:
    """Parameters of a block: 4 h x h of attention, 8 of dense layers; biases and norms."""
    return 12 * hidden**2 + 13 * hidden


_HIDDEN, _LENGTH, _VOCABULARY, _PATCHES = 1024, 1024, 52_256, 64
ARCHITECTURES = {
    "gpt2": Architecture(
        30,
        _LENGTH * _HIDDEN,
        (
            Block(range(0, 1), (_VOCABULARY + _LENGTH) * _HIDDEN),
            Block(range(2, 26), _transformer(_HIDDEN), sums=True),
            Block(range(28, 29), _VOCABULARY * _HIDDEN),
        ),
    ),
    "transgan": Architecture(
        56,
        _PATCHES * _HIDDEN,
        (
            Block(range(3, 15), _transformer(_HIDDEN), sums=True),
            Block(range(41, 53), _transformer(_HIDDEN // 16), sums=True),
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A strategy and what a step took, in seconds."""

    strategy: Strategy3D
    measured_s: float


@dataclasses.dataclass(frozen=True)
class Setting:
    """Machines, a model, and the trials on them."""

    name: str
    model: StrategyProblem
    trials: tuple[Trial, ...]


def read_trials(path: str | os.PathLike[str]) -> list[Setting]:
    """The settings of a file.

    Raises:
        TfparError: it cannot be read, or a key is missing or wrong; names file and key.
    """
    path = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            known = json.load(file)
    except (OSError, ValueError) as error:
        raise TfparError(f"Cannot read the trials {path!r}: {error}.") from None
    reader = _Reader(path)
    settings = reader.table(known, "", "settings")
    seconds = reader.table(known, "", "forward_layer_seconds")
    return [reader.setting(name, settings, seconds) for name in settings]


class _Reader:
    """Reads the parts of a file; errors name the file and the key."""

    def __init__(self, source: str) -> None:
        self.source = source

    def error(self, key: str, problem: str) -> TfparError:
        return TfparError(f"{self.source}: `{key}` {problem}.")

    def value(self, table: Any, key: str, name: str) -> tuple[Any, str]:
        """What a table has, and where that is."""
        at = f"{key}.{name}" if key else name
        if not isinstance(table, Mapping):
            raise self.error(key or "the file", "is not a table")
        if name not in table:
            raise self.error(at, "is missing")
        return table[name], at

    def table(self, table: Any, key: str, name: str) -> Mapping[str, Any]:
        found, at = self.value(table, key, name)
        if not isinstance(found, Mapping):
            raise self.error(at, f"is {found!r}, not a table")
        return found

    def entries(self, table: Any, key: str, name: str) -> Sequence[Any]:
        found, at = self.value(table, key, name)
        if not isinstance(found, list):
            raise self.error(at, f"is {found!r}, not a list")
        return found

    def count(self, table: Any, key: str, name: str) -> int:
        found, at = self.value(table, key, name)
        try:
            return integer(name, found, 1)
        except ArgumentError:
            raise self.error(at, f"is {found!r}, not a whole number above 0") from None

    def numbers(self, table: Any, key: str, name: str, above: float = 0.0) -> list[float]:
        found = self.entries(table, key, name)
        return [self.number(v, f"{key}.{name}[{i}]", above) for i, v in enumerate(found)]

    def number(self, value: Any, key: str, above: float = 0.0) -> float:
        try:
            return float(number(key, value, above=above))
        except ArgumentError:
            raise self.error(key, f"is {value!r}, not a number above {above:g}") from None

    def setting(
        self, name: str, settings: Mapping[str, Any], seconds: Mapping[str, Any]
    ) -> Setting:
        """Machines, model and trials of one setting."""
        key, given = f"settings.{name}", settings[name]
        model, at = self.value(given, key, "model")
        if not isinstance(model, str) or model not in ARCHITECTURES:
            raise self.error(at, f"is {model!r}; known are {', '.join(sorted(ARCHITECTURES))}")
        architecture = ARCHITECTURES[model]
        batch = self.count(given, key, "global_batch")
        cluster, tables = self.cluster(name, given, key, seconds)
        measured = []
        for at_trial, trial in enumerate(self.entries(given, key, "trials")):
            where = f"{key}.trials[{at_trial}]"
            value, at = self.value(trial, where, "measured_s")
            strategy = self.strategy(trial, where, architecture, cluster, batch)
            measured.append(Trial(strategy, self.number(value, at)))
        cases = {(t.strategy.tensor, t.strategy.microbatch) for t in measured}
        forward = {
            (table, tensor): self.layer_seconds(seconds, f"{table}_{tensor}", architecture)
            for table in tables
            for tensor in {1, *(tensor for tensor, _ in cases)}
        }
        table = _layer_table(architecture, _Times(forward, tables), sorted(cases))
        return Setting(name, StrategyProblem(table, cluster, batch), tuple(measured))

    def layer_seconds(
        self, seconds: Mapping[str, Any], name: str, architecture: Architecture
    ) -> list[float]:
        found = self.numbers(seconds, "forward_layer_seconds", name)
        if len(found) != architecture.layers:
            raise self.error(
                f"forward_layer_seconds.{name}",
                f"has {len(found)} layers; the model has {architecture.layers}",
            )
        return found

    def cluster(
        self, name: str, given: Any, key: str, seconds: Mapping[str, Any]
    ) -> tuple[Cluster, dict[str, _Machine]]:
        """The machines, and what those of each table of layer times are like."""
        key, described = f"{key}.cluster", self.table(given, key, "cluster")
        nodes = self.count(described, key, "nodes")
        devices = self.count(described, key, "devices_per_node")
        links = {}
        for which in ("inter_node_gbit_s", "intra_node_gbit_s"):
            links[which] = [v * GBIT for v in self.numbers(described, key, which)]
            if len(links[which]) != nodes:
                raise self.error(f"{key}.{which}", f"has {len(links[which])} of {nodes} nodes")
        outside, inside = links.values()
        text, at = self.value(described, key, "layer_seconds")
        tables = _tables_of_nodes(text, nodes) if isinstance(text, str) else None
        if tables is None:
            raise self.error(
                at, f"is {text!r}; write `gpt2_G4`, or `nodes 0-2 gpt2_P3, node 3 gpt2_G4`"
            )
        for table in tables:
            if f"{table}_1" not in seconds:
                raise self.error(at, f"names {table!r}, of which there are no layer times")
        machines: dict[str, _Machine] = {}
        for table, bandwidth in zip(tables, inside, strict=True):
            known = machines.setdefault(table, _Machine(_device(table), bandwidth))
            machines[table] = _Machine(known.device, max(known.inside, bandwidth))
        level = Level(devices, 1.0, 0.0)
        found = tuple(
            Node(
                machines[table].device,
                (dataclasses.replace(level, bandwidth=own),),
                uplink=uplink,
            )
            for table, own, uplink in zip(tables, inside, outside, strict=True)
        )
        levels = (Level(nodes, max(outside), 0.0),) if nodes > 1 else ()
        return Cluster(name, found, levels, algorithms=("ring",)), machines

    def strategy(
        self, trial: Any, key: str, architecture: Architecture, cluster: Cluster, batch: int
    ) -> Strategy3D:
        tensor, data, stages, microbatch = (
            self.count(trial, key, name) for name in ("tensor", "data", "pipeline", "microbatch")
        )
        cuts = self.entries(trial, key, "cuts")
        whole = all(type(cut) is int for cut in cuts)
        if (
            not whole
            or len(cuts) != stages + 1
            or cuts[0] != 0
            or cuts[-1] != architecture.layers
            or list(cuts) != sorted(set(cuts))
        ):
            raise self.error(
                f"{key}.cuts",
                f"is {list(cuts)!r}; {stages} stages of {architecture.layers} layers need "
                f"{stages + 1} rising numbers from 0 to {architecture.layers}",
            )
        if tensor * data * stages != cluster.size:
            raise self.error(
                key,
                f"is {tensor} tensor x {data} data x {stages} stages; the cluster has "
                f"{cluster.size} devices",
            )
        if batch % (data * microbatch):
            raise self.error(
                f"{key}.microbatch", f"is {microbatch}: {data} copies do not divide {batch} evenly"
            )
        counts = tuple(b - a for a, b in zip(cuts, cuts[1:], strict=False))
        return Strategy3D(data, tensor, microbatch, counts)


@dataclasses.dataclass(frozen=True)
class _Machine:
    """Those of which a table of layer times is.

    Attributes:
        inside: bytes/s of the links within, over which tensor ranks summed when it was measured.
    """

    device: Device
    inside: float


def _device(table: str) -> Device:
    """That of a table's machines, under the table's name; unknown ones are as fast as a V100."""
    return dataclasses.replace(DEVICES.get(table.rpartition("_")[2], _V100), name=table)


def _tables_of_nodes(text: str, nodes: int) -> list[str] | None:
    """The table of each node; None if the text does not say it of each of them once."""
    if re.fullmatch(r"\w+", text):
        return [text] * nodes
    found: dict[int, str] = {}
    for part in text.split(","):
        match = re.fullmatch(r"nodes? (\d+)(?:-(\d+))? (\w+)", part.strip())
        if match is None:
            return None
        first = int(match[1])
        for node in range(first, int(match[2] or first) + 1):
            if node in found or node >= nodes:
                return None
            found[node] = match[3]
    return [found[node] for node in range(nodes)] if len(found) == nodes else None


@dataclasses.dataclass(frozen=True)
class _Times:
    """Forward times of layers at microbatch 1, by table and tensor degree."""

    forward: Mapping[tuple[str, int], Sequence[float]]
    machines: Mapping[str, _Machine]

    def work(self, table: str, layer: int) -> float:
        """Seconds that a sample's forward pass takes at most beside what starts it."""
        own = self.machines[table].device
        return min(
            self.forward[other, 1][layer]
            * min(1, there.device.memory_bandwidth / own.memory_bandwidth)
            for other, there in self.machines.items()
            if other == table or there.device.memory_bandwidth < own.memory_bandwidth
        )

    def passes(
        self, table: str, layer: int, tensor: int, microbatch: int, reduced: float
    ) -> Passes:
        """Of a microbatch, without what ranks sum.

        Args:
            reduced: bytes of a sample that they sum: of what was measured that is a part.
        """
        work = self.work(table, layer) / tensor
        summing = 2 * (tensor - 1) / tensor * reduced / self.machines[table].inside
        start = max(self.forward[table, tensor][layer] - work - summing, 0.0)
        forward = start + microbatch * work
        return Passes(forward, BACKWARD * forward)


def _layer_table(
    architecture: Architecture, times: _Times, cases: Sequence[tuple[int, int]]
) -> LayerCostTable:
    sent = architecture.entries * ENTRY_BYTES
    kinds = {}
    for layer in range(architecture.layers):
        block = next((b for b in architecture.blocks if layer in b.layers), Block(range(0), 0))
        reduced = SUMS * sent if block.sums else 0
        kinds[f"layer {layer}"] = LayerType(
            {
                ProfileKey(table, tensor, microbatch): times.passes(
                    table, layer, tensor, microbatch, reduced
                )
                for table in times.machines
                for tensor, microbatch in cases
            },
            gradient_bytes=block.parameters * GRADIENT_BYTES,
            reduced_bytes=reduced,
            sent_bytes=sent,
        )
    return LayerCostTable(kinds, tuple(kinds))
