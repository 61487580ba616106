"""TFLOP/s a GPU of ATP, Megatron-LM and 2-D tensor parallelism (Fig. 10, Table 3 of ATP's paper).

    python -m benchmarks.atp_throughput [--quick] [--json FILE]

GPTs M1 to M4 on IC1 to IC4, in 16 bits, batch 4, length 2048, as in `benchmarks.atp`. Of a step of
two layers, as predicted: the operations of a layer by Megatron-LM's formula (§5: forward and
backward pass, nothing computed again) over seconds and devices.

    ATP          the mesh with the shortest step as tfpar prices it; in 1, 2 and 4 chunks of the
                 batch, of which `chosen` marks those that tfpar takes
    Megatron-LM  DeviceMesh(N, 1), without chunks
    2-D          SUMMA by its own formulas (`benchmarks.summa`): 4 x 4 of 16 devices, 2 x 2 x 2 of
                 8; what are no products of weights as tfpar prices them, shared out evenly

Table 3 is of 8 devices on every interconnect, Fig. 10 of 16 on IC4. Nothing is fitted.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import tfpar as tap
from benchmarks import atp, summa
from benchmarks.results import save
from tfpar.cluster.description import Cluster
from tfpar.cluster.lookup import fit_to_mesh, read_preset
from tfpar.cluster.matrix import device_meshes
from tfpar.compile.local.chunks import CHUNKS
from tfpar.cost.cost import Cost
from tfpar.cost.op_compute import sides
from tfpar.cost.pricer import Pricer
from tfpar.ir.roles import UPDATE
from tfpar.planning.memory.plan_transforms import apply_plan_transforms
from tfpar.planning.pricing.chunks import choose_num_chunks
from tfpar.planning.pricing.plan_propagation import priced_roles, propagate_transformed
from tfpar.planning.pricing.price import SingleStagePricer, cost_of
from tfpar.planning.problem import Problem
from tfpar.plans import Plan
from tfpar.tf.capture.step import CapturedStep

TOKENS, ITEM_BYTES, DTYPE = atp.BATCH * atp.LENGTH, 2, "bfloat16"
SETTINGS = (("atp-ic1", 8), ("atp-ic2", 8), ("atp-ic3", 8), ("atp-ic4", 8), ("atp-ic4", 16))

PAPER = {
    ("atp-ic1", "M2"): (3.45, 3.46, 3.51),
    ("atp-ic2", "M2"): (42.82, 43.59, 43.73),
    ("atp-ic3", "M2"): (97.45, 100.38, 98.20),
    ("atp-ic4", "M2"): (15.31, 17.20, 18.62),
    ("atp-ic1", "M3"): (6.68, 6.79, 6.72),
    ("atp-ic2", "M3"): (73.61, 75.27, 75.95),
    ("atp-ic3", "M3"): (151.98, 152.64, 151.79),
    ("atp-ic4", "M3"): (22.47, 26.09, 26.18),
    ("atp-ic1", "M4"): (10.71, 10.70, 10.70),
    ("atp-ic2", "M4"): (96.83, 100.25, 100.23),
    ("atp-ic3", "M4"): (178.19, 178.17, 177.78),
    ("atp-ic4", "M4"): (32.52, 34.95, 38.81),
}
"""Table 3: TFLOP/s a GPU on 8 devices, in 1, 2 and 4 chunks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="M2 alone")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| interconnect | devices | model | contender | mesh | chunks | step ms | TFLOP/s |")
    print("|---|---|---|---|---|---|---|---|")
    for model in ["M2"] if options.quick else atp.HIDDEN:
        step = atp.capture(atp.HIDDEN[model])
        for preset, devices in SETTINGS:
            cluster = fit_to_mesh(read_preset(preset), tap.Mesh.of([devices]))
            for row in contenders(step, cluster, atp.HIDDEN[model]):
                row = {"interconnect": preset, "devices": devices, "model": model, **row}
                published = PAPER.get((preset, model))
                if row["contender"] == "ATP" and devices == 8 and published:
                    row["paper_tflops"] = published[CHUNKS.index(row["chunks"])]
                rows.append(row)
                chosen = " *" if row.get("chosen") else ""
                print(
                    "| {interconnect} | {devices} | {model} | {contender} | {mesh} | {chunks}{} | "
                    "{:.1f} | {tflops:.2f} |".format(chosen, 1e3 * row["step_s"], **row),
                    flush=True,
                )
        save(options.json, rows)


