"""The tasks of a step of a pipeline in the schedule 1F1B, each as early as can be."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.observability.report.data.schema import TaskSummary, TransferSummary


def order(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Which (kind, microbatch) a stage runs one after the other."""
    ahead = min(stages - stage - 1, microbatches)
    tasks = [("F", i) for i in range(ahead)]
    for i in range(microbatches):
        tasks += [("F", i + ahead)] * (i + ahead < microbatches) + [("B", i)]
    return tasks


def simulated(
    forward: Sequence[float],
    backward: Sequence[float],
    update: Sequence[float],
    microbatches: int,
    sends_s: float,
    sent_bytes: float,
) -> tuple[tuple[TaskSummary, ...], tuple[TransferSummary, ...]]:
    """The tasks and transfers by their starts; each stage has seconds of a microbatch."""
    stages = len(forward)
    waiting = [order(s, stages, microbatches) for s in range(stages)]
    free, ends = [0.0] * stages, dict[tuple[str, int, int], float]()
    ran, sent = [], []
    while any(waiting):
        for s in range(stages):
            while waiting[s]:
                kind, i = waiting[s][0]
                needs = s - 1 if kind == "F" else s + 1
                start = free[s]
                if 0 <= needs < stages:
                    if (kind, needs, i) not in ends:
                        break
                    made = ends[kind, needs, i]
                    start = max(start, made + sends_s)
                    sent.append(TransferSummary(made, made + sends_s, needs, s, i, sent_bytes))
                waiting[s].pop(0)
                free[s] = ends[kind, s, i] = start + (forward if kind == "F" else backward)[s]
                ran.append(TaskSummary(start, free[s], s, s, kind, i))
    ran += [TaskSummary(free[s], free[s] + update[s], s, s, "U", None) for s in range(stages)]
    return tuple(sorted(ran, key=lambda r: r.start)), tuple(sorted(sent, key=lambda t: t.start))
