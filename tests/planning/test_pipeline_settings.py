"""What a pipeline that is asked for has to fit: the plan and the mesh."""

import dataclasses

import pytest

from tests.plan.test_stages import MESH, staged
from tfpar.cluster import read_preset
from tfpar.constraints import stage
from tfpar.options import Options
from tfpar.pipeline import Pipeline, generate
from tfpar.planning.inter_op.stages.limits import StageLimits
from tfpar.planning.request import PlanRequest
from tfpar.settings import Settings, _check_agreed
from tfpar.spec import ArgumentError, Mesh, SpecError, TfparError


def settings(**options) -> Settings:
    return Settings.of(None, (), Options(**options))


def alone(microbatches: int):
    """A plan of one stage."""
    return dataclasses.replace(staged(), stages=None, microbatches=microbatches)


def test_a_pipeline_of_one_stage_is_its_microbatches():
    found = settings(pipeline=Pipeline(microbatches=4))
    assert found.pipeline == Pipeline(microbatches=4) and found.schedule.num_microbatches == 4
    assert settings().pipeline is None and settings().schedule.num_microbatches == 1


def test_several_stages_may_be_asked_for():
    pipeline = Pipeline(stages=2, microbatches=2)
    assert settings(pipeline=pipeline).pipeline == pipeline
    assert settings(plan=staged()).plan == staged()


def test_stages_have_a_tolerance_and_limits_of_memory():
    given = settings(pipeline=Pipeline(2, 4, tolerance=0.3), memory_limit=["1 GiB", 2**31])
    assert given.limits == StageLimits(0.3, (2.0**30, 2.0**31)) and given.memory_limit is None
    assert settings(pipeline=Pipeline("auto", tolerance=0)).limits == StageLimits(0.0)
    # A set of ranks has one memory, however many stages it runs.
    assert settings(pipeline=Pipeline(2, 4, "zb-v"), memory_limit=(1e9, 2e9)).limits.memory_bytes
    for options, message in (
        (dict(pipeline=Pipeline(2, 4)), "a list of 2, as many as the pipeline has sets of ranks"),
        (dict(pipeline="auto"), "a size, or, with a tap.Pipeline of a number of stages"),
        (dict(), "a size, or, with a tap.Pipeline of a number of stages"),
    ):
        with pytest.raises(ArgumentError, match=message):
            settings(memory_limit=[1e9, 1e9, 1e9], **options)
    with pytest.raises(ArgumentError, match=r"^memory_limit\[1\] is 'much'; it must be a size"):
        settings(pipeline=Pipeline(2, 4), memory_limit=["1 GiB", "much"])


def test_a_plan_and_a_pipeline_have_to_agree():
    """A plan of other microbatches neither wins nor loses silently."""
    given = settings(plan=alone(4), pipeline=Pipeline(microbatches=4))
    assert given.plan.microbatches == given.schedule.num_microbatches == 4
    with pytest.raises(ArgumentError, match="it has 2 microbatches, not 4. Leave it out"):
        settings(plan=alone(4), pipeline=Pipeline(microbatches=2))
    with pytest.raises(ArgumentError, match="it has 4 microbatches, not 1. Leave it out"):
        settings(plan=alone(1), pipeline=Pipeline(microbatches=4))
    with pytest.raises(ArgumentError, match="chunks or a pipeline"):
        settings(plan=alone(4), chunks=2)
    assert settings(plan=alone(1), chunks=2).chunks == 2


def test_a_plan_of_several_stages_has_to_agree_in_all():
    _check_agreed(staged(), Pipeline(2, 4))
    _check_agreed(staged(), Pipeline(schedule=generate("1f1b", 2, 4)))
    for pipeline, message in (
        (Pipeline(4, 2), "4 stages, not 2 and 2 microbatches, not 4"),
        (Pipeline(microbatches=4), "1 stages, not 2"),
        (Pipeline(2, 4, "gpipe"), "another schedule"),
        (Pipeline(2, 4, recompute=True), "recompute=True"),
        (Pipeline(2, 4, recompute=[1]), r"recompute=\(1,\)"),
    ):
        with pytest.raises(ArgumentError, match=f"not the plan's: it has {message}"):
            _check_agreed(staged(), pipeline)


def test_a_schedule_that_is_to_be_picked():
    picked = settings(pipeline=Pipeline(2, 4, "auto"))
    assert picked.picks_schedule and picked.schedule.num_stages == 2
    assert not settings(pipeline=Pipeline(2, 4)).picks_schedule
    with pytest.raises(ArgumentError, match="schedule='auto' or planner=None, not both"):
        settings(pipeline=Pipeline(2, 4, "auto"), planner=None)
    given = settings(plan=staged(), pipeline=Pipeline(2, 4, "auto"), planner=None)
    assert not given.picks_schedule
    with pytest.raises(ArgumentError, match="it has 4 stages, not 2. Leave"):
        _check_agreed(staged(), Pipeline(2, 4, "auto", virtual_stages=2))


def test_a_stage_is_planned_on_the_first_of_its_ranks_with_the_memory_of_all():
    cluster = read_preset("dgx-a100")
    assert PlanRequest(MESH, cluster).machine_types() == {cluster: 1}
    assert PlanRequest(MESH, cluster, pipeline=Pipeline(microbatches=4)).machine_types() == {
        cluster: 1
    }
    for pipeline in (Pipeline(2, 4), Pipeline(2, 4, "zb-v")):
        (part,) = PlanRequest(Mesh.of([1, 4]), cluster, pipeline=pipeline).machine_types()
        assert part.size == 4 and part.places(range(4)) == (0, 1, 2, 3)
        assert part.device.memory_bytes == 2 * cluster.device.memory_bytes
    with pytest.raises(TfparError, match="ranks, but cluster"):
        _ = PlanRequest(Mesh.of([2**15]), cluster, pipeline=Pipeline(2, 4)).machine_types()


def test_stages_are_for_pipelines_that_have_them():
    with pytest.raises(SpecError, match="no pipeline of several stages"):
        Settings.of(None, stage("head", 1), Options(pipeline=Pipeline(microbatches=2)))
    with pytest.raises(SpecError, match="no pipeline of several stages"):
        Settings.of(None, stage("head", 1), Options())
