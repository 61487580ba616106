"""Diagnosis of a plan in words: a verdict, warnings, and what would change it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from tfpar.observability.report.data.schema import Axis, CandidateSummary, Collective, Report
from tfpar.spec.quantities import format_bytes, format_seconds

MOST_HINTS = 3


@dataclasses.dataclass(frozen=True)
class PlanDiagnosis:
    """Diagnosis of a plan, from its report, which lacks no more than this."""

    report: Report

    def verdict(self) -> str:
        """One sentence: what the plan is, and what it gains."""
        facts, cost = self.report.facts, self.report.cost
        ranks = f"{facts.ranks} rank{'s' if facts.ranks > 1 else ''}"
        text = f"{facts.where} ({ranks}), {facts.batch}"
        if cost is None:
            return f"{text}; nothing was priced."
        text += f": {format_seconds(cost.seconds)} a step"
        alone = self._baseline("one device")
        if alone is not None and alone.seconds is not None and facts.ranks > 1 and cost.seconds:
            times = alone.seconds / cost.seconds
            text += f", {times:.1f} times as fast as one device"
        limit = None if self.report.machines is None else self.report.machines.memory_limit
        stored = format_bytes(cost.memory_bytes)
        text += f"; {stored} a device"
        if limit:
            text += f" of {format_bytes(limit)}"
        return f"{text}."

    def _idle_axes(self) -> list[Axis]:
        """Axes of several ranks along which all compute the same; where the step is not known, by
        what the plan says of batch and variables."""
        facts = self.report.facts
        if not self.report.layers and not facts.splits_anything:
            return [axis for axis in facts.mesh if axis.size > 1]
        return [axis for axis in facts.mesh if axis.name in self.report.idle_axes]

    def _baseline(self, name: str) -> CandidateSummary | None:
        found = (c for c in self.report.candidates if c.kind == "baseline" and c.name == name)
        return next(found, None)

    def warnings(self) -> Iterator[str]:
        """Yield the warnings that a user should know before trusting the plan."""
        facts, cost = self.report.facts, self.report.cost
        if facts.cut_short:
            yield (
                "The search was cut short before its end: there may be better plans. "
                "`search_seconds=` gives it more time."
            )
        idle = self._idle_axes()
        enough = facts.ranks // math.prod(axis.size for axis in idle)
        if cost is not None and facts.ranks > enough == 1:
            why = "for this model and batch, communication would take longer than what it saves."
            if cost.host_wait_s > cost.seconds / 2:
                why = (
                    "hosts issue ops for longer than devices run them, so that more devices would "
                    "not help."
                )
            yield f"Every rank computes the same: {why}"
        elif facts.ranks > enough:
            yield (
                f"{facts.ranks - enough} of {facts.ranks} ranks compute what others compute too, "
                f"as nothing is split along {' and '.join(axis.name for axis in idle)}: {enough} "
                f"would do as well."
            )
        alone = self._baseline("one device")
        if cost is not None and alone is not None and alone.seconds is not None:
            slower = why_slower(
                cost.seconds,
                alone.seconds,
                ranks=facts.ranks,
                fits=alone.fits is not False,
                is_constrained=bool(facts.constraints),
            )
            if slower:
                yield f"{slower[0].upper()}{slower[1:]}."
        limit = None if self.report.machines is None else self.report.machines.memory_limit
        if cost is not None and limit and cost.memory_bytes > limit:
            yield (
                f"It does not fit: a device would store {format_bytes(cost.memory_bytes)} of "
                f"{format_bytes(limit)}."
            )
        if self.report.without_rule:
            types = ", ".join(found.type for found in self.report.without_rule)
            yield f"Ops without a rule run replicated: {types}."
        if self.report.run_whole:
            count = len(self.report.run_whole)
            what = "a loop, branch or call runs" if count == 1 else f"{count} loops and calls run"
            yield f"Along some axis {what} whole: the bodies would need collectives."

    def hints(self) -> list[str]:
        """At most three: the dearest collective, the largest memory, what would change the plan."""
        found = [*self._dearest(), *self._largest(), *self._nearest()]
        return found[:MOST_HINTS]

    def _dearest(self) -> Iterator[str]:
        cost = self.report.cost
        total = sum(one.seconds for one in self.report.collectives)
        if cost is None or not total:
            return
        by_kind: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
        for one in self.report.collectives:
            by_kind.setdefault((one.kind, one.axes), []).append(one)
        (kind, axes), same = max(by_kind.items(), key=lambda i: sum(c.seconds for c in i[1]))
        seconds = sum(one.seconds for one in same)
        count, size = sum(one.count for one in same), sum(one.num_bytes for one in same)
        beside = sum(one.seconds for one in same if one.when == "beside")
        hidden = ", mostly beside the backward pass" if beside > seconds / 2 else ""
        yield (
            f"Dearest: {count} {kind} over {' x '.join(axes)}, {format_bytes(size)}, "
            f"{format_seconds(seconds)} ({100 * seconds / total:.0f} % of all "
            f"collectives){hidden}."
        )

    def _largest(self) -> Iterator[str]:
        total = sum(layer.memory.total for layer in self.report.layers)
        if not total:
            return
        largest = max(self.report.layers, key=lambda layer: layer.memory.total)
        kinds = {
            "weights": largest.memory.weights,
            "slots": largest.memory.slots,
            "activations and gradients": largest.memory.live,
        }
        most = max(kinds, key=kinds.__getitem__)
        stored = largest.memory.total
        yield (
            f"Largest: {largest.path} stores {format_bytes(stored)} on a device, "
            f"{format_bytes(kinds[most])} of it {most}."
        )

    def _nearest(self) -> Iterator[str]:
        """Yield a hint on the fastest rejected candidate, and by how much it lost."""
        cost = self.report.cost
        others = [
            c
            for c in self.report.candidates
            if c.seconds is not None
            and (c.kind == "pipeline" or (c.kind == "layout" and c.memory_bytes is not None))
        ]
        if cost is None or not others:
            return
        nearest = min(others, key=lambda c: c.seconds or 0.0)
        yield f"Next best: {nearest.name}, {nearest.why}."


# --- slower than one device -----------------------------------------------------------------

TELLABLE = 0.02
"""By what part of a step a plan has to be slower for a word of it."""


def why_slower(
    seconds: float, one_device_s: float, *, ranks: int, fits: bool, is_constrained: bool
) -> str:
    """Explain why a plan that takes `seconds` was taken, as the end of a sentence.

    It is empty if the plan is not slower than one device.

    Args:
        fits: one device has room for the step.
        is_constrained: the plan keeps to constraints.
    """
    if ranks == 1 or seconds <= one_device_s * (1 + TELLABLE):
        return ""
    if not fits:
        return "slower than one device, which has no room for it"
    asked = "constraints ask for it" if is_constrained else f"the mesh asks for {ranks} ranks"
    return f"slower than one device, which has room: {asked}"
