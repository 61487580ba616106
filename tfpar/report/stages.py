"""The stages of a plan as a table: who runs them, what they take, what they hold and send."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.cost.staged import SchedulePrice, StagedCost, StageShare
from tfpar.report.tables import render_table
from tfpar.spec.quantities import format_bytes, format_seconds

IDLE = 0.05
"""The part of a step below which ranks that work are as good as idle."""


def stages_table(cost: StagedCost) -> str:
    """A line for each stage."""
    limits = {share.limit_bytes for share in cost.stages}
    rows = [
        [
            str(stage),
            ranks_text(share.ranks),
            format_seconds(share.forward_s),
            format_seconds(share.backward_s),
            format_seconds(share.update_s),
            f"{100 * share.bubble:.0f} %",
            format_bytes(share.sent_bytes),
            str(share.in_flight),
            _memory_text(share, show_limit=len(limits) > 1),
            share.peak_task,
        ]
        for stage, share in enumerate(cost.stages)
    ]
    columns = ("Stage", "Ranks", "F", "B", "U", "Bubble", "Sent", "In flight", "Memory", "At")
    title = (
        f"Stages (forward pass F and backward pass B of a microbatch; update U; what a rank waits "
        f"beside its work, of all {100 * cost.bubble:.0f} %; bytes that a rank sends to other "
        f"stages in a step; microbatches at once; the most that a rank holds, and the task then)"
    )
    return render_table(title, columns, rows, numeric=range(2, 9))


def idle_ranks(cost: StagedCost) -> list[str]:
    """That some ranks have next to no work, if so: who asked for them wants to know."""
    found = sorted({rank for share in cost.stages if _is_idle(share) for rank in share.ranks})
    if not found:
        return []
    one = len(found) == 1
    return [
        f"{'Rank' if one else 'Ranks'} {ranks_text(found)} {'works' if one else 'work'} for less "
        f"than {100 * IDLE:g} % of a step: it would take about as long without "
        f"{'its device' if one else 'their devices'}."
    ]


def _is_idle(share: StageShare) -> bool:
    works = share.forward_s + share.backward_s + share.update_s > 0 and share.bubble < 1 / IDLE - 1
    return not works


def _memory_text(share: StageShare, show_limit: bool) -> str:
    """What a rank holds and, where that differs between stages, what it may."""
    held = format_bytes(share.peak_bytes)
    if not show_limit or share.limit_bytes is None:
        return held
    return f"{held} of {format_bytes(share.limit_bytes)}"


def schedules_table(schedules: Sequence[SchedulePrice], in_shares: bool = False) -> str:
    """A line for each schedule that the plan's was picked from.

    Args:
        in_shares: the plan has unequal shares of the batch.
    """
    rows = [
        [
            found.name + (" (does not fit)" if found.excess_bytes else ""),
            format_seconds(found.seconds),
            format_bytes(found.memory_bytes),
        ]
        for found in schedules
    ]
    equal = "; with equal shares of the batch" if in_shares else ""
    title = (
        f"Schedules (the first is the plan's{equal}; seconds of a step; the most that a rank "
        f"holds; 'list' is an order made from what these stages take)"
    )
    return render_table(title, ("Schedule", "Step", "Memory"), rows, numeric=(1, 2))


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-3`, `4`; with gaps `0, 2`."""
    if len(ranks) > 1 and all(b == a + 1 for a, b in zip(ranks, ranks[1:], strict=False)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
