"""GPipe: all forward passes, then all backward passes (Huang et al. 2019)."""

from __future__ import annotations

from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.tasks import Task


def gpipe(actors: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Schedule all microbatches forward through all stages, then all backward.

    Every microbatch is in flight at once. A join of all microbatches between two stages, or
    between forward and backward pass, delays nothing that would not be done by then.

    Args:
        virtual_stages: stages of each actor: `a`, `a + actors`, and so on, one after the other
            ("looped breadth-first", Lamy-Poirier 2023).
    """
    orders = []
    for actor in range(actors):
        stages = range(actor, actors * virtual_stages, actors)
        micros = range(microbatches)
        forward = [Task("F", stage, micro) for stage in stages for micro in micros]
        backward = [Task("B", stage, micro) for stage in reversed(stages) for micro in micros]
        orders.append((*forward, *backward))
    return Schedule(tuple(orders))
