"""1F1B: after a warm-up, each forward pass is followed by a backward pass (PipeDream-Flush).

With virtual stages it is Megatron-LM's interleaved schedule (Narayanan et al. 2021): an actor has
v stages that lie `actors` apart, and runs a group of microbatches through one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.tasks import Task


def schedule_1f1b(actors: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """1F1B: actor `a` of p keeps min(m, p - a) microbatches at most."""
    del virtual_stages  # one: the schedule of several is `interleaved`
    orders = []
    for actor in range(actors):
        forward = [Task("F", actor, micro) for micro in range(microbatches)]
        backward = [Task("B", actor, micro) for micro in range(microbatches)]
        orders.append(_alternating(forward, backward, actors - actor - 1))
    return Schedule(tuple(orders))


def interleaved(actors: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Interleaved 1F1B, whose bubble is `virtual_stages` times smaller than 1F1B's.

    Megatron-LM takes groups of as many microbatches as there are actors, so m has to be a multiple
    of p. Here groups are as equal as they can be, and of p microbatches or more (of all, if there
    are fewer). So the bubble is (p - 1) / (v m) of the ideal for every m >= p.
    """
    groups = _groups(microbatches, actors)
    orders = []
    for actor in range(actors):
        stages = range(actor, actors * virtual_stages, actors)
        forward = [Task("F", stage, m) for group in groups for stage in stages for m in group]
        backward = [
            Task("B", stage, m) for group in groups for stage in reversed(stages) for m in group
        ]
        # The first microbatch has to reach the last stage, and its gradient to come back.
        ahead = (virtual_stages - 1) * len(groups[0]) + 2 * (actors - actor - 1)
        orders.append(_alternating(forward, backward, ahead))
    return Schedule(tuple(orders))


def _alternating(forward: Sequence[Task], backward: Sequence[Task], ahead: int) -> tuple[Task, ...]:
    """`ahead` forward passes (all, if there are fewer), then one of each, then what is left."""
    ahead = min(ahead, len(forward))
    pairs = zip(forward[ahead:], backward, strict=False)
    left = backward[len(forward) - ahead :]
    return (*forward[:ahead], *(task for pair in pairs for task in pair), *left)


def _groups(microbatches: int, least: int) -> list[range]:
    """Microbatches in order, in as many groups of `least` or more as there can be, larger first."""
    count = max(1, microbatches // least)
    size, larger = divmod(microbatches, count)
    ends = [(i + 1) * size + min(i + 1, larger) for i in range(count)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
