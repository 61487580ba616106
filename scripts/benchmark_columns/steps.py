"""What is written of steps, measured and predicted."""

from __future__ import annotations

from benchmarks.results import Result
from benchmarks.shaped_cluster.unequal import layout, summary
from scripts.benchmark_columns.cells import (
    Column,
    Row,
    Taken,
    measured,
    number,
    table,
    text,
    with_source,
)

_CONTENDER: list[Column] = [(key, text(key)) for key in ("model", "system", "ranks", "layout")]
_CPU: list[Column] = [
    ("CPU s", Taken("cpu_s", ".3f")),
    ("CPU ratio", number("cpu_ratio", ".2f")),
]
STEP: list[Column] = [
    *_CONTENDER,
    *_CPU,
    ("first step s", Taken("first_step_s", ".1f")),
    ("first step ratio", number("first_step_ratio", ".2f")),
    ("peak MiB", number("peak_mib", ".0f")),
]
PROCESSES: list[Column] = [
    *_CONTENDER,
    *_CPU,
    ("wall s", Taken("wall_s", ".3f")),
    ("first step s", Taken("first_step_s", ".1f")),
    ("peak MiB", number("peak_mib", ".0f")),
]
GPU: list[Column] = [
    *((key, text(key)) for key in ("layers", "system", "ranks")),
    ("XLA", lambda row: "yes" if row["xla"] else "no"),
    ("step ms", number("step_s", ".1f", 1e3)),
    ("first step s", number("first_step_s", ".0f")),
    ("peak GB", number("peak_bytes", ".1f", 1e-9)),
]
PROPAGATION: list[Column] = [
    ("layers", text("layers")),
    ("ops", number("ops", ",")),
    ("candidates a second", number("candidates_per_s", ".1f")),
]

CHECKPOINT_WAIT: list[Column] = [
    ("processes", text("processes")),
    ("written", text("kind")),
    ("checkpoint MB", number("bytes", ".0f", 1e-6)),
    ("step s", number("step_s", ".3f")),
    ("the next step s", number("next_s", ".3f")),
    ("waits s (median)", number("waited_s", ".3f")),
    ("waits s (longest)", number("longest_s", ".3f")),
    ("share of at once", number("share", ".3f")),
]

CHECKING: list[Column] = [
    ("what", text("what")),
    ("blocks of samples, of which one is looked at", text("blocks")),
    ("ms", number("seconds", ".2f", 1e3)),
    ("every s", number("every_s", ".2f")),
    ("share", number("share", ".2%")),
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
    return with_source(heads, cells, result)


def unequal(result: Result) -> str:
    """A row for each plan, and what they come to."""
    columns: list[Column] = [
        ("plan", text("plan")),
        ("layout", layout),
        ("predicted s", number("predicted_s", ".2f")),
        ("measured s", number("measured_s", ".2f")),
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
    ("setting", text("setting")),
    ("plans", text("count")),
    ("within 15 %", number("within", ".0%")),
    ("Spearman's rho", number("rho", ".2f")),
    ("GPT: searched / best measured", lambda row: f"{row['choice_of']['gpt']:.2f}"),
    ("wide: searched / best", lambda row: f"{row['choice_of']['wide']:.2f}"),
    ("measured", lambda row: ", ".join(measured(row))),
]
PARALLELISM: list[Column] = [
    ("processes", number("ranks", "d")),
    ("layout", text("layout")),
    ("weights and slots, MB", number("stored_bytes", ".0f", 1e-6)),
    ("predicted peak, MB", number("predicted_bytes", ".0f", 1e-6)),
    ("grown by, MB", number("grown_bytes", ".0f", 1e-6)),
    ("step, of data parallelism's: predicted", number("predicted_ratio", ".2f")),
    ("measured", number("step_ratio", ".2f")),
]
LONG_SEQUENCES: list[Column] = [
    ("processes", number("ranks", "d")),
    ("attention", text("layout")),
    ("predicted peak, MB", number("predicted_bytes", ".0f", 1e-6)),
    ("of one device's", number("predicted_part", ".2f")),
    ("grown by, MB", number("grown_bytes", ".0f", 1e-6)),
    ("of one device's", number("grown_part", ".2f")),
    ("step, of one device's: predicted", number("predicted_ratio", ".2f")),
    ("measured", number("step_ratio", ".2f")),
]

MEMORY: list[Column] = [
    ("model", text("model")),
    ("plan", text("plan")),
    ("predicted", number("predicted", ".0f", 1e-6)),
    ("measured", number("measured", ".0f", 1e-6)),
    ("ratio", lambda row: f"{row['predicted'] / row['measured']:.2f}"),
]
