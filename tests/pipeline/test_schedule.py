"""Schedules as values and as text: complete ones only, and files of others as they are."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfpar as tap
from tfpar.pipeline.generators import FAMILIES, generate
from tfpar.pipeline.tasks import Task
from tfpar.spec import ArgumentError, ScheduleError

ONE_STAGE = "0F0,0B0"


def orders(text):
    return tap.Schedule.parse(text).orders


# --- values ---------------------------------------------------------------------------------


def test_what_a_schedule_says():
    schedule = tap.Schedule.parse(
        "0F0,0F1,3F0,3F1,3B0,3B1,0B0,0B1\n1F0,1F1,2F0,2F1,2B0,2B1,1B0,1B1"
    )
    assert (schedule.num_actors, schedule.num_stages, schedule.num_microbatches) == (2, 4, 2)
    assert schedule.actors == (0, 1, 1, 0)
    assert schedule.stages_of(0) == (0, 3)
    assert [*map(str, schedule.forward()[1])] == ["1F0", "1F1", "2F0", "2F1"]


def test_tasks_read_back_and_are_told_in_words():
    for text in ("12F0", "2B31", "0I1", "0W1", "3J2", "3U"):
        assert str(Task.parse(text)) == text
    assert Task.parse("1B3").described == "the backward pass of microbatch 3 (1B3)"
    assert Task.parse("3U").described == "the update (3U)"
    for text in ("", "B3", "1X3", "1B3 "):
        with pytest.raises(ValueError, match="is no task"):
            Task.parse(text)


def test_lists_of_lists_are_orders_too():
    assert tap.Schedule([[("F", 0, 0), ["B", 0, 0]]]) == tap.Schedule.parse(ONE_STAGE)
    assert hash(tap.Schedule.parse(ONE_STAGE)) == hash(tap.Schedule.parse("0F0 0B0"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("0F0,0B0,0F0", "0F0 is there twice: task 0 of actor 0, and task 2 of actor 0"),
        ("0F0,0B0\n0F0,0B0", "0F0 is there twice: task 0 of actor 0, and task 0 of actor 1"),
        ("0F0,0F1,0B0", "lacks 0B1: each of 1 stages needs"),
        ("0F0,0B0,0B1", "lacks 0F1"),
        ("0F0", "lacks 0B0"),
        ("0F0,0B0\n1F1,1B1", "lacks 0F1, 0B1: each of 2"),
        ("0F0,0I0", "lacks 0W0"),
        ("0F0,0W0", "lacks 0I0"),
        ("0F0,0B0\n2F0,2B0", "No actor runs stage 1, though there is a stage 2"),
        ("0F0,0B0,0F2,0B2", "No stage runs microbatch 1, though there is a microbatch 2"),
        ("0F999999999", "No stage runs microbatch 0"),
        ("0F0,0B0\n999999999F0", "No actor runs stage 1, though there is a stage 999999999"),
        ("0F0,0B0,1F0\n1B0", "Stage 1 is on two actors: 1F0 on 0, 1B0 on 1"),
        ("0B0,0F0", "0B0 comes before 0F0 on actor 0"),
        ("0F0,0W0,0I0", "0W0 comes before 0I0 on actor 0"),
        ("0F0,0B0,0I0,0W0", "has 0B0, a whole backward pass, and 0I0, 0W0, a half"),
        ("0F0,0B0\n\n1F0,1B0", "Actor 1 runs nothing"),
    ],
)
def test_schedules_are_complete(text, message):
    with pytest.raises(ScheduleError, match=f"^the schedule: .*{message}"):
        tap.Schedule.parse(text)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ((), ScheduleError, "no actors"),
        (3, ArgumentError, "orders is 3; it must be for each set of ranks"),
        (("0F0",), ArgumentError, r"orders\[0\] is '0F0'"),
        ((("0F0",),), ScheduleError, "Task 0 of actor 0 is '0F0'; it must be a Task"),
        (((Task("U", 0),),), ScheduleError, "Task 0 of actor 0 is 0U; it must be a Task of kind F"),
        (((Task("F", 0, -1),),), ScheduleError, "is 0F-1"),
        (((Task("F", 0, 0.5),),), ScheduleError, "is 0F0.5"),
    ],
)
def test_what_is_no_schedule_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        tap.Schedule(given)


# --- text -----------------------------------------------------------------------------------


@given(st.sampled_from(sorted(FAMILIES)), st.integers(1, 4), st.integers(1, 6))
@settings(deadline=None)
def test_text_reads_back(name, actors, microbatches):
    schedule = generate(name, actors, microbatches)
    assert tap.Schedule.parse(str(schedule)) == schedule


def test_files_read_back(tmp_path):
    schedule = generate("zb-v", 2, 4)
    schedule.save(tmp_path / "schedule.csv")
    assert tap.Schedule.load(tmp_path / "schedule.csv") == schedule
    assert tap.Schedule.load(str(tmp_path / "schedule.csv")) == schedule


def test_idle_cells_spaces_and_line_ends_say_nothing():
    plain = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"
    for text in (
        "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n",
        "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1",
        "\n 0F0, 0F1 ,\t0B0, 0B1\r\n1F0,1B0,1F1,1B1\r\n\r\n",
        "\n,,\n" + plain + "\n , ,\n",
    ):
        assert str(tap.Schedule.parse(text)) == plain


def test_b_is_the_half_for_inputs_where_a_stage_has_w():
    """As PyTorch 2.5 writes its interleaved zero-bubble schedule: stage 1 is halved, 0 is not."""
    found = orders("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1,1W0,1W1")
    assert [t.kind for t in found[1]] == ["F", "I", "F", "I", "W", "W"]
    assert [t.kind for t in found[0]] == ["F", "F", "B", "B"]


def test_a_missing_w_is_not_taken_for_a_whole_backward_pass():
    with pytest.raises(ScheduleError, match="lacks 0W1"):
        tap.Schedule.parse("0F0,0B0,0W0,0F1,0B1")


def test_b_is_whole_where_a_stage_has_i():
    """As PyTorch's DualPipeV: whole backward passes in pairs, halves elsewhere."""
    found = orders(
        "0F0,3F0,3I0,3W0,0F1,3F1,(0F2;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,0I1,0W1,0I2,0W2\n"
        "1F0,2F0,1F1,2I0,2W0,2F1,(1F2;2B1)OVERLAP_F_B,(2F2;1B0)OVERLAP_F_B,2B2,1B1,1I2,1W2"
    )
    assert [str(t) for t in found[0][6:10]] == ["0F2", "3B1", "3F2", "0B0"]
    assert Task("I", 1, 2) in found[1] and Task("B", 1, 1) in found[1]


