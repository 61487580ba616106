"""What is written of planners side by side."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.results import Result
from scripts.benchmark_columns.cells import Row, number, short, with_source

PLANNED = {
    "gpt_medium": "GPT-Medium",
    "gpt_large": "GPT-Large",
    "gpt_xl": "GPT-XL",
    "gpt_2b7": "GPT-2.7B",
    "gpt_6b7": "GPT-6.7B",
    "moe_8e_380m": "MoE-8E-380M",
    "moe_8e_760m": "MoE-8E-760M",
    "moe_16e_1b3": "MoE-16E-1.3B",
    "moe_16e_2b4": "MoE-16E-2.4B",
    "moe_32e_10b": "MoE-32E-10B",
    "vgg19_1m": "VGG19, 1M classes",
    "dnabert": "DNABERT",
    "unet": "U-Net",
    "wide_resnet_1b": "Wide-ResNet-1B",
    "wide_resnet_2b6": "Wide-ResNet-2.6B",
    "wide_resnet_6b": "Wide-ResNet-6B",
    "wide_resnet_12b": "Wide-ResNet-12B",
    "t5_large": "T5-Large",
    "bert_large": "BERT-Large",
    "resnet50": "ResNet50",
    "gpt-72": "GPT, 72 layers",
    "albert_xxlarge": "ALBERT-xxlarge",
    "roberta_large": "RoBERTa-Large",
}
_PLANNERS = ("tap", "rhino-2", "rhino-3")


def planners(cluster: str) -> Callable[[Result], str]:
    """A row for each model and number of devices, the planners side by side."""

    def text(result: Result) -> str:
        found: dict[tuple[str, int], dict[str, Row]] = {}
        for row in result.rows:
            if row["cluster"] == cluster and row["devices"] > 1:
                found.setdefault((row["case"], row["devices"]), {})[row["planner"]] = row
        cells = [
            [
                PLANNED[case],
                str(devices),
                *(_step(rows.get(p, {})) for p in _PLANNERS),
                number("gib", ".1f")(rows.get("rhino-3", {})),
                *(_searched(rows.get(p, {})) for p in _PLANNERS),
            ]
            for (case, devices), rows in found.items()
        ]
        heads = (
            f"`{cluster}`",
            "devices",
            "TAP, ms",
            "level 2, ms",
            "level 3, ms",
            "level 3, GiB",
            "TAP, s",
            "level 2, s",
            "level 3, s",
        )
        return with_source(heads, cells, result)

    return text


def staged(result: Result) -> str:
    """A row for each model, batch and cluster: both levels alone, and with stages in the space."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in result.rows:
        found.setdefault((row["case"], row["cluster"]), {})[row["planner"]] = row
    cells = []
    for (case, cluster), rows in found.items():
        row = rows.get("rhino-3-stages", {})
        if row:
            cells.append(
                [
                    PLANNED[case.removesuffix("_full")],
                    str(row["devices"]),
                    str(row["batch"]),
                    f"`{cluster}`",
                    *(_planned(rows.get(f"rhino-{level}-whole", {})) for level in (2, 3)),
                    _planned(row),
                    number("gib", ".1f")(row),
                    row.get("plan", "-").partition(", batch over ")[0],
                    _searched(row),
                ]
            )
    heads = (
        "model",
        "devices",
        "batch",
        "cluster",
        "level 2, ms",
        "level 3, ms",
        "with stages, ms",
        "GiB",
        "plan",
        "stages, CPU s",
    )
    return with_source(heads, cells, result)


def _planned(row: Row) -> str:
    """Milliseconds of a step, if a plan was found that fits."""
    return "does not fit" if "ms" not in row and "refused" in row else _step(row)


def _step(row: Row) -> str:
    """Milliseconds of a step, starred if the plan does not fit."""
    star = " *" if row.get("refused") else ""
    return f"{row['ms']:.1f}{star}" if "ms" in row else "-"


def _searched(row: Row) -> str:
    return short(row["search_cpu_s"]) if "search_cpu_s" in row else "-"


def depth(result: Result) -> str:
    """A row for each number of layers, the planners side by side."""
    found: dict[str, dict[str, Row]] = {}
    for row in result.rows:
        found.setdefault(row["case"], {})[row["planner"]] = row
    order = ("rhino-2", "rhino-3", "tap")
    counted = ("instructions", "critical_nodes", "subgraphs", "nodes", "cones")
    cells = [
        [
            case.removeprefix("gpt-"),
            *(str(rows["rhino-2"]["counts"][n]) for n in counted),
            *(_searched(rows[p]) for p in order),
            *(_step(rows[p]) for p in order),
        ]
        for case, rows in found.items()
    ]
    heads = (
        "layers",
        "ops",
        "critical nodes",
        "segments",
        "nodes",
        "cones",
        "level 2, s",
        "level 3, s",
        "TAP, s",
        "level 2, ms",
        "level 3, ms",
        "TAP, ms",
    )
    return with_source(heads, cells, result)


CRITICAL_OF_RHINO = {"gpt-72": ("76k", "378", "0.5 %"), "moe_32e_10b": ("18k", "90", "0.5 %")}
"""Rhino's Table 5: instructions, critical nodes, and what part they are; there is one segment fewer
than critical nodes."""


def critical(result: Result) -> str:
    """A row for each model: how many of its ops are critical nodes, beside Rhino's Table 5."""
    found: dict[str, dict[str, Row]] = {}
    for row in result.rows:
        found.setdefault(row["case"], {})[row["planner"]] = row
    cells = []
    for case, rows in found.items():
        counts = next(row["counts"] for row in rows.values() if "critical_nodes" in row["counts"])
        ops, nodes = counts["instructions"], counts["critical_nodes"]
        cells.append(
            [
                PLANNED[case],
                str(next(iter(rows.values()))["devices"]),
                f"{ops:,}",
                str(nodes),
                f"{nodes / ops:.1%}".replace("%", " %"),
                str(counts["subgraphs"]),
                *CRITICAL_OF_RHINO.get(case, ("-", "-", "-")),
                *(_searched(rows.get(p, {})) for p in _PLANNERS),
                *(_step(rows.get(p, {})) for p in _PLANNERS),
            ]
        )
    heads = (
        "model",
        "devices",
        "ops",
        "critical nodes",
        "part",
        "segments",
        "Rhino's instructions",
        "critical nodes",
        "part",
        "TAP, s",
        "level 2, s",
        "level 3, s",
        "TAP, ms",
        "level 2, ms",
        "level 3, ms",
    )
    return with_source(heads, cells, result)
