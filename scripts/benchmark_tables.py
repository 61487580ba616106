"""Write the figures that the documentation quotes from the results of benchmarks.

    python -m scripts.benchmark_tables [--check]

A page has `<!-- begin NAME -->` and `<!-- end NAME -->` around what is written here, tables and
sentences alike, from `benchmarks/results/*.json`. To measure anew, run a benchmark with
`--json benchmarks/results/NAME.json` (`make bench-tables` runs those that take minutes), then
this. `--check` writes nothing, and fails if a page is not in step.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.results import Result
from benchmarks.shaped_cluster.unequal import layout, summary
from scripts.tables import markdown_table

ROOT = pathlib.Path(__file__).parent.parent
MARKED = re.compile(r"<!-- begin ([\w-]+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a page.

    Attributes:
        page: which, from the root of the repository.
        source: the result that it is made from.
        text: what is written.
    """

    page: str
    source: str
    text: Callable[[Result], str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = False
    for name in sorted({block.page for block in BLOCKS.values()}):
        page = ROOT / name
        written = page.read_text(encoding="utf-8")
        current = in_step(written)
        if current != written:
            stale = True
            print(f"{name} is not in step" if check else name)
            if not check:
                page.write_text(current, encoding="utf-8")
    return int(check and stale)


def in_step(page: str) -> str:
    """The text of a page with every marked part written anew."""

    def written(match: re.Match[str]) -> str:
        block = BLOCKS[match[1]]
        text = block.text(Result.load(block.source))
        return f"<!-- begin {match[1]} -->\n{text}\n<!-- end {match[1]} -->"

    return MARKED.sub(written, page)


# --- how cells read -------------------------------------------------------------------------------


def table(
    columns: Sequence[Column], choose: Callable[[Row], bool] = lambda _: True
) -> Callable[[Result], str]:
    """A table of the rows of a result, and where it comes from."""

    def text(result: Result) -> str:
        rows = [[cell(row) for _, cell in columns] for row in result.rows if choose(row)]
        return _with_source([name for name, _ in columns], rows, result)

    return text


def _with_source(heads: Sequence[str], rows: Iterable[Sequence[str]], result: Result) -> str:
    commit = result.commit and f"commit {result.commit}"
    parts = [f"`{result.command}`", result.date, commit, result.note]
    return f"\n{markdown_table(heads, rows)}\n\n{', '.join(filter(None, parts))}.\n"


def _number(key: str, form: str = "", scale: float = 1) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.get(key)
        return "-" if value is None else format(value * scale, form)

    return cell


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def _count(number: float) -> str:
    """`738 M`, `1.31 B`."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"


def _short(seconds: float) -> str:
    """One digit behind the point, from ten on none."""
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


# --- planning -------------------------------------------------------------------------------------

SEARCH: list[Column] = [
    ("case", _text("case")),
    ("parameters", lambda row: _count(row["parameters"])),
    ("ops", _number("ops", ",")),
    ("GraphNodes", _number("nodes", ",")),
    ("with weights", _number("weighted_nodes", ",")),
    ("subgraphs", _number("subgraphs")),
    ("plans priced", _number("candidates", ",")),
    ("valid", _number("valid", ",")),
    ("build s", _number("build_s", ".1f")),
    ("capture s", _number("capture_s", ".1f")),
    ("search s", _number("search_s", ".1f")),
    ("lay out s", _number("layout_s", ".1f")),
    ("total s", _number("total_s", ".1f")),
    ("peak MiB", _number("peak_mib", ".0f")),
]


def planning_in_words(result: Result) -> str:
    """What the README says of planning."""
    rows = {row["case"]: row for row in result.rows}
    gpt12, gpt96, t5, gpt3 = (rows[n] for n in ("gpt-12", "gpt-96", "t5-48", "gpt3-175B"))
    return (
        f"TAP's took {_short(gpt12['search_s'])} CPU-seconds on 2 x 8 V100 for a GPT of 12 layers, "
        f"{_short(gpt96['search_s'])} for 96, and\n"
        f"{_short(t5['search_s'])} for T5-Large ({t5['candidates']:,} plans). With building and "
        f"tracing, T5-Large was planned in {t5['total_s']:.0f} CPU-seconds and\n"
        f"GPT-3 (175 billion parameters) in {gpt3['total_s']:.0f}, at "
        f"{gpt3['peak_mib'] / 1024:.1f} GiB. "
        f"({', '.join(filter(None, [f'Measured on {result.date}', result.note]))}.)"
    )


# What the paper's table names, and what is found: by the case of `benchmarks.subgraphs`.
SUBGRAPHS = {
    "resnet50": (
        "ResNet-50",
        "conv 50x",
        "conv 52x in 19 shapes; bottlenecks 12x in 4 shapes and 4x in 4",
    ),
    "clip_base": ("CLIP-Base", "transformer 12x", "transformer 12x (text), 12x (image)"),
    "widenet_huge": ("WideNet", "MoE layer 32x", "MoE layer 32x, in a transformer block 32x"),
    "vit_huge": ("ViT-Huge", "transformer 32x", "transformer 32x"),
    "vmoe_15b": ("V-MoE", "MoE layer 24x", "MoE layer 24x, in a pair of blocks 24x"),
    "wav2vec2_large": (
        "wav2vec 2.0",
        "conv 7x, transformer 24x",
        "conv 7x in 7 shapes, transformer 24x",
    ),
    "bert_large": ("BERT-Large", "transformer 24x", "transformer 24x"),
    "t5_large": ("T5-Large", "transformer 24x", "transformer 24x (encoder), 24x (decoder)"),
    "gpt3": ("GPT-3", "transformer 96x", "transformer 96x"),
    "switch_c": (
        "Switch Transformer",
        "MoE layer 15x",
        "MoE layer 30x, in blocks 15x (encoder) and 15x (decoder)",
    ),
}
SUBGRAPH_COLUMNS: list[Column] = [
    *(
        (head, lambda row, i=i: SUBGRAPHS[row["case"]][i])
        for i, head in enumerate(("Model", "Paper", "Found"))
    ),
    ("GraphNodes (with weights)", lambda row: f"{row['nodes']:,} ({row['weighted_nodes']})"),
    ("Ops", _number("ops", ",")),
    ("Folded", _number("folded_ops", ",")),
    ("Weights", lambda row: f"{row['weights']:,} -> {row['placements']}"),
]

# --- steps ----------------------------------------------------------------------------------------

_CONTENDER: list[Column] = [(key, _text(key)) for key in ("model", "system", "ranks", "layout")]
_CPU: list[Column] = [
    ("CPU s", _number("cpu_s", ".3f")),
    ("CPU ratio", _number("cpu_ratio", ".2f")),
]
STEP: list[Column] = [
    *_CONTENDER,
    *_CPU,
    ("first step s", _number("first_step_s", ".1f")),
    ("first step ratio", _number("first_step_ratio", ".2f")),
    ("peak MiB", _number("peak_mib", ".0f")),
]
PROCESSES: list[Column] = [
    *_CONTENDER,
    *_CPU,
    ("wall s", _number("wall_s", ".3f")),
    ("first step s", _number("first_step_s", ".1f")),
    ("peak MiB", _number("peak_mib", ".0f")),
]
PROPAGATION: list[Column] = [
    ("layers", _text("layers")),
    ("ops", _number("ops", ",")),
    ("candidates a second", _number("candidates_per_s", ".1f")),
]


def shaped(result: Result) -> str:
    """A row for each cluster and bandwidth, its layouts side by side."""
    places: dict[tuple[str, float | None], dict[str, Row]] = {}
    for row in result.rows:
        places.setdefault((row["cluster"], row["mbit"]), {})[row["layout"]] = row
    cells = []
    for (cluster, mbit), layouts in places.items():
        chosen = layouts["chosen"]
        fastest = min(layouts, key=lambda name: layouts[name]["step_s"])
        cells.append(
            [
                cluster,
                "no limit" if mbit is None else f"{mbit:g}",
                *(f"{layouts[name]['step_s']:.2f}" for name in ("data", "megatron", "chosen")),
                f"{chosen['sent_bytes'] / 1e6:.1f}",
                f"{chosen['planned_bytes'] / 1e6:.1f}",
                fastest,
            ]
        )
    heads = (
        "ranks",
        "Mbit/s",
        "data s",
        "Megatron s",
        "chosen s",
        "chosen: sent MB",
        "predicted MB",
        "fastest",
    )
    return _with_source(heads, cells, result)


def unequal(result: Result) -> str:
    """A row for each plan, and what they come to."""
    columns: list[Column] = [
        ("plan", _text("plan")),
        ("layout", layout),
        ("predicted s", _number("predicted_s", ".2f")),
        ("measured s", _number("measured_s", ".2f")),
        ("ratio", lambda row: f"{row['predicted_s'] / row['measured_s']:.2f}"),
    ]
    found = summary(result.rows)
    said = (
        f"The plan that is chosen is {found['data']:.1f} times as fast as data parallelism and "
        f"{found['megatron']:.1f} times as fast as Megatron's layout; it takes {found['best']:.2f} "
        f"of what the fastest of the {len(result.rows)} plans takes. Spearman's rho of predicted "
        f"and measured seconds is {found['rho']:.2f}."
    )
    return f"{table(columns)(result)}\n{said}\n"


PREDICTION: list[Column] = [
    ("setting", _text("setting")),
    ("plans", _text("count")),
    ("Spearman's rho", _number("rho", ".2f")),
    ("GPT: searched / best measured", lambda row: f"{row['choice_of']['gpt']:.2f}"),
    ("wide: searched / best", lambda row: f"{row['choice_of']['wide']:.2f}"),
]
MEMORY: list[Column] = [
    ("model", _text("model")),
    ("plan", _text("plan")),
    ("predicted", _number("predicted", ".0f", 1e-6)),
    ("measured", _number("measured", ".0f", 1e-6)),
    ("ratio", lambda row: f"{row['predicted'] / row['measured']:.2f}"),
]

# --- meshes and plans -----------------------------------------------------------------------------

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
    ("interconnect", _text("interconnect")),
    ("mesh", lambda row: _mesh(row)),
    ("eq. 2, ms a layer", _number("formula_s", ".2f", 1e3)),
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
    return _with_source(heads, cells, result)


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
    ("plan", _text("plan")),
    ("step ms", _number("step_s", ".0f", 1e3)),
    ("compute ms", _number("compute_s", ".0f", 1e3)),
    ("waiting for collectives ms", _number("waiting_s", ".0f", 1e3)),
    ("gradients exposed ms", _number("exposed_s", ".0f", 1e3)),
    ("GiB", _number("memory_bytes", ".1f", 2**-30)),
]

# --- planners -------------------------------------------------------------------------------------

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
                _number("gib", ".1f")(rows.get("rhino-3", {})),
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
        return _with_source(heads, cells, result)

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
                    _number("gib", ".1f")(row),
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
    return _with_source(heads, cells, result)


def _planned(row: Row) -> str:
    """Milliseconds of a step, if a plan was found that fits."""
    return "does not fit" if "ms" not in row and "refused" in row else _step(row)


def _step(row: Row) -> str:
    """Milliseconds of a step, starred if the plan does not fit."""
    star = " *" if row.get("refused") else ""
    return f"{row['ms']:.1f}{star}" if "ms" in row else "-"


def _searched(row: Row) -> str:
    return _short(row["search_cpu_s"]) if "search_cpu_s" in row else "-"


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
    return _with_source(heads, cells, result)


_BENCHMARKS, _RHINO = "docs/benchmarks.md", "docs/rhino.md"
ACCUMULATION: list[Column] = [
    ("microbatches", lambda row: str(row["microbatches"] or "plain Keras")),
    ("peak MiB", _number("peak_bytes", ".0f", 1 / 2**20)),
    ("predicted MiB", _number("predicted_bytes", ".0f", 1 / 2**20)),
    ("CPU s", _number("cpu_s", ".2f")),
    ("loss", lambda row: f"{row['losses'][-1]:.6f}"),
]

THREE_D: list[Column] = [
    ("set-up", _text("setup")),
    ("chosen by", _text("system")),
    ("step s", _number("seconds", ".3f")),
    ("times as fast as Megatron's", _number("speedup", ".2f")),
    ("stages x data x tensor", lambda row: row["strategy"].partition(",")[0]),
    ("search CPU s", _number("search_cpu_s", ".2f")),
]
LARGE: list[Column] = [
    ("set-up", _text("setup")),
    ("stages x data x tensor", lambda row: row["strategy"].partition(", layers")[0]),
    ("step s", _number("seconds", ".3f")),
    ("Megatron's heuristic s", _number("megatron_s", ".3f")),
    ("MFU", _number("mfu", ".3f")),
    ("bubble", _number("bubble", ".3f")),
    ("GB a device", lambda row: _by_device(row["stored_bytes"], row["memory_bytes"])),
    ("search s", _number("search_s", ".0f")),
    ("CPU s", _number("search_cpu_s", ".0f")),
    ("GB", _number("search_bytes", ".2f", 1e-9)),
    ("the same again", lambda row: "yes" if row["same_again"] else "no"),
]
SCALE: list[Column] = [
    ("devices", _number("devices", ",")),
    ("layers", _text("layers")),
    ("strategies priced", _text("evaluated")),
    ("CPU s", lambda row: _short(row["search_cpu_s"])),
    ("ms each", lambda row: f"{row['search_cpu_s'] / row['evaluated'] * 1e3:.0f}"),
    ("stages x data x tensor", lambda row: row["strategy"].partition(", layers")[0]),
]
LARGE_PLANNED: list[Column] = [
    ("layers", _text("layers")),
    ("devices", _number("devices", ",")),
    ("batch", _number("batch", ",")),
    ("plan", _text("plan")),
    ("step s", _number("step_s", ".1f")),
    ("bubble", _number("bubble", ".2f")),
    ("GB a device", _number("memory_bytes", ".0f", 1e-9)),
    ("CPU s", _number("plan_cpu_s", ".0f")),
    ("s", _number("plan_s", ".0f")),
    ("peak GB", _number("peak_bytes", ".1f", 1e-9)),
]
PUBLISHED: list[Column] = [
    ("run", _text("run")),
    ("stages x data x tensor", lambda row: row["strategy"].partition(",")[0]),
    ("published s", _number("published_s", ".3f")),
    ("predicted s", _number("predicted_s", ".3f")),
    ("ratio", _number("ratio", ".2f")),
    ("of these passes s", _number("passes_s", ".2f")),
    ("tensor sums s", _number("tensor_sums_s", ".2f")),
    (
        "published GB",
        lambda row: f"{row['published_bytes'] / 1e9:.2f}" if row["published_bytes"] else "-",
    ),
    ("predicted GB", _number("predicted_bytes", ".2f", 1e-9)),
]
TRIALS: list[Column] = [
    ("setting", _text("setting")),
    ("trials", _number("trials")),
    ("rho", _number("rho", ".3f")),
    ("rho of the formulas alone", _number("rho_formulas", ".3f")),
    ("first choice over the best", _number("measured_over_best", ".3f")),
]

_NAMES = {"data": "data", "megatron": "Megatron", "pipeline": "pipeline"}
_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "accumulation": "accumulation"}


def _by_device(stored: Mapping[str, float], memory: Mapping[str, float]) -> str:
    return ", ".join(
        f"{device.partition('-')[0]} {num_bytes / 1e9:.0f} of {memory[device] / 1e9:.0f}"
        for device, num_bytes in stored.items()
    )


def _most(key: str, scale: float) -> Callable[[Row], str]:
    """Of all ranks or stages."""
    return lambda row: f"{max(row[key]) * scale:.1f}"


PIPELINE_LINKS: list[Column] = [
    ("Mbit/s", lambda row: f"{row['mbit']:g}"),
    ("layout", lambda row: _NAMES[row["layout"]]),
    ("s", _number("step_s", ".2f")),
    ("predicted s", _number("planned_s", ".2f")),
    ("a node sends MB, at most", _most("sent_bytes", 1e-6)),
    ("predicted MB", _most("planned_bytes", 1e-6)),
]
PIPELINE_IN_PROCESS: list[Column] = [
    ("layout", lambda row: _NAMES[row["layout"]]),
    ("CPU s", _number("cpu_s", ".2f")),
    ("wall s", _number("wall_s", ".2f")),
    ("predicted s", _number("planned_s", ".2f")),
]
PIPELINE_MEMORY: list[Column] = [
    ("microbatches", _text("microbatches")),
    ("schedule", lambda row: _SCHEDULES[row["system"]]),
    ("first rank MiB", lambda row: f"{row['peak_bytes'][0] / 2**20:.0f}"),
    ("predicted MiB", lambda row: f"{row['predicted_bytes'][0] / 2**20:.0f}"),
    ("last rank MiB", lambda row: f"{row['peak_bytes'][-1] / 2**20:.0f}"),
    ("predicted MiB", lambda row: f"{row['predicted_bytes'][-1] / 2**20:.0f}"),
]
PIPELINE_FIRST_STEP: list[Column] = [
    ("layout", lambda row: _NAMES[row["layout"]]),
    ("layers", _text("layers")),
    ("CPU s", _number("cpu_s", ".1f")),
    ("ratio", _number("ratio", ".2f")),
]

BLOCKS = {
    "planning-in-words": Block("README.md", "search", planning_in_words),
    "search": Block(_BENCHMARKS, "search", table(SEARCH)),
    "subgraphs": Block("docs/shared_subgraphs.md", "subgraphs", table(SUBGRAPH_COLUMNS)),
    "step": Block(_BENCHMARKS, "step", table(STEP)),
    "step-searched": Block(_BENCHMARKS, "step_searched", table(STEP)),
    "step-processes": Block(_BENCHMARKS, "step_processes", table(PROCESSES)),
    "propagation": Block(_BENCHMARKS, "propagation", table(PROPAGATION)),
    "shaped": Block(_BENCHMARKS, "shaped_cluster", shaped),
    "unequal": Block(_BENCHMARKS, "shaped_unequal", unequal),
    "atp-meshes": Block(_BENCHMARKS, "atp", table(ATP_MESHES, lambda row: row["model"] == "M2")),
    "atp-selected": Block(_BENCHMARKS, "atp", atp_selected),
    "breakdown": Block(_BENCHMARKS, "breakdown", table(BREAKDOWN)),
    "accumulation": Block(_BENCHMARKS, "accumulation", table(ACCUMULATION)),
    "three-d": Block(_BENCHMARKS, "three_d", table(THREE_D)),
    "three-d-large": Block(_BENCHMARKS, "three_d_large", table(LARGE)),
    "three-d-scale": Block(_BENCHMARKS, "three_d_scale", table(SCALE)),
    "large-planned": Block(_BENCHMARKS, "large_planned", table(LARGE_PLANNED)),
    "three-d-published": Block(_BENCHMARKS, "three_d_published", table(PUBLISHED)),
    "three-d-trials": Block(_BENCHMARKS, "three_d_trials", table(TRIALS)),
    "pipeline-links": Block(_BENCHMARKS, "pipeline_links", table(PIPELINE_LINKS)),
    "pipeline-in-process": Block(_BENCHMARKS, "pipeline_in_process", table(PIPELINE_IN_PROCESS)),
    "pipeline-memory": Block(_BENCHMARKS, "pipeline_memory", table(PIPELINE_MEMORY)),
    "pipeline-first-step": Block(_BENCHMARKS, "pipeline_first_step", table(PIPELINE_FIRST_STEP)),
    "prediction": Block(_BENCHMARKS, "prediction", table(PREDICTION)),
    "memory": Block(_BENCHMARKS, "prediction_memory", table(MEMORY)),
    "depth": Block(_RHINO, "planners_depth", depth),
    "planners-m8": Block(_RHINO, "planners", planners("rhino-m8")),
    "planners-s1": Block(_RHINO, "planners", planners("rhino-s1")),
    "planners-stages": Block(_RHINO, "planners_stages", staged),
}

if __name__ == "__main__":
    sys.exit(main())
