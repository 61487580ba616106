"""What is written of microbatches and stages."""

from __future__ import annotations

from collections.abc import Callable

from scripts.benchmark_columns.cells import Column, Row, Taken, number, text

ACCUMULATION: list[Column] = [
    ("microbatches", lambda row: str(row["microbatches"] or "plain Keras")),
    ("peak MiB", number("peak_bytes", ".0f", 1 / 2**20)),
    ("predicted MiB", number("predicted_bytes", ".0f", 1 / 2**20)),
    ("CPU s", Taken("cpu_s", ".2f")),
    ("loss", lambda row: f"{row['losses'][-1]:.6f}"),
]

_NAMES = {"data": "data", "megatron": "Megatron", "pipeline": "pipeline"}
_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "accumulation": "accumulation"}


def _most(key: str, scale: float) -> Callable[[Row], str]:
    """Of all ranks or stages."""
    return lambda row: f"{max(row[key]) * scale:.1f}"


PIPELINE_LINKS: list[Column] = [
    ("Mbit/s", lambda row: f"{row['mbit']:g}"),
    ("layout", lambda row: _NAMES[row["layout"]]),
    ("s", number("step_s", ".2f")),
    ("predicted s", number("planned_s", ".2f")),
    ("a node sends MB, at most", _most("sent_bytes", 1e-6)),
    ("predicted MB", _most("planned_bytes", 1e-6)),
]
PIPELINE_IN_PROCESS: list[Column] = [
    ("layout", lambda row: _NAMES[row["layout"]]),
    ("CPU s", Taken("cpu_s", ".2f")),
    ("wall s", Taken("wall_s", ".2f")),
    ("predicted s", number("planned_s", ".2f")),
]
PIPELINE_MEMORY: list[Column] = [
    ("microbatches", text("microbatches")),
    ("schedule", lambda row: _SCHEDULES[row["system"]]),
    ("first rank MiB", lambda row: f"{row['peak_bytes'][0] / 2**20:.0f}"),
    ("predicted MiB", lambda row: f"{row['predicted_bytes'][0] / 2**20:.0f}"),
    ("last rank MiB", lambda row: f"{row['peak_bytes'][-1] / 2**20:.0f}"),
    ("predicted MiB", lambda row: f"{row['predicted_bytes'][-1] / 2**20:.0f}"),
]
PIPELINE_FIRST_STEP: list[Column] = [
    ("layout", lambda row: _NAMES[row["layout"]]),
    ("layers", text("layers")),
    ("CPU s", Taken("cpu_s", ".1f")),
    ("ratio", number("ratio", ".2f")),
]
