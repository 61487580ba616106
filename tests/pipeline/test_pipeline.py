"""What users ask of a pipeline, checked where they write it."""

import numpy as np
import pytest

import tfpar as tap
from tfpar.pipeline import Pipeline, Schedule
from tfpar.pipeline.generators import FAMILIES, generate
from tfpar.pipeline.recompute import dealt_recompute, recompute_text
from tfpar.spec import ArgumentError, Mesh

WORDS = np.array(["auto", "1f1b"])
"""An array: it compares entry by entry."""
TWO = tap.Schedule.parse("0F0,0B0\n1F0,1B0")


@pytest.mark.parametrize("name", FAMILIES)
def test_names_are_schedules(name):
    pipeline = Pipeline(stages=2, microbatches=4, schedule=name)
    assert pipeline.order == generate(name, 2, 4)
    assert pipeline == Pipeline(2, 4, name) and hash(pipeline) == hash(Pipeline(2, 4, name))


def test_what_is_left_out():
    assert Pipeline(2, 4).order == generate("1f1b", 2, 4)
    assert Pipeline(microbatches=3).order == tap.Schedule.parse("0F0,0B0,0F1,0B1,0F2,0B2")
    assert Pipeline(schedule=TWO).order is TWO
    assert Pipeline(2, 1, TWO).order is TWO
    assert Pipeline(2, 4, "interleaved", virtual_stages=3).order.num_stages == 6


@pytest.mark.parametrize(
    "pipeline, part",
    [
        (Pipeline(microbatches=8), 1 / 8),
        (Pipeline(2, 8), 2 / 8),
        (Pipeline(4, 8), 4 / 8),
        (Pipeline(4, 8, "gpipe"), 1.0),
        (Pipeline(4, 8, recompute=True), 1 / 8),
        (Pipeline(4, 8, recompute=[0, 2]), 3 / 8),
        (Pipeline(2, 4, "gpipe", recompute=[1]), 1.0),
        (Pipeline(2, 4, "zb-h1"), 2 / 4),
    ],
)
def test_the_part_of_the_batch_whose_activations_are_stored(pipeline, part):
    assert pipeline.kept_part == part


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(), "microbatches is None; it must be a whole number, 1 or more"),
        (dict(stages=0, microbatches=2), "stages is 0"),
        (dict(stages="2", microbatches=2), "stages is '2'"),
        (dict(stages=2, microbatches=0), "microbatches is 0"),
        (dict(stages=2, microbatches=2.5), "microbatches is 2.5"),
        (dict(microbatches=2, schedule="1F1B"), "one of 'gpipe', .*'auto', or a tap.Schedule"),
        (dict(microbatches=2, schedule=["gpipe"]), "or a tap.Schedule"),
        (dict(microbatches=2, schedule=None), "schedule is None"),
        (dict(microbatches=2, virtual_stages=2), "must be 1 with schedule '1f1b'"),
        (dict(microbatches=2, schedule="zb-v", virtual_stages=3), "must be 2 with"),
        (dict(microbatches=2, schedule="auto", virtual_stages=0), "virtual_stages is 0"),
        (dict(microbatches=2, recompute=1), "recompute is 1; it must be True or False"),
        (
            dict(stages=2, microbatches=2, recompute=[2]),
            r"is \[2\]; .*, or numbers of stages from 0",
        ),
        (dict(stages=2, microbatches=2, recompute=[True]), "recompute is True; .* from 0 to 1"),
        (dict(stages=2, microbatches=2, recompute="0"), "recompute is '0'"),
        (dict(stages="auto", recompute=[0]), "leave out recompute"),
        (dict(schedule=TWO, stages=3), r"stages is 3; it must be 2: the schedule has 2 lines"),
        (dict(schedule=TWO, microbatches=2), "microbatches is 2; it must be 1: the schedule has"),
        (dict(schedule=TWO, virtual_stages=1), "not both"),
        (dict(stages="auto", microbatches=2, recompute=True), "leave out microbatches and recomp"),
        (dict(stages="auto", search="guess"), "search is 'guess'; it must be one of 'enumerate'"),
        (dict(stages="auto", search="anneal", seed=-1), "seed is -1"),
        (dict(stages="auto", search="megatron", seed=1), "draws nothing at random"),
        (dict(stages=2, microbatches=2, search="anneal"), "give stages='auto' with it"),
        (dict(stages=2, microbatches=2, tolerance=-0.1), "tolerance is -0.1"),
        (dict(stages="auto", tolerance="x"), "tolerance is 'x'"),
        (dict(microbatches=2, seed=1), "seed is for a pipeline that is searched"),
        (dict(stages=WORDS, microbatches=2), "stages is array"),
        (dict(stages="auto", microbatches=WORDS), "leave out microbatches"),
        (dict(stages=2, microbatches=2**31), "2 stages that run 2,147,483,648 microbatches"),
    ],
)
def test_wrong_values_are_refused_where_they_are_written(given, message):
    with pytest.raises(ArgumentError, match=message):
        Pipeline(**given)


