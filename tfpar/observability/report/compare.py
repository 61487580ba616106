"""Comparison of two plans: time and memory of a step, and layers that are placed differently."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tfpar.observability.report.data.schema import CostSummary, LayerSummary, Report
from tfpar.observability.report.tables import render_table
from tfpar.spec.quantities import format_bytes, format_seconds

MOST_LAYERS = 12


@dataclasses.dataclass(frozen=True)
class Figure:
    """One thing of both plans; None where one of them does not know it.

    Attributes:
        unit: `s`, `B`, or empty of a count.
    """

    name: str
    unit: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """The second by the first."""
        if not self.first or self.second is None:
            return None
        return self.second / self.first


@dataclasses.dataclass(frozen=True)
class PlacementDiff:
    """Equal layers that the second plan places differently.

    Attributes:
        name: of the layer, with `*` for numbers if they are several.
        seconds: what these layers take in the second plan beyond what they take in the first.
    """

    name: str
    count: int
    first: str
    second: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Differences between two plans.

    Attributes:
        names: of the plans.
        verdicts: a sentence on each.
        figures: as far as either has them.
        placements: those that make most difference first.
    """

    names: tuple[str, str]
    verdicts: tuple[str, str]
    figures: tuple[Figure, ...]
    placements: tuple[PlacementDiff, ...]

    @classmethod
    def of(
        cls,
        names: tuple[str, str],
        first: Report,
        second: Report,
        measured_s: tuple[float, float] | None = None,
    ) -> Comparison:
        """Compare two reports.

        Args:
            measured_s: what a step took with each.
        """
        figures = [*_figures(first, second)]
        if measured_s is not None:
            figures.insert(0, Figure("step, measured", "s", *measured_s))
        return cls(
            names, (first.verdict, second.verdict), tuple(figures), _placements(first, second)
        )

    def to_builtins(self) -> dict[str, Any]:
        """Return the comparison as JSON has it."""
        return {"version": 1, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        parts = [f"{n}: {verdict}" for n, verdict in zip(self.names, self.verdicts, strict=True)]
        rows = [
            [figure.name, *(_shown(value, figure.unit) for value in (figure.first, figure.second))]
            + ["" if figure.ratio is None else f"{figure.ratio:.2f}"]
            for figure in self.figures
        ]
        columns = ("", "first", "second", "second / first")
        parts.append(render_table("A step", columns, rows, numeric=(1, 2, 3)))
        if not self.placements:
            return "\n".join([*parts, "All layers lie alike."])
        shown = [
            [
                found.name + (f" x{found.count}" if found.count > 1 else ""),
                found.first,
                found.second,
                f"{'+' if found.seconds >= 0 else '-'}{format_seconds(abs(found.seconds))}",
            ]
            for found in self.placements[:MOST_LAYERS]
        ]
        title = "Layers that lie otherwise, those first whose time differs most"
        parts.append(render_table(title, ("Layer", "first", "second", "Time"), shown, numeric=(3,)))
        more = len(self.placements) - MOST_LAYERS
        return "\n".join([*parts, *([f"and {more} more"] if more > 0 else [])])


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "s":
        return format_seconds(value)
    return format_bytes(value) if unit == "B" else f"{value:,.0f}"


def _figures(first: Report, second: Report) -> Iterator[Figure]:
    reports = (first, second)
    yield Figure("ranks", "", *(float(report.facts.ranks) for report in reports))

    def of_cost(name: str, unit: str, value: Callable[[CostSummary], float]) -> Figure:
        found = [None if report.cost is None else value(report.cost) for report in reports]
        return Figure(name, unit, *found)

    yield of_cost("step, predicted", "s", lambda cost: cost.seconds)
    parts = [
        {} if report.cost is None else {part.name: part.seconds for part in report.cost.parts}
        for report in reports
    ]
    for name in dict.fromkeys((*parts[0], *parts[1])):
        yield Figure(f"  {name}", "s", *(own.get(name, 0.0) for own in parts))
    yield of_cost("memory of a device", "B", lambda cost: cost.memory_bytes)
    yield of_cost("  weights", "B", lambda cost: cost.memory.weights)
    yield of_cost("  slots and other state", "B", lambda cost: cost.memory.slots)
    yield of_cost("  gradients and activations", "B", lambda cost: cost.memory.live)
    counts, sizes = zip(*map(_collectives, reports), strict=True)
    for kind in sorted({*counts[0], *counts[1]}):
        yield Figure(f"{kind}, how many", "", *(float(own[kind]) for own in counts))
        yield Figure(f"{kind}, bytes of a rank", "B", *(float(own[kind]) for own in sizes))


def _collectives(report: Report) -> tuple[Counter[str], Counter[str]]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for one in report.collectives:
        counts[one.kind] += one.count
        sizes[one.kind] += one.num_bytes
    return counts, sizes


def _placements(first: Report, second: Report) -> tuple[PlacementDiff, ...]:
    others = {layer.path: layer for layer in second.layers}
    alike: dict[tuple[str, str, str], list[tuple[LayerSummary, LayerSummary]]] = {}
    for layer in first.layers:
        other = others.get(layer.path)
        if other is None or not layer.weights:
            continue
        before, after = (f"{_in_stage(one)}{one.placement}" for one in (layer, other))
        if before != after:
            alike.setdefault((_pattern(layer), before, after), []).append((layer, other))
    found = [
        PlacementDiff(
            name if len(pairs) > 1 else pairs[0][0].path,
            len(pairs),
            before,
            after,
            sum(other.total_s - layer.total_s for layer, other in pairs),
        )
        for (name, before, after), pairs in alike.items()
    ]
    return tuple(sorted(found, key=lambda one: -abs(one.seconds)))


def _in_stage(layer: LayerSummary) -> str:
    return "" if layer.stage is None else f"stage {layer.stage}: "


def _pattern(layer: LayerSummary) -> str:
    """The path of a layer with that of its block for all that are like it."""
    if layer.repeat is None or layer.repeat.name.endswith("..."):
        return layer.path
    depth = layer.repeat.name.count("/") + 1
    return "/".join([layer.repeat.name, *layer.path.split("/")[depth:]])
