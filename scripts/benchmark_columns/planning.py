"""What is written of planning."""

from __future__ import annotations

from benchmarks.results import Result
from scripts.benchmark_columns.cells import Column, count, number, short, text

SEARCH: list[Column] = [
    ("case", text("case")),
    ("parameters", lambda row: count(row["parameters"])),
    ("ops", number("ops", ",")),
    ("GraphNodes", number("nodes", ",")),
    ("with weights", number("weighted_nodes", ",")),
    ("subgraphs", number("subgraphs")),
    ("plans priced", number("candidates", ",")),
    ("valid", number("valid", ",")),
    ("build s", number("build_s", ".1f")),
    ("capture s", number("capture_s", ".1f")),
    ("search s", number("search_s", ".1f")),
    ("lay out s", number("layout_s", ".1f")),
    ("total s", number("total_s", ".1f")),
    ("peak MiB", number("peak_mib", ".0f")),
]


def planning_in_words(result: Result) -> str:
    """What the README says of planning."""
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
