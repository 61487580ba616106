"""Zero-bubble schedules: gradients of weights are computed where there is time (Qi et al. 2024).

The backward pass is cut in halves: `I`, which the stage before waits for, and `W`, which nothing
waits for but the update. The orders are those for halves that take as long as a forward pass each.
"""

from __future__ import annotations

import collections

from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.tasks import Kind, Task


def zb_h1(actors: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """ZB-H1: the memory of 1F1B and a third of its bubble.

    Actor `a` of p begins as in 1F1B, but is `a` microbatches behind with `W`: so gradients reach
    the first actor sooner, and each keeps min(m, p) microbatches at most, as the first one does.
    """
    del virtual_stages  # one
    orders = []
    for actor in range(actors):
        run = _Order((actor,))
        ahead = min(microbatches, actors - actor - 1)
        run.add("F", times=ahead)
        for done in range(microbatches - ahead):
            run.add("F")
            run.add("I")
            if done >= actor:
                run.add("W")
        for _ in range(ahead):
            run.add("I")
            run.add("W")
        run.add("W", times=min(actor, microbatches - ahead))
        orders.append(tuple(run.tasks))
    return Schedule(tuple(orders))


def zb_v(actors: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """ZB-V: next to no bubble from 2 p microbatches on, with the memory of 1F1B.

    Actor `a` of p has stages `a` and 2 p - 1 - a: the first and the last stage are together, and
    the forward pass runs down and up again, as a V. Each actor keeps what 2 p microbatches need of
    one of its two stages at most, and from its first task on it waits for no longer than one task
    takes. With fewer than 2 p microbatches, the order is that of 2 p without those that lack.
    """
    del virtual_stages  # two
    planned = max(microbatches, 2 * actors)
    orders = []
    for actor in range(actors):
        run = _Order((actor, 2 * actors - 1 - actor))
        started = 2 * (actors - actor) - 1
        run.add("F", times=started)
        for _ in range(actor):
            run.add("F", 1)
            run.add("F")
        for _ in range(actors - actor):
            run.add_all(1)
        started += actor
        for done in range(planned - actors):
            if started + done < planned:
                run.add("F")
            run.add("I")
            run.add("W")
            run.add_all(1)
        for _ in range(actor):
            run.add("I", 1)
            run.add("I")
        for _ in range(actors - actor):
            run.add("I")
            run.add("W")
        run.add("W", 1, times=actor)
        run.add("W", times=actor)
        orders.append(tuple(task for task in run.tasks if task.micro < microbatches))
    return Schedule(tuple(orders))


class _Order:
    """The tasks of an actor, as they are added: each kind at each stage by microbatch."""

    def __init__(self, stages: tuple[int, ...]) -> None:
        self.stages = stages
        self.tasks: list[Task] = []
        self._next: collections.Counter[tuple[Kind, int]] = collections.Counter()

    def add(self, kind: Kind, which: int = 0, times: int = 1) -> None:
        """The next microbatch's task at the `which`-th stage, or several."""
        for _ in range(times):
            self.tasks.append(Task(kind, self.stages[which], self._next[kind, which]))
            self._next[kind, which] += 1

    def add_all(self, which: int) -> None:
        """A forward pass and both halves of a backward pass."""
        for kind in ("F", "I", "W"):
            self.add(kind, which)