def test_a_schedule_that_is_picked_later_has_its_stages_and_microbatches():
    assert not Pipeline(2, 4).picks_schedule and not Pipeline(schedule=TWO).picks_schedule
    for given, actors in (
        (dict(stages=2), (0, 1)),
        (dict(stages=2, virtual_stages=2), (0, 1, 0, 1)),
        (dict(stages=2, recompute=True), (0, 1)),
        (dict(), (0,)),
    ):
        pipeline = Pipeline(microbatches=4, schedule="auto", **given)
        assert pipeline.picks_schedule and pipeline.order.actors == actors
        assert pipeline.order.num_microbatches == 4
    assert Pipeline(microbatches=4, schedule="auto").order == Pipeline(microbatches=4).order


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", Schedule.parse("0F0,0I0,0W0\n1F0,1B0")])
def test_halves_of_the_backward_pass_are_not_recomputed(schedule):
    microbatches = None if isinstance(schedule, Schedule) else 4
    Pipeline(2, microbatches, schedule)
    with pytest.raises(ArgumentError, match=r"recompute=True or a schedule with halves .*I0"):
        Pipeline(2, microbatches, schedule, recompute=True)


def test_stages_that_are_not_halved_can_be_recomputed():
    halved = Schedule.parse("0F0,0I0,0W0\n1F0,1B0")
    assert Pipeline(schedule=halved, recompute=[1]).recompute == (1,)
    with pytest.raises(ArgumentError, match=r"recompute=\(0,\) or a schedule with halves .*0I0"):
        Pipeline(schedule=halved, recompute=[0])


def test_recomputed_stages_have_one_form():
    for given in (True, [0, 1], (1, 0, 1)):
        assert Pipeline(2, 4, recompute=given) == Pipeline(2, 4, recompute=True)
    assert Pipeline(2, 4, recompute=()) == Pipeline(2, 4)
    assert Pipeline(2, 4, "interleaved", recompute=[3, 1]).recompute == (1, 3)
    assert dealt_recompute((1,), 2, 2) == (1, 3) and dealt_recompute(True, 2, 2) is True
    assert recompute_text((0, 1, 2, 5)) == "stages 0-2 and 5" and recompute_text((1,)) == "stage 1"


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (3, 2), (3, 7), (8, 16)])
def test_a_pipeline_in_1f1b_knows_its_size_without_listing_its_tasks(stages, microbatches):
    plain = Pipeline(stages, microbatches)
    given = Pipeline(schedule=plain.order)  # all of whose tasks are looked at
    for name in ("num_actors", "num_stages", "num_microbatches", "kept_part"):
        assert getattr(plain, name) == getattr(given, name)
    assert Pipeline(stages, microbatches, recompute=True).kept_part == 1 / microbatches


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[0], [1, 1]], "is not the ranks of each stage"),
        ([[0], []], "is not the ranks of each stage"),
        ([[1], [2]], "is not the ranks of each stage"),
        ([0, 1], "it must be a list"),
        ("01", r"such as \[\[0\], \[1, 2\]\]"),
        ([["0"], [1]], "it must be a list"),
    ],
)
def test_ranks_of_stages_are_all_ranks_each_once(ranks, message):
    with pytest.raises(ArgumentError, match=message):
        Pipeline(ranks=ranks, microbatches=2)


def test_a_pipeline_shares_out_ranks():
    assert Pipeline(ranks=[[2, 0], [1]], microbatches=2).ranks == ((0, 2), (1,))
    assert Pipeline(ranks=[[2, 0], [1]], microbatches=2).order.num_stages == 2
    assert Pipeline(3, 2).sizes(8) == (3, 3, 2) and Pipeline(2, 2).sizes(4) == (2, 2)
    assert Pipeline(2, 2).stage_mesh(Mesh.of([3, 2])).shape == (3, 1)
    assert Pipeline(2, 2).stage_mesh(Mesh.of([5])).shape == (3,)
    with pytest.raises(ArgumentError, match="those of 3 stages"):
        Pipeline(3, 2, ranks=[[0], [1]])
