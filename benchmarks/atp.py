"""ATP's choice of a mesh: IC1 to IC6, models M1 to M4 (§5.3-5.4 of the paper).

    python -m benchmarks.atp [--quick] [--json FILE] [--plot FILE.svg]

For every DeviceMesh(d1, d2): seconds of all-reduces a layer by eq. 2 to 4, and the step of two
layers as tfpar lays and prices it (start-ups, statistics of layer norms, small products), in
16 bits, batch 4, sequence length 2048. `--plot` draws Fig. 12 (needs matplotlib).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras

import tfpar as tap
from benchmarks import models
from benchmarks.captured import captured_step, constrained
from benchmarks.plots import save_plot
from benchmarks.results import save
from tfpar.cluster.description import Cluster
from tfpar.cluster.lookup import fit_to_mesh, read_preset
from tfpar.cluster.matrix import device_meshes, tensor_parallel_seconds
from tfpar.constraints.constraint_types import Constraint
from tfpar.cost.cost import Cost
from tfpar.planning.problem import Problem
from tfpar.plans import Plan
from tfpar.tf.capture.step import CapturedStep

BATCH, LENGTH, LAYERS, VOCABULARY = 4, 2048, 2, 512
HIDDEN = {"M1": 2048, "M2": 4096, "M3": 8192, "M4": 12288}
HEAD_SIZE = 128

SIZES = {"atp-ic1": 8, "atp-ic2": 8, "atp-ic3": 8, "atp-ic4": 16, "atp-ic5": 16, "atp-ic6": 16}
PAPER = {
    "atp-ic1": "(2, 4)",
    "atp-ic2": "(8, 1)",
    "atp-ic3": "(8, 1)",
    "atp-ic4": "(8, 2)",
}

# Column-first for what opens a block, row-first for what closes it: (weights, dims over d1, d2).
COLUMN_AND_ROW_FIRST = (
    (".*attention/(query|key|value)/kernel", 1, 0),
    (".*attention/attention_output/kernel", 0, 2),
    (".*fc1/kernel", 1, 0),
    (".*fc2/kernel", 0, 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="M2 alone")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw Fig. 12 to this file, and stop")
    options = parser.parse_args()
    if options.plot:
        plot(options.plot)
        return
    chosen = ["M2"] if options.quick else list(HIDDEN)
    steps = {name: capture(HIDDEN[name]) for name in chosen}
    rows: list[dict[str, Any]] = []
    print("| interconnect | model | mesh | eq. 2, ms a layer | tfpar, ms a step (waiting) |")
    print("|---|---|---|---|---|")
    for preset, size in SIZES.items():
        cluster = fit_to_mesh(read_preset(preset), tap.Mesh.of([size]))
        for name, step in steps.items():
            for row in compare(preset, cluster, name, step):
                rows.append(row)
                print(
                    f"| {preset} | {name} | {shown(row['mesh'])} | {1e3 * row['formula_s']:.2f} | "
                    f"{1e3 * row['step_s']:.2f} ({1e3 * row['waiting_s']:.2f}) |",
                    flush=True,
                )
    print("\n| interconnect | model | paper | eq. 2 | tfpar |\n|---|---|---|---|---|")
    for preset in SIZES:
        for name in chosen:
            own = [r for r in rows if (r["interconnect"], r["model"]) == (preset, name)]
            cells = (selected(own, "formula_s"), selected(own, "step_s"))
            print(f"| {preset} | {name} | {PAPER.get(preset, '')} | {' | '.join(cells)} |")
    save(options.json, rows)


def compare(
    preset: str, cluster: Cluster, name: str, step: CapturedStep
) -> Iterator[dict[str, Any]]:
    """A row for each mesh: seconds a layer by eq. 2, and of the step as tfpar prices it."""
    hidden_bytes = BATCH * LENGTH * HIDDEN[name] * 2
    for mesh in device_meshes(cluster.size):
        cost = price(step, cluster, *mesh)
        yield {
            "interconnect": preset,
            "model": name,
            "mesh": list(mesh),
            "formula_s": tensor_parallel_seconds(cluster, *mesh, hidden_bytes),
            "step_s": cost.seconds,
            "waiting_s": sum(cost.communication_s) + cost.exposed_s - cost.hidden_s,
        }


def selected(rows: Sequence[dict[str, Any]], by: str) -> str:
    """The mesh with the least of `by`."""
    return shown(min(rows, key=lambda row: row[by])["mesh"])


def shown(mesh: Sequence[int]) -> str:
    """`(2, 4)`."""
    return str(tuple(mesh))


def capture(hidden: int) -> CapturedStep:
    """The training step of a GPT of two layers in 16 bits; no weight is given memory."""
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    build = functools.partial(
        models.gpt,
        VOCABULARY,
        length=LENGTH,
        hidden=hidden,
        num_layers=LAYERS,
        heads=hidden // HEAD_SIZE,
    )
    try:
        return captured_step(build, BATCH)
    finally:
        keras.mixed_precision.set_dtype_policy(before)


def price(step: CapturedStep, cluster: Cluster, d1: int, d2: int) -> Cost:
    """What the step costs with weights laid over DeviceMesh(d1, d2) as ATP does."""
    plan, _ = planned(step, cluster, d1, d2)
    assert plan.cost is not None
    return plan.cost


def planned(step: CapturedStep, cluster: Cluster, d1: int, d2: int) -> tuple[Plan, Problem]:
    """The plan of weights that are laid over DeviceMesh(d1, d2) as ATP does, priced, and what it
    is a plan of."""
    mesh = tap.Mesh(("data", "d1", "d2"), (1, d1, d2))
    return constrained(step, BATCH, cluster, mesh, (tap.batch("data"), *_constraints(mesh)))


def _constraints(mesh: tap.Mesh) -> Iterator[Constraint]:
    for pattern, over_d1, over_d2 in COLUMN_AND_ROW_FIRST:
        for axis, dim in (("d1", over_d1), ("d2", over_d2)):
            if mesh.shape[mesh.axis(axis)] > 1:
                yield tap.shard(pattern, dim=dim, axis=axis)


# --- Fig. 12 ----------------------------------------------------------------------------


def curves(preset: str, sizes: tuple[int, ...]) -> dict[str, list[float | None]]:
    """By curve: T_comm in units of 2 L b s h / GroupBW, at each number of devices (§5.4)."""
    flat = read_preset(preset)
    level = flat.nodes[0].levels[0]
    found: dict[str, list[float | None]] = {f"ATP-{i}": [] for i in (1, 2, 4)}
    found["ATP-OPT"] = []
    for size in sizes:
        grown = dataclasses.replace(flat.nodes[0], levels=(dataclasses.replace(level, count=size),))
        cluster = dataclasses.replace(flat, nodes=(grown,))
        seconds = {
            d2: tensor_parallel_seconds(cluster, d1, d2, 1.0) for d1, d2 in device_meshes(size)
        }
        unit = 2.0 / level.bandwidth
        for i in (1, 2, 4):
            found[f"ATP-{i}"].append(seconds[i] / unit if i in seconds else None)
        found["ATP-OPT"].append(min(seconds.values()) / unit)
    return found


def plot(path: str) -> None:
    """Draw Fig. 12: ATP-1 rises with the number of devices, ATP-OPT falls."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = (2, 4, 8, 16, 32, 64, 128, 256)
    figure, axes = plt.subplots(figsize=(6, 4))
    for name, values in curves("atp-ic5", sizes).items():
        known = [(n, v) for n, v in zip(sizes, values, strict=True) if v is not None]
        axes.plot(
            *zip(*known, strict=True),
            marker="o",
            label=name,
            linestyle="--" if name == "ATP-OPT" else "-",
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("devices on one flat layer (IC5)")
    axes.set_ylabel("T_comm / (2 L b s h / GroupBW)")
    axes.legend()
    save_plot(figure, path)


if __name__ == "__main__":
    main()
