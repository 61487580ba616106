"""Turning points of a choice among pipelines: the batch, the number of devices and the memory of a
device from which on another candidate is taken.

They are computed from the parts of what both cost. With a batch x times as large on the same
devices, cut into x times as many microbatches of the same size, passes and transfers take x times
as long; what a step does once (update, sums of gradients) takes as long as before, as does the
bubble. The same holds for each of 1 / x times as many devices, as copies that share the batch.
"""

from __future__ import annotations

import dataclasses

from tfpar.cost.cost import Cost
from tfpar.ir.roles import BACKWARD, FORWARD
from tfpar.planning.candidates import NO_STAGES
from tfpar.planning.objective import UNCERTAINTY
from tfpar.plans import Candidate, Plan

MOST = 64.0
"""The largest factor that is looked at: farther off, parts say little of what a step takes."""


def attach_turning_points(plan: Plan, memory_limit: float) -> Plan:
    """Attach to the rivals of a priced plan how large the batch would have to be, or the memory of
    a device, for each to be taken in its place.

    Args:
        memory_limit: of a device, in bytes.
    """
    cost = plan.cost
    assert cost is not None, "a plan with a price"
    lighter = next((one for one in plan.findings.rivals if _is_lighter(one, cost)), None)
    rivals = []
    for rival in plan.findings.rivals:
        batch = memory = None
        if rival.cost is not None:
            factors = _handicaps(rival, plan)
            wins = factors[0] * rival.cost.seconds < factors[1] * cost.seconds
            if rival.cost.memory_bytes > memory_limit:
                memory = rival.cost.memory_bytes if wins else None
            else:
                batch = None if wins else break_even_batch(rival.cost, cost, *factors)
                # Of those that fit where the plan does not, the fastest is taken.
                memory = cost.memory_bytes if rival is lighter else None
        rivals.append(dataclasses.replace(rival, batch=batch, memory_limit=memory))
    return plan.with_findings(rivals=tuple(rivals))


def break_even_batch(
    rival: Cost, chosen: Cost, rival_factor: float = 1.0, chosen_factor: float = 1.0
) -> float | None:
    """Return how many times as large the batch of the same devices would have to be for `rival` to
    be as fast as `chosen`; None if no batch within `MOST` is.

    Args:
        rival_factor, chosen_factor: how many times as long each counts.
    """
    grows = chosen_factor * _of_passes(chosen) - rival_factor * _of_passes(rival)
    lacks = rival_factor * _once(rival) - chosen_factor * _once(chosen)
    if not grows or not 1 / MOST <= lacks / grows <= MOST:
        return None
    return lacks / grows


def _of_passes(cost: Cost) -> float:
    """Seconds that grow with the samples of a rank."""
    times = (cost.compute_s, cost.communication_s)
    passes = sum(of[phase] for of in times for phase in (FORWARD, BACKWARD))
    return passes - cost.hidden_s + cost.transfer_s


def _once(cost: Cost) -> float:
    """Seconds that a step takes besides, whatever its batch."""
    return cost.seconds - _of_passes(cost)


def _handicaps(rival: Candidate, plan: Plan) -> tuple[float, float]:
    """Factors by which the seconds of a rival and of the plan are multiplied where they are
    compared: stages have to be faster by what predictions can tell."""
    has_stages = not rival.name.startswith(NO_STAGES)
    if has_stages == (plan.stages is not None):
        return 1.0, 1.0
    return (1 + UNCERTAINTY, 1.0) if has_stages else (1.0, 1 + UNCERTAINTY)


def _is_lighter(rival: Candidate, cost: Cost) -> bool:
    """Whether a rival that was planned stores less."""
    return (
        rival.cost is not None and not rival.reason and rival.cost.memory_bytes < cost.memory_bytes
    )
