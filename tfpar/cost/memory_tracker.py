"""Memory of the actors of a pipeline while it is simulated."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.cost.timeline import ActorPeak
from tfpar.pipeline.tasks import Task


class MemoryTracker:
    """Bytes that each actor holds, its peak, and every change.

    Changes of one moment count together: what is freed then is not held beside what is taken.

    Attributes:
        peaks: of each actor.
        steps: of each actor, (seconds, bytes from then on).
    """

    def __init__(self, fixed: Sequence[float]) -> None:
        self.peaks = [ActorPeak(held, 0, None) for held in fixed]
        self.steps: list[list[tuple[float, float]]] = [[(0, held)] for held in fixed]
        self._held = list(fixed)
        self._changed: dict[int, Task | None] = {}

    def free(self, actor: int, num_bytes: float) -> None:
        """Free something."""
        if num_bytes:
            self._held[actor] -= num_bytes
            self._changed.setdefault(actor, None)

    def take(self, actor: int, num_bytes: float, task: Task) -> None:
        """Store more from now on, because of `task`."""
        if num_bytes:
            self._held[actor] += num_bytes
            self._changed[actor] = task

    def settle(self, now: float) -> None:
        """Record the bytes of actors, once all that happens at a moment has."""
        for actor, task in self._changed.items():
            held = self._held[actor]
            steps = self.steps[actor]
            if steps[-1][0] == now:
                steps.pop()
            if not steps or steps[-1][1] != held:
                steps.append((now, held))
            if held > self.peaks[actor].num_bytes:
                self.peaks[actor] = ActorPeak(held, now, task)
        self._changed.clear()
