"""What is written of planning."""

from __future__ import annotations

from benchmarks.results import Result
from scripts.benchmark_columns.cells import Column, Taken, count, number, short, text, with_source

SEARCH: list[Column] = [
    ("case", text("case")),
    ("parameters", lambda row: count(row["parameters"])),
    ("ops", number("ops", ",")),
    ("GraphNodes", number("nodes", ",")),
    ("with weights", number("weighted_nodes", ",")),
    ("subgraphs", number("subgraphs")),
    ("plans priced", number("candidates", ",")),
    ("valid", number("valid", ",")),
    ("build s", Taken("build_s", ".1f")),
    ("capture s", Taken("capture_s", ".1f")),
    ("search s", Taken("search_s", ".1f")),
    ("lay out s", Taken("layout_s", ".1f")),
    ("total s", Taken("total_s", ".1f")),
    ("peak MiB", number("peak_mib", ".0f")),
]
LAYOUT_MAPS: list[Column] = [
    ("model", text("model")),
    *(
        column
        for plan, title in (("map", "by its map"), ("found", "found"))
        for column in (
            (title, lambda row, plan=plan: row[plan]["mesh"]),
            ("step ms", lambda row, plan=plan: f"{row[plan]['step_s'] * 1e3:.0f}"),
            ("GB moved", lambda row, plan=plan: f"{row[plan]['moved_bytes'] / 1e9:.1f}"),
            ("GB a device", lambda row, plan=plan: f"{row[plan]['memory_bytes'] / 1e9:.0f}"),
        )
    ),
]


def planning_in_words(result: Result) -> str:
    """The sentences on what planning takes."""
    rows = {row["case"]: row for row in result.rows}
    gpt12, gpt96, t5, gpt3 = (rows[n] for n in ("gpt-12", "gpt-96", "t5-48", "gpt3-175B"))
    return (
        f"TAP's took {short(gpt12['search_s'])} CPU-seconds on 2 x 8 V100 for a GPT of 12 layers, "
        f"{short(gpt96['search_s'])} for 96, and\n"
        f"{short(t5['search_s'])} for T5-Large ({t5['candidates']:,} plans). With building and "
        f"tracing, T5-Large was planned in {t5['total_s']:.0f} CPU-seconds and\n"
        f"GPT-3 (175 billion parameters) in {gpt3['total_s']:.0f}, at "
        f"{gpt3['peak_mib'] / 1024:.1f} GiB. "
        f"({', '.join(filter(None, [f'Measured on {result.date}', result.note]))}.)"
    )


BEFORE = "2026-11-23"
WANTED = (
    ("T5-Large, search", "t5-48", "search_s", 14.2, 2),
    ("GPT, 12 layers, search", "gpt-12", "search_s", 7.3, 1.5),
    ("GPT, 24 layers, search", "gpt-24", "search_s", 8.1, 1.5),
    ("GPT, 96 layers, search", "gpt-96", "search_s", 11.2, 1.5),
    ("ResNet50, 1,000 classes, search", "resnet50-1k", "search_s", 17.8, 3),
    ("T5-Large, from model to plan", "t5-48", "total_s", 19.2, 8),
    ("GPT, 24 layers, from model to plan", "gpt-24", "total_s", 11.6, 5),
    ("GPT-3 175B, from model to plan", "gpt3-175B", "total_s", 23.9, 15),
)
"""What is timed, the case and field of `benchmarks.search`, its CPU-seconds on the day `BEFORE`,
and those that are wanted at most."""


def before_and_after(result: Result) -> str:
    """What planning took, takes and is to take."""
    rows = {row["case"]: row for row in result.rows}
    cells = []
    for name, case, field, before, wanted in WANTED:
        now = rows[case][field]
        reached = "yes" if now <= wanted else f"no, {now / wanted:.1f} times as much"
        cells.append(
            [name, short(before), short(now), f"{now / before:.2f}", f"{wanted:g}", reached]
        )
    heads = ("CPU-seconds", BEFORE, result.date, "ratio", "wanted", "reached")
    return with_source(heads, cells, result)


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
    ("Ops", number("ops", ",")),
    ("Folded", number("folded_ops", ",")),
    ("Weights", lambda row: f"{row['weights']:,} -> {row['placements']}"),
]
