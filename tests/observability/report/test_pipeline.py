"""Plans in stages as text: where each stage runs, what lies there, and in which order."""

import dataclasses

from tests.plan.graphs import mlp, partition
from tests.plan.test_stages import MESH, staged
from tfpar.constraints import shard
from tfpar.observability.report import build_report
from tfpar.observability.report.announcement import announcement
from tfpar.observability.report.data.schema import PipelineSummary, Stage
from tfpar.observability.report.pipeline import idle_ranks, ranks_text, stages_tables
from tfpar.pipeline import Schedule, generate
from tfpar.plans import Plan, plan_from_constraints
from tfpar.spec import Mesh


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table with this title."""
    lines = text.split(f"{title}", 1)[1].splitlines()[1:]
    table = []
    for line in lines:
        if not line.startswith(("|", "+")):
            break
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table[1:]


def laid(schedule: Schedule, **changes):
    """A plan of this schedule with a kernel that is split, and what propagation makes of it."""
    fixed = plan_from_constraints(mlp(momentum=True), MESH, [shard("fc1/kernel", 1, "model")])
    plan = dataclasses.replace(staged(schedule, **changes), variables=fixed.variables)
    return plan, partition(mlp(momentum=True), plan)


def test_a_table_says_where_stages_run_and_what_lies_there():
    plan, partitioned = laid(generate("1f1b", 2, 4))
    text = plan.summary(partitioned, full=True)
    assert text.startswith("Plan on 2 stages, each data=1 x model=2 (4 ranks), ")
    assert "in 4 microbatches" in text.splitlines()[0]
    first, last = rows(text, "Stages (schedule 1f1b)")
    # Of fc1 the kernel, its momentum and the bias are split in two, of fc2 all but the bias.
    split = (30 + 30 + 5 + 30 + 30 + 6) * 4
    assert first == ["0", "0-1", "block_0/fc1, block_0/fc2", "1.00 KiB", f"{split} B"]
    assert last == ["1", "2-3", "head", f"{(30 + 5 + 30) * 4} B", f"{(30 + 5 + 30) * 4} B"]
    kernel = next(row for row in rows(text, "Variables\n") if row[0] == "block_0/fc1/kernel")
    assert kernel[2:4] == ["S(1) over model", "0"]
    other = rows(text, "Variables\n")[-1]
    assert other[0].startswith("3 optimizer") and other[3] == "0-1" and not other[5]
    assert "per device" not in text.split("Total: ")[1].splitlines()[0]


def test_virtual_stages_share_ranks_and_say_so():
    plan, partitioned = laid(generate("zb-v", 2, 4), recompute=True)
    text = plan.summary(partitioned, full=True)
    assert text.startswith("Plan on 4 stages on 2 sets of ranks, each data=1 x model=2 (4 ranks)")
    title = "Stages (schedule zb-v, forward passes run again in the backward pass)"
    assert [row[1] for row in rows(text, title)] == ["0-1", "2-3", "2-3", "0-1"]


def test_stages_that_are_recomputed_are_named():
    plan, partitioned = laid(generate("1f1b", 2, 4), recompute=(1,))
    again = "forward passes of stage 1 run again in the backward pass"
    assert rows(plan.summary(partitioned, full=True), f"Stages (schedule 1f1b, {again})")


def test_a_given_schedule_has_no_name():
    given = Schedule.parse("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0")
    assert "Stages (a given schedule)" in staged(given).summary()


def test_a_variable_and_a_layer_are_explained_with_their_stage():
    plan, partitioned = laid(generate("1f1b", 2, 4))
    for text in (plan.explain("head/kernel"), plan.explain("head/kernel", partitioned)):
        assert "\n  Stage: 1 of 2, on ranks 2-3\n" in text
    alone = dataclasses.replace(plan, stages=None, microbatches=1)
    assert "Stage" not in alone.explain("head/kernel") and "Stage" not in alone.summary()


def test_layers_are_shown_in_the_layout_of_their_stage(tmp_path):
    """On one rank nothing is split; on two, whose layout is another one, a kernel is."""
    graph = mlp(momentum=True)
    first = plan_from_constraints(graph, Mesh.of([1]))
    fixed = plan_from_constraints(graph, MESH, [shard("head/kernel", 0, "model")])
    stages = dataclasses.replace(
        staged(generate("1f1b", 2, 4)).stages, layouts=(fixed.layout,), layout_of=(0, 1)
    )
    plan = dataclasses.replace(first, stages=stages, microbatches=4)
    plan = plan.with_partitioned(partition(graph, first), partition(graph, fixed))
    report = build_report(plan, plan.partitioned)
    placed = {layer.path: layer.placement for layer in report.layers}
    assert placed["block_0/fc1"] == "replicated" and placed["head"] == "S(0) over model"
    assert {(one.layer, one.axes) for one in report.collectives} == {("head", ("model",))}
    variables = {variable.path: variable for variable in report.variables}
    assert variables["head/kernel"].placement == "S(0) over model"
    assert variables["block_0/fc1/kernel"].placement == "replicated"
    plan.save(tmp_path / "plan.json")
    assert build_report(Plan.load(tmp_path / "plan.json")).layers == report.layers


def test_the_announcement_says_how_many_stages_there_are():
    plan, partitioned = laid(generate("1f1b", 2, 4))
    assert announcement(plan, partitioned).startswith("2 stages, each data=1 x model=2, ")


# --- stages ---------------------------------------------------------------------------------

GIB = 2.0**30
FIRST = Stage(
    tuple(range(4)),
    "block_0 ... block_3 (4)",
    4096,
    1024,
    forward_s=0.010,
    backward_s=0.020,
    update_s=0.001,
    bubble=0.5,
    sent_bytes=3e6,
    in_flight=4,
    peak_bytes=3 * GIB,
    peak_task="0F3",
)
SECOND = dataclasses.replace(
    FIRST,
    ranks=(4, 6),
    forward_s=0.012,
    backward_s=0.024,
    update_s=0.0,
    bubble=0.0,
    sent_bytes=0.0,
    in_flight=1,
    peak_bytes=GIB,
    peak_task="",
)


def pipeline(*stages: Stage, bubble: float | None = 0.25) -> PipelineSummary:
    groups = tuple(stage.ranks for stage in stages)
    return PipelineSummary(
        "schedule 1f1b", groups, tuple(range(len(stages))), False, stages, bubble
    )


def test_a_line_for_each_stage():
    (text,) = stages_tables(pipeline(FIRST, SECOND), full=False)
    title, *table = text.split("\n")
    assert "of all 25 %" in title and title.startswith("Stages (schedule 1f1b)")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if "|" in line]
    assert rows == [
        ["Stage", "Ranks", "F", "B", "U", "Bubble", "Sent", "In flight", "Memory", "At"],
        "0,0-3,10.00 ms,20.00 ms,1.00 ms,50 %,2.87 MiB,4,3.00 GiB,0F3".split(","),
        ["1", "4, 6", "12.00 ms", "24.00 ms", "0.00 us", "0 %", "0 B", "1", "1.00 GiB", ""],
    ]


def test_of_many_stages_the_first_are_shown_unless_all_are_asked_for():
    many = pipeline(*[FIRST] * 16)
    _, more = stages_tables(many, full=False)
    assert more == "  and 8 more stages (full=True shows them)"
    where, takes = stages_tables(many, full=True)
    assert "block_0 ... block_3 (4)" in where and "| 15 " in where and "| 15 " in takes


def test_stages_that_were_not_priced_are_shown_with_what_lies_there():
    (text,) = stages_tables(pipeline(FIRST, SECOND, bubble=None), full=False)
    assert "4.00 KiB |   1.00 KiB |" in text


def test_ranks_with_next_to_no_work_are_named():
    def told(*stages: Stage) -> list[str]:
        return idle_ranks(stages)

    assert told(FIRST, SECOND) == []
    waiting = dataclasses.replace(SECOND, bubble=19.5)  # works for 1 / 20.5 of a step
    (text,) = told(FIRST, waiting, dataclasses.replace(waiting, ranks=(5, 7)))
    assert text == (
        "Ranks 4-7 work for less than 5 % of a step: it would take about as long without their "
        "devices."
    )
    nothing = dataclasses.replace(FIRST, ranks=(9,), forward_s=0, backward_s=0, update_s=0)
    assert told(SECOND, nothing)[0].startswith("Rank 9 works for less than 5 % of a step")


def test_ranks():
    assert [ranks_text(ranks) for ranks in ((3,), (0, 1), (0, 2), (2, 1), (5, 6, 7))] == [
        "3",
        "0-1",
        "0, 2",
        "2, 1",
        "5-7",
    ]
