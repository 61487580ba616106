"""What a search of pipelines has passed over, and why it lost, as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tfpar.report.tables import render_table
from tfpar.spec.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from tfpar.cost.cost import Cost
    from tfpar.plans import Plan, Rival

COLUMNS = (
    "Pipeline",
    "A step",
    "Compute",
    "Collectives",
    "Gradients",
    "Bubble",
    "Memory",
    "Why not",
)


def rivals_table(plan: Plan) -> str:
    """What else was found, with its cost by part, and what would have to change for it to win.

    Collectives are what forward and backward pass wait for, transfers between stages included
    where a rank waits for them (the bubble); gradients are what is not hidden of their sums.
    """
    assert plan.cost is not None, "a plan that was searched for"
    rows = [["(taken)", *_parts(plan.cost), ""]]
    rows += [
        [rival.name, *([""] * 6 if rival.cost is None else _parts(rival.cost)), why(rival, plan)]
        for rival in plan.rivals
    ]
    return render_table("Pipelines that were compared", COLUMNS, rows, numeric=range(1, 7))


def why(rival: Rival, plan: Plan) -> str:
    """Why a rival was not taken, and with what it would have been."""
    assert plan.cost is not None
    if rival.cost is None:
        return rival.reason
    limit = math.inf if plan.cluster is None else plan.cluster.device.memory_bytes
    if rival.cost.memory_bytes > limit:
        return f"does not fit: a rank would store {format_bytes(rival.cost.memory_bytes)}"
    late = rival.cost.seconds - plan.cost.seconds
    if late <= 0:
        return "nearer than predictions can tell, and has more stages"
    part, seconds = max(_seconds(rival.cost).items(), key=lambda item: item[1])
    slower = f"{format_seconds(late)} slower"
    if seconds <= late:
        return f"{slower}: no part of it alone makes up for that"
    return f"{slower}: {part} would have to take {seconds / (seconds - late):.2g} times less"


def _seconds(cost: Cost) -> dict[str, float]:
    return {
        "compute": sum(cost.compute_s),
        "collectives": sum(cost.communication_s) - cost.hidden_s,
        "gradients": cost.exposed_s,
        "the bubble": cost.bubble_s,
    }


def _parts(cost: Cost) -> list[str]:
    seconds = [cost.seconds, *_seconds(cost).values()]
    return [*map(format_seconds, seconds), format_bytes(cost.memory_bytes)]
