"""Schedules of a pipeline, as they are generated and simulated: a lane for each stage."""

from __future__ import annotations

from scripts.pictures.svg import COLOURS, INK, Drawing
from tfpar.cost.simulator import StageProfile, simulate
from tfpar.cost.timeline import SimulatedTimeline
from tfpar.pipeline.generators import generate
from tfpar.pipeline.graph import task_graph

ACTORS, MICROBATCHES = 4, 8
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1")
SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "U": 0.0}
"""Of each kind of task, for one microbatch and a fourth of the model."""
FILLS = {"F": COLOURS[0], "B": COLOURS[1], "I": COLOURS[1], "W": COLOURS[2]}
LANE, LEFT, WIDTH, TOP = 18, 70, 780, 48


def simulated(name: str) -> SimulatedTimeline:
    """A step under a schedule; transfers take no time."""
    schedule = generate(name, ACTORS, MICROBATCHES)
    part = ACTORS / schedule.num_stages  # of a fourth of the model
    seconds = {kind: part * s for kind, s in SECONDS.items()}
    cost = StageProfile(seconds=seconds, fixed_bytes=0.0, kept_bytes=part, reduction_s=0.0)
    return simulate(task_graph(schedule), [cost] * schedule.num_stages)


def draw() -> Drawing:
    found = {name: simulated(name) for name in NAMES}
    scale = WIDTH / max(timeline.seconds for timeline in found.values())
    each = ACTORS * LANE + 46
    drawing = Drawing(
        LEFT + WIDTH + 20,
        TOP + each * len(NAMES),
        f"{', '.join(NAMES)}: {ACTORS} sets of ranks, {MICROBATCHES} microbatches",
        "python -m scripts.pictures",
    )
    drawing.text(
        20, 22, f"{ACTORS} sets of ranks, {MICROBATCHES} microbatches; B takes twice F", 15
    )
    _legend(drawing)
    for i, (name, timeline) in enumerate(found.items()):
        y = TOP + i * each
        peak = max(p.num_bytes for p in timeline.peaks)
        drawing.text(
            LEFT,
            y + 12,
            f"{name}: {timeline.seconds:g} F long, bubble {timeline.bubble:.2f}, "
            f"stores at most {peak:g} microbatches of a fourth of the model",
        )
        for actor in range(ACTORS):
            drawing.text(LEFT - 8, y + 20 + LANE * (actor + 0.7), f"set {actor}", 11, "end")
        for ran in timeline.events:
            if ran.task.kind not in FILLS:
                continue
            x, lane = LEFT + ran.start * scale, y + 20 + ran.actor * LANE
            width = (ran.end - ran.start) * scale
            drawing.box(x, lane, width, LANE - 2, FILLS[ran.task.kind])
            words = str(ran.task.micro)
            drawing.text(x + width / 2, lane + 12, words, 9, "middle", "white")
    return drawing


def _legend(drawing: Drawing) -> None:
    kinds = (("F", "forward"), ("B", "backward"), ("W", "of it what only weights wait for"))
    x = 430.0
    for kind, words in kinds:
        drawing.box(x, 12, 12, 12, FILLS[kind])
        drawing.text(x + 16, 22, words, 11, fill=INK)
        x += 30 + 6.2 * len(words)