def contenders(step: CapturedStep, cluster: Cluster, hidden: int) -> Iterator[dict[str, Any]]:
    """A row for each contender, of ATP one for each number of chunks."""
    size = cluster.size
    by_mesh = {mesh: atp.planned(step, cluster, *mesh) for mesh in device_meshes(size)}
    costs = {mesh: plan.cost for mesh, (plan, _) in by_mesh.items() if plan.cost is not None}

    def row(contender: str, mesh: tuple[int, ...], chunks: int, seconds: float) -> dict[str, Any]:
        return {
            "contender": contender,
            "mesh": list(mesh),
            "chunks": chunks,
            "step_s": seconds,
            "tflops": atp.LAYERS * layer_flops(hidden) / size / seconds / 1e12,
        }

    best = min(costs, key=lambda mesh: costs[mesh].seconds)
    chosen, by_chunks = in_each(*by_mesh[best])
    for chunks, cost in by_chunks.items():
        mark = {"chosen": True} if chunks == chosen else {}
        yield {**row("ATP", best, chunks, cost.seconds), **parts(cost), **mark}
    megatron = costs[size, 1]
    yield {**row("Megatron-LM", (size, 1), 1, megatron.seconds), **parts(megatron)}
    grid = summa.Grid.of(size)
    found = summa_parts(step, cluster, grid, hidden)
    yield {**row("2-D", grid.mesh.shape, 1, sum(found.values())), **found}


def parts(cost: Cost) -> dict[str, float]:
    """Seconds of a step that are computed, waited for, and hidden by chunks."""
    return {
        "compute_s": sum(cost.compute_s),
        "waiting_s": sum(cost.communication_s) + cost.exposed_s,
        "hidden_s": cost.hidden_s,
    }


def layer_flops(hidden: int) -> float:
    """Of a layer's forward and backward pass (Narayanan et al. 2021, §5.1, without the forward pass
    that they compute again): Table 2 has these numbers, in units of 2 ** 40."""
    return 72.0 * TOKENS * hidden**2 * (1 + atp.LENGTH / 6 / hidden)


def in_each(plan: Plan, problem: Problem) -> tuple[int, dict[int, Cost]]:
    """The number of chunks that tfpar takes, and what the step costs in each number of them."""
    assert plan.cost is not None
    step = SingleStagePricer.of(plan, problem, problem.cluster)
    found = {1: plan.cost}
    for chunks in CHUNKS[1:]:
        found[chunks] = cost_of(step.price(dataclasses.replace(plan, chunks=chunks)))
    return choose_num_chunks(plan, problem).chunks, found


# --- SUMMA ------------------------------------------------------------------------------


def summa_parts(
    step: CapturedStep, cluster: Cluster, grid: summa.Grid, hidden: int
) -> dict[str, float]:
    """Seconds of the step over a grid: products of weights and what they move by SUMMA's formulas,
    and the rest."""
    weights = atp.LAYERS * summa.weights_of_layer(hidden)
    weights += (summa.Weight(hidden, atp.VOCABULARY),)
    moving = summa.communication_seconds(cluster, grid, weights, TOKENS, ITEM_BYTES)
    products = summa.product_seconds(cluster.device, grid, weights, TOKENS, DTYPE)
    return {
        "moving_s": moving,
        "products_s": products,
        "rest_s": rest_seconds(step, cluster, grid.size),
    }


def rest_seconds(step: CapturedStep, cluster: Cluster, devices: int) -> float:
    """Seconds of the ops that are no products of weights: what one device takes for all of it,
    shared out evenly among so many, but for the start of each op."""
    alone = fit_to_mesh(cluster, tap.Mesh.of([1]))
    plan, problem = atp.planned(step, alone, 1, 1)
    laid = propagate_transformed(plan, apply_plan_transforms(problem, plan))
    roles = priced_roles(laid, problem)
    pricer, start = Pricer(laid.mesh, alone, roles), alone.device.launch_s
    assert plan.cost is not None
    seconds = plan.cost.compute_s[UPDATE] / devices
    for op, decision in laid.decisions.items():
        rule = laid.prepared.rules[op]
        if roles.phase[op] != UPDATE and TOKENS not in (sides(op, rule, rule.sizes) or ()):
            taken = pricer.op_seconds(op, rule, decision)
            if taken:
                seconds += start + (taken - start) / devices
    return seconds


if __name__ == "__main__":
    main()
