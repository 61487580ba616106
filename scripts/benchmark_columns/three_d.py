"""What is written of strategies of stages x data x tensor."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from benchmarks.results import Result
from scripts.benchmark_columns.cells import (
    Column,
    Row,
    Taken,
    number,
    short,
    source,
    text,
    with_source,
)
from tfpar.planning.objective import UNCERTAINTY

EQUAL = 1e-9
"""How far, as a part, seconds of equal strategies may be apart."""

THREE_D: list[Column] = [
    ("set-up", text("setup")),
    ("chosen by", text("system")),
    ("step s", number("seconds", ".3f")),
    ("times as fast as Megatron's", number("speedup", ".2f")),
    ("stages x data x tensor", lambda row: row["strategy"].partition(",")[0]),
    ("search CPU s", Taken("search_cpu_s", ".2f")),
]
LARGE: list[Column] = [
    ("set-up", text("setup")),
    ("stages x data x tensor", lambda row: row["strategy"].partition(", layers")[0]),
    ("step s", number("seconds", ".3f")),
    ("Megatron's heuristic s", number("megatron_s", ".3f")),
    ("MFU", number("mfu", ".3f")),
    ("bubble", number("bubble", ".3f")),
    ("GB a device", lambda row: _by_device(row["stored_bytes"], row["memory_bytes"])),
    ("search s", Taken("search_s", ".0f")),
    ("CPU s", Taken("search_cpu_s", ".0f")),
    ("GB", number("search_bytes", ".2f", 1e-9)),
    ("the same again", lambda row: "yes" if row["same_again"] else "no"),
]
SCALE: list[Column] = [
    ("devices", number("devices", ",")),
    ("layers", text("layers")),
    ("strategies priced", text("evaluated")),
    ("CPU s", lambda row: short(row["search_cpu_s"])),
    ("ms each", lambda row: f"{row['search_cpu_s'] / row['evaluated'] * 1e3:.0f}"),
    ("stages x data x tensor", lambda row: row["strategy"].partition(", layers")[0]),
]
LARGE_PLANNED: list[Column] = [
    ("set-up", text("setup")),
    ("plan", text("plan")),
    ("split slots", number("split_slots", "d")),
    ("step s", number("step_s", ".1f")),
    ("MFU", number("mfu", ".3f")),
    ("bubble", number("bubble", ".2f")),
    ("GB a device", number("memory_bytes", ".0f", 1e-9)),
    ("CPU s", Taken("plan_cpu_s", ".0f")),
    ("s", Taken("plan_s", ".0f")),
    ("peak GB", number("peak_bytes", ".1f", 1e-9)),
]
PLANNED_SCALE: list[Column] = [
    ("devices", number("devices", ",")),
    ("layers", text("layers")),
    ("plan", text("plan")),
    ("step s", number("step_s", ".2f")),
    ("CPU s", Taken("search_cpu_s", ".0f")),
    ("peak GB", number("peak_bytes", ".1f", 1e-9)),
]
PUBLISHED: list[Column] = [
    ("run", text("run")),
    ("stages x data x tensor", lambda row: row["strategy"].partition(",")[0]),
    ("published s", number("published_s", ".3f")),
    ("predicted s", number("predicted_s", ".3f")),
    ("ratio", number("ratio", ".2f")),
    ("of these passes s", number("passes_s", ".2f")),
    ("tensor sums s", number("tensor_sums_s", ".2f")),
    (
        "published GB",
        lambda row: f"{row['published_bytes'] / 1e9:.2f}" if row["published_bytes"] else "-",
    ),
    ("predicted GB", number("predicted_bytes", ".2f", 1e-9)),
]
MEASURED_STEPS: list[Column] = [
    ("steps on", text("steps")),
    ("number", number("number")),
    ("mean error", number("mean_error", ".1%")),
    ("within 15 %", number("within_15_percent", ".0%")),
    ("rho", number("rho", ".3f")),
    ("choices", number("choices")),
    ("chosen over fastest, mean", number("chosen_mean", ".3f")),
    ("worst", number("chosen_worst", ".3f")),
]
TRIALS: list[Column] = [
    ("setting", text("setting")),
    ("trials", number("trials")),
    ("rho", number("rho", ".3f")),
    ("rho of the formulas alone", number("rho_formulas", ".3f")),
    ("first choice over the best", number("measured_over_best", ".3f")),
]

SECONDS_OF_PAPER = {
    "homogeneous": ("Table 1", (1.14, 1.27, 1.39)),
    "heterogeneous": ("Table 2", (1.80, 1.71, 1.31)),
}
"""Of auto3d, §5: the best that Megatron's heuristic, random search and annealing find, measured."""
SEARCHES_OF_PAPER = ("Megatron's heuristic", "random, 50 trials", "annealing")