def test_bw_is_whole_beside_halves():
    found = orders("0F0,0F1,0BW0,0B1,0W1")
    assert [str(t) for t in found[0]] == ["0F0", "0F1", "0B0", "0I1", "0W1"]


def test_what_is_sent_is_passed_over():
    with_communication = (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
    )
    assert orders(with_communication) == orders("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")


@pytest.mark.parametrize(
    "text, message",
    [
        ("0F0,0Q0", "line 1, cell 2: cannot read '0Q0'. A cell is a stage, one of F"),
        ("0F0\n1F0,F1", "line 2, cell 2: cannot read 'F1'"),
        ("\n\n0F0,,0B", "line 3, cell 2: cannot read '0B'"),
        ("0F00F1", "line 1, cell 1: cannot read '0F00F1'"),
        ("0F" + "9" * 5000, "line 1, cell 1: cannot read '0F999"),
        ("-1F0", "line 1, cell 1: cannot read '-1F0'"),
        ("0F0,0U0", "line 1, cell 2: cannot read '0U0'"),
        ("0F0;0B0", "line 1, cell 1: cannot read '0F0;0B0'"),
        ("(0F0;0B)OVERLAP_F_B", "line 1, cell 1: cannot read '(0F0;0B)OVERLAP_F_B'"),
        ("(0F0;0B0)TOGETHER", "line 1, cell 1: cannot read '(0F0;0B0)TOGETHER'"),
        ("(0F0,0B0", "line 1, cell 1: cannot read '(0F0'"),
        ("()OVERLAP_F_B", "line 1, cell 1: cannot read '()OVERLAP_F_B'"),
        ("\u0661F0", "line 1, cell 1"),
        (" ,,\n\n", "has no tasks"),
    ],
)
def test_errors_name_line_and_cell(text, message, tmp_path):
    with pytest.raises(ScheduleError, match=f"^the schedule.*{re.escape(message)}"):
        tap.Schedule.parse(text)
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ScheduleError, match=f"^{re.escape(repr(str(path)))}.*{re.escape(message)}"):
        tap.Schedule.load(path)


def test_incomplete_files_are_named(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0,0F1\n")
    with pytest.raises(ScheduleError, match=r"mine.csv': The schedule lacks 0B1"):
        tap.Schedule.load(path)
    path.write_bytes(b"\xff\xfe0\x00")
    with pytest.raises(
        ScheduleError, match="Cannot read the schedule .*mine.csv.: it is not UTF-8 text"
    ):
        tap.Schedule.load(path)
    with pytest.raises(ScheduleError, match="Cannot read .*none.csv': No such file"):
        tap.Schedule.load(tmp_path / "none.csv")
    with pytest.raises(ArgumentError, match="path is None"):
        tap.Schedule.load(None)
    with pytest.raises(ArgumentError, match="text is ''"):
        tap.Schedule.parse("")
