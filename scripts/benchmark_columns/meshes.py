"""What is written of ATP's meshes, and of what a step is made up."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.results import Result
from scripts.benchmark_columns.cells import Column, Row, count, number, text, with_source

ATP_PAPER = {"atp-ic1": "(2, 4)", "atp-ic2": "(8, 1)", "atp-ic3": "(8, 1)", "atp-ic4": "(8, 2)"}
ATP_LINKS = {
    "atp-ic1": "IC1, PCIe, calibrated",
    "atp-ic2": "IC2, pairs on NVLink",
    "atp-ic3": "IC3, NVSwitch",
    "atp-ic4": "IC4, InfiniBand, 16 devices",
    "atp-ic5": "IC5, one large switch, 16 devices",
    "atp-ic6": "IC6, 4 x 4 torus",
}

ATP_MESHES: list[Column] = [
    ("interconnect", text("interconnect")),
    ("mesh", lambda row: _mesh(row)),
    ("eq. 2, ms a layer", number("formula_s", ".2f", 1e3)),
    (
        "tfpar, ms a step (waiting)",
        lambda row: f"{1e3 * row['step_s']:.2f} ({1e3 * row['waiting_s']:.2f})",
    ),
]


def atp_selected(result: Result) -> str:
    """The meshes with the least time by the formula, and by the whole step."""
    cells = []
    for preset, links in ATP_LINKS.items():
        own = [row for row in result.rows if row["interconnect"] == preset]
        formula, step = (_selected(own, key) for key in ("formula_s", "step_s"))
        cells.append([links, ATP_PAPER.get(preset, ""), formula + _below_megatron(own), step])
    heads = ("interconnect", "paper", "eq. 2 to 4", "tfpar, whole step")
    return with_source(heads, cells, result)


def _selected(rows: Sequence[Row], key: str) -> str:
    """The mesh that all models agree on, else that of each."""
    best: dict[str, list[str]] = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        best.setdefault(_mesh(min(own, key=lambda row: row[key])), []).append(model)
    if len(best) == 1:
        return next(iter(best))
    return ", ".join(f"{mesh} for {' and '.join(models)}" for mesh, models in best.items())


def _below_megatron(rows: Sequence[Row]) -> str:
    """How much less the best mesh takes by the formula than all devices in the first dim."""
    own = [row for row in rows if row["model"] == rows[0]["model"]]
    megatron = next(row for row in own if row["mesh"][1] == 1)
    less = 1 - min(row["formula_s"] for row in own) / megatron["formula_s"]
    return f": {less:.0%} below {_mesh(megatron)}" if less > 0 else ""


def _mesh(row: Row) -> str:
    return str(tuple(row["mesh"]))


BREAKDOWN: list[Column] = [
    ("plan", text("plan")),
    ("step ms", number("step_s", ".0f", 1e3)),
    ("compute ms", number("compute_s", ".0f", 1e3)),
    ("waiting for collectives ms", number("waiting_s", ".0f", 1e3)),
    ("gradients exposed ms", number("exposed_s", ".0f", 1e3)),
    ("GiB", number("memory_bytes", ".1f", 2**-30)),
]

PLANS = {"tap": "TAP's planner", "data": "data parallelism", "megatron": "Megatron's plan"}
"""Those of `benchmarks.training_time`."""
TRAINING_TIME: list[Column] = [
    ("case", text("case")),
    ("parameters", lambda row: count(row["parameters"])),
    ("GPUs", text("devices")),
    ("plan", lambda row: row.get("found") or PLANS[row["plan"]]),
    ("step ms", number("step_s", ".0f", 1e3)),
    ("GiB", lambda row: f"{row['memory_bytes'] / 2**30:.1f}{'' if row['fits'] else ' *'}"),
]