def _by_device(stored: Mapping[str, float], memory: Mapping[str, float]) -> str:
    return ", ".join(
        f"{device.partition('-')[0]} {num_bytes / 1e9:.0f} of {memory[device] / 1e9:.0f}"
        for device, num_bytes in stored.items()
    )


def tables_of_paper(result: Result) -> str:
    """Tables 1 and 2 of auto3d: seconds as measured there, and as predicted here."""
    found = {(row["setup"], row["system"]): row for row in result.rows}
    rows = []
    for setup, (name, measured) in SECONDS_OF_PAPER.items():
        ours = [found[setup, system] for system in SEARCHES_OF_PAPER]
        best = ours[-1]["strategy"].partition(",")[0]
        for what, seconds in (("paper", measured), ("here", [row["seconds"] for row in ours])):
            cells = [f"{s:.2f} ({seconds[0] / s:.2f})" for s in seconds]
            rows.append([f"{name}, {setup}", what, *cells, best if what == "here" else "-"])
    heads = ["table", "", "Megatron", "RS", "SA", "what SA finds"]
    return with_source(heads, rows, result)


def annealing(result: Result) -> str:
    """How annealing compares with exhaustive search, where that ended, and with random search."""
    ended = [row for row in result.rows if row["complete"]]
    cut = [row for row in result.rows if not row["complete"]]
    in_time, of_cut = _against(ended, "exhaustive_s"), _against(cut, "exhaustive_s")
    drawn = [row for row in result.rows if row["random_s"] is not None]
    at_random = _against(drawn, "random_s")
    most = max(row["random_s"] / row["annealing_s"] for row in drawn)
    return (
        f"\nOf {len(result.rows)} cases exhaustive search ended in time on {len(ended)}. What "
        f"annealing finds there is as fast in {len(ended) - sum(in_time)}, and slower in "
        f"{in_time[1]}. On the {len(cut)} others it is faster in {of_cut[0]}, and slower in "
        f"{of_cut[1]}. Beside random search it is faster in {at_random[0]} of {len(drawn)} (up to "
        f"{most:.2f} times), and slower in {at_random[1]}.\n\n{source(result)}\n"
    )


def near_pipelines(result: Result) -> str:
    """Of pairs of measured pipelines whose predictions cannot be told apart, how often the one that
    is predicted to be faster is, and how often the one with fewer stages."""
    pairs = [
        (one, other)
        for row in result.rows
        for one, other in itertools.combinations(_by_prediction(row["predictions"]), 2)
        if one["pipeline"] != other["pipeline"]
        and other["simulated_s"] <= one["simulated_s"] * (1 + UNCERTAINTY)
    ]
    predicted = sum(one["measured_s"] < other["measured_s"] for one, other in pairs)
    by_stages = [sorted(pair, key=lambda trial: trial["pipeline"]) for pair in pairs]
    fewer = sum(one["measured_s"] < other["measured_s"] for one, other in by_stages)
    return (
        f"\nOf the {len(pairs)} pairs of pipelines with other numbers of stages that are predicted "
        f"within {UNCERTAINTY * 100:.0f} % of each other, the one that is predicted to be faster "
        f"is faster in {predicted}, the one with fewer stages in {fewer}.\n"
    )


def _by_prediction(trials: Sequence[Row]) -> list[Row]:
    """Trials of several stages, the one that is predicted to be fastest first."""
    return sorted((t for t in trials if t["pipeline"] > 1), key=lambda t: t["simulated_s"])


def _against(rows: Sequence[Row], other: str) -> tuple[int, int]:
    """How often annealing is faster than another search, and how often slower."""
    ratios = [row["annealing_s"] / row[other] for row in rows]
    return sum(ratio < 1 - EQUAL for ratio in ratios), sum(ratio > 1 + EQUAL for ratio in ratios)
