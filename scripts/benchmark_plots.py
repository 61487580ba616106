"""Draw the plots of the documentation from the results of benchmarks.

    python -m scripts.benchmark_plots

Figs. 4 to 7 of TAP's paper, of whose curves only those points are drawn that its text says, and
predicted beside measured steps. Needs matplotlib (the extra `plots`). Each image names the
result that it shows.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from benchmarks.plots import save_plot
from benchmarks.results import ROOT, Result
from scripts.benchmark_columns.cells import Row, source
from scripts.benchmark_columns.meshes import PLANS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES = ROOT / "docs" / "images"

T5_LARGE = 770e6
"""Parameters, as the paper counts them."""
MINUTES_OF_PAPER = {"TAP, as published": 6, "Alpa, as published": 197}
"""What a search for T5-Large takes (§V-B)."""
BOUND_OF_PAPER = 15
"""Minutes that TAP's searches for T5 stay under (§V-B)."""


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for name, (result_name, panels) in PLOTS.items():
        result = Result.load(result_name)
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
        for axes, panel in zip((left, right), panels, strict=True):
            panel(axes, result.rows)
            axes.legend(fontsize="small")
        save_plot(figure, IMAGES / f"{name}.svg", source(result))
        print(pathlib.Path("docs", "images", f"{name}.svg"))


# --- Figs. 4 and 5: searches --------------------------------------------------------


def search_over_depth(axes: Axes, rows: Iterable[Row]) -> None:
    """T5 with 6 to 48 blocks, and what the paper says of T5-Large."""
    _searches(axes, _of(rows, "t5-"))
    for (name, minutes), marker in zip(MINUTES_OF_PAPER.items(), "^v", strict=True):
        axes.plot([T5_LARGE], [60 * minutes], marker, color="grey", label=name)
    axes.axhline(60 * BOUND_OF_PAPER, color="grey", linestyle=":", label="15 minutes")
    axes.set_title("T5 that grows deeper (Fig. 4)")


def search_over_classes(axes: Axes, rows: Iterable[Row]) -> None:
    """ResNet50 with 1,000 to 1,000,000 classes; of the paper's times none are said."""
    _searches(axes, _of(rows, "resnet50-"))
    axes.set_title("ResNet50 with more classes (Fig. 5)")


def _searches(axes: Axes, rows: Sequence[Row]) -> None:
    sizes = [row["parameters"] for row in rows]
    for key, name in (("total_s", "tfpar, from model to plan"), ("search_s", "tfpar, its search")):
        axes.plot(sizes, [row[key] for row in rows], marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1, 20_000)  # the same in both halves
    axes.set_xlabel("parameters")
    axes.set_ylabel("seconds (ours: of one processor)")


# --- Figs. 6 and 7: steps -----------------------------------------------------------


def step_over_depth(axes: Axes, rows: Iterable[Row]) -> None:
    """T5, batch 16."""
    _steps(axes, _of(rows, "t5-"))
    axes.set_title("T5 that grows deeper (Fig. 6)")


def step_over_classes(axes: Axes, rows: Iterable[Row]) -> None:
    """ResNet50, batch 1,024."""
    _steps(axes, _of(rows, "resnet50-"))
    axes.set_title("ResNet50 with more classes (Fig. 7)")


def _steps(axes: Axes, rows: Sequence[Row]) -> None:
    """A line for each plan and number of GPUs; what does not fit is hollow."""
    colours = dict(zip(PLANS, ("C0", "C1", "C2"), strict=True))
    lines: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["plan"], row["devices"]), []).append(row)
    for (plan, devices), line in lines.items():
        points = [row["parameters"] for row in line], [row["step_s"] for row in line]
        style = "--" if devices == 8 else "-"
        axes.plot(*points, style, color=colours[plan], label=f"{PLANS[plan]}, {devices} GPUs")
        for row in line:
            fill = "full" if row["fits"] else "none"
            point = [row["parameters"]], [row["step_s"]]
            axes.plot(*point, "o", color=colours[plan], fillstyle=fill)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("parameters")
    axes.set_ylabel("step, seconds (predicted)")


def _of(rows: Iterable[Row], case: str) -> list[Row]:
    """Those of the cases that begin so, the smallest model first."""
    found = (row for row in rows if row["case"].startswith(case))
    return sorted(found, key=lambda row: row["parameters"])


# --- predicted and measured ---------------------------------------------------------


def predicted_in_process(axes: Axes, rows: Iterable[Row]) -> None:
    """Plans of ranks in one process."""
    _predicted(axes, rows, "in-process")
    axes.set_title("ranks in one process")


def predicted_on_loopback(axes: Axes, rows: Iterable[Row]) -> None:
    """Plans of ranks that are processes."""
    _predicted(axes, rows, "loopback")
    axes.set_title("a process for each rank")


def _predicted(axes: Axes, rows: Iterable[Row], setting: str) -> None:
    """A point for each plan, beside the line where both are equal and those 15 % off."""
    found = [row for row in rows if row["setting"].startswith(setting)]
    plans = [plan for row in found for plan in row["plans"]]
    both = [1e3 * plan[key] for plan in plans for key in ("predicted_s", "measured_s")]
    ends = [0.9 * min(both), 1.1 * max(both)]
    axes.plot(ends, ends, color="grey", label="as predicted")
    for factor, label in ((0.85, "15 % off"), (1.15, None)):
        axes.plot(ends, [ms / factor for ms in ends], ":", color="grey", label=label)
    for row, marker in zip(found, "os", strict=True):
        for model, fill in (("gpt", "full"), ("wide", "none")):
            chosen = [plan for plan in row["plans"] if plan["model"] == model]
            points = [[1e3 * plan[key] for plan in chosen] for key in ("predicted_s", "measured_s")]
            name = f"{model}, {row['setting'].rpartition(', ')[2]}"
            axes.plot(*points, marker, color="C0", fillstyle=fill, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [ms for ms in (20, 30, 50, 70, 100, 200, 300, 500, 700) if ends[0] <= ms <= ends[1]]
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks(ticks, [str(ms) for ms in ticks])
        set_ticks([], minor=True)
    axes.set_xlabel("step, ms (predicted)")
    axes.set_ylabel("step, ms (measured)")


Panel = Callable[["Axes", Sequence[Row]], None]
PLOTS: dict[str, tuple[str, tuple[Panel, Panel]]] = {
    "tap_search": ("search", (search_over_depth, search_over_classes)),
    "tap_training": ("training_time", (step_over_depth, step_over_classes)),
    "predicted_measured": ("prediction", (predicted_in_process, predicted_on_loopback)),
}
"""By image: the result that it shows, and its two halves."""

if __name__ == "__main__":
    main()
