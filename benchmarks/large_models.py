"""Large models on large clusters, from the machines' descriptions to a 3-D plan: what is chosen,
what it takes, and what choosing it takes.

    gpt3-175b   GPT-3 on 128 DGX A100: the batch of Narayanan et al. 2021 (§5.1)
    glam-1t     GLaM 64B/64E (Du et al. 2022), the largest mixture of experts whose every size is
                published: 64 layers, every other one with 64 experts, 2 for a token, 1.16 T
                parameters as counted here. On 256 DGX H100, a batch of 1 M tokens as there

Each on machines that are alike, and with a third of them a generation older: DGX-1 with V100 of 32
GB, or DGX A100. Links and rates are those of the presets `dgx-a100`, `dgx-h100` and `rhino-m8`; a
DGX-1 has four links of 100 Gbit/s, of which nine tenths count, as of the others.

MFU counts the operations of the model alone, not what is computed again (Chowdhery et al. 2022,
appendix B), over what data sheets say all devices could do.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpt_layers import ATTENTION, BACKWARD, FEED_FORWARD, Gpt, gpt_table
from benchmarks.moe_layers import GLAM, moe_table
from tfpar.cluster.description import Cluster, Node
from tfpar.cluster.lookup import read_preset
from tfpar.planning.inter_op.three_d.baselines import megatron
from tfpar.planning.inter_op.three_d.cost_model import simulate_strategy
from tfpar.planning.inter_op.three_d.cost_table import LayerCostTable
from tfpar.planning.inter_op.three_d.memory import stored_bytes
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.searches import find

PEAK = {"V100-SXM2-32GB": 125e12, "A100-SXM4-80GB": 312e12, "H100-SXM5-80GB": 989e12}
"""FLOP/s in half precision, dense, of NVIDIA's data sheets."""

DGX_1_UPLINK = 0.9 * 4 * 100e9 / 8

GPT3 = Gpt(96, 12_288, 96, 2048, 51_200)
MICROBATCHES, TENSOR = (1, 2, 4, 8), (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model, its machines, and how many of these are older.

    Attributes:
        preset: of the newer machines; `older` of the others.
        chosen: dense layers that a token goes through in every other block, of a mixture of
            experts; 1: it is none.
    """

    name: str
    gpt: Gpt
    layers: Callable[[Cluster], LayerCostTable]
    batch: int
    preset: str
    nodes: int
    older: str
    num_older: int = 0
    chosen: int = 1

    @property
    def cluster(self) -> Cluster:
        """The machines."""
        newer, older = read_preset(self.preset), read_preset(self.older)
        nodes = [dataclasses.replace(newer.nodes[0], count=self.nodes - self.num_older)]
        if self.num_older:
            nodes.append(_older(older, self.num_older))
        levels = (dataclasses.replace(newer.levels[0], count=self.nodes),)
        return dataclasses.replace(newer, name=self.name, nodes=tuple(nodes), levels=levels)

    @property
    def model(self) -> StrategyProblem:
        """The layers on these machines."""
        cluster = self.cluster
        return StrategyProblem(self.layers(cluster), cluster, self.batch)

    @property
    def flops(self) -> float:
        """Operations of a step: two for each weight that a token meets, and those of attention;
        the backward pass has twice those of the forward pass."""
        gpt = self.gpt
        attending = 2 * ATTENTION * gpt.hidden * gpt.inner + 4 * gpt.length * gpt.inner
        dense = 2 * FEED_FORWARD * gpt.hidden**2 * (1 + self.chosen) / 2
        token = gpt.layers * (attending + dense) + 2 * gpt.hidden * gpt.vocabulary
        return (1 + BACKWARD) * self.batch * gpt.length * token


def _older(cluster: Cluster, count: int) -> Node:
    uplink = DGX_1_UPLINK if cluster.name == "rhino-m8" else cluster.levels[0].bandwidth
    return dataclasses.replace(cluster.nodes[0], count=count, uplink=uplink)


def _gpt3(cluster: Cluster) -> LayerCostTable:
    return gpt_table(cluster, MICROBATCHES, TENSOR, GPT3)


def _glam(cluster: Cluster) -> LayerCostTable:
    return moe_table(cluster, MICROBATCHES, TENSOR, GLAM)


_ALIKE = (
    Setup("gpt3-175b", GPT3, _gpt3, 1536, "dgx-a100", 128, "rhino-m8"),
    Setup("glam-1t", GLAM.gpt, _glam, 1024, "dgx-h100", 256, "dgx-a100", chosen=GLAM.chosen),
)
SETUPS = {
    setup.name: setup
    for alike in _ALIKE
    for setup in (
        alike,
        dataclasses.replace(alike, name=f"{alike.name}, mixed", num_older=round(alike.nodes / 3)),
    )
}


def planned(name: str, seed: int = 0) -> dict[str, Any]:
    """A row: what is chosen, what it takes, and the processor time and memory of choosing it."""
    start, cpu = time.perf_counter(), time.process_time()
    setup = SETUPS[name]
    model = setup.model
    found = find(model, seed=seed)
    search_s, search_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    num_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    best = found.best.strategy
    timeline = simulate_strategy(model, best)
    devices = model.cluster.devices
    stored = stored_bytes(model, best)
    by_device = {
        device: max(
            stored[actor]
            for actor in range(best.actors)
            if any(devices[rank].name == device for rank in best.stage(actor))
        )
        for device in dict.fromkeys(devices[rank].name for rank in best.ranks)
    }
    heuristic = [simulate_strategy(model, strategy).seconds for strategy in megatron(model)]
    return {
        "setup": name,
        "devices": {device: sum(own.name == device for own in devices) for device in by_device},
        "seconds": timeline.seconds,
        "mfu": setup.flops / timeline.seconds / sum(PEAK[device.name] for device in devices),
        "bubble": timeline.bubble,
        "stored_bytes": by_device,
        "memory_bytes": {device.name: device.memory_bytes for device in devices},
        "megatron_s": min(heuristic, default=None),
        "strategy": str(best),
        "machines": "".join(_machines(model, best.ranks)),
        "runner_up": None if len(found.finalists) < 2 else str(found.finalists[1].strategy),
        "runner_up_s": None if len(found.finalists) < 2 else found.finalists[1].simulated_s,
        "evaluated": found.evaluated,
        "search_s": search_s,
        "search_cpu_s": search_cpu_s,
        "search_bytes": num_bytes,
    }


def _machines(model: StrategyProblem, ranks: tuple[int, ...]) -> list[str]:
    """The first letter of each machine's device, in the order in which the strategy has them."""
    machines = dict.fromkeys(model.cluster.machines[rank] for rank in ranks)
    first = {machine: rank for rank, machine in enumerate(model.cluster.machines)}
    return [model.cluster.devices[first[machine]].name[0] for machine in machines]


def apart(name: str) -> dict[str, Any]:
    """The row of `planned`, from a process of its own, and whether another one finds the same."""
    rows = []
    for _ in range(2):
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            rows.append(pool.submit(planned, name).result())
    one, other = rows
    return one | {
        "same_again": all(one[key] == other[key] for key in ("strategy", "machines", "seconds"))
    }
