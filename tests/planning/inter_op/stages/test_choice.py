"""Which pipeline is chosen, of plans with given costs."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from tests.cases import seeds
from tests.planning.inter_op.stages.scripted import (
    BATCH,
    MESH,
    Costs,
    ScriptedEvaluator,
    bubble,
    choose_pipeline,
    estimated,
)
from tfpar.cost import PipelineCost, StageCost
from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import (
    name_of_plan,
)
from tfpar.planning.incumbent import SearchInterrupted
from tfpar.planning.inter_op.enumerate_pipelines import numbers_of_stages
from tfpar.planning.inter_op.relaxed_estimate import RelaxedEstimate
from tfpar.planning.objective import UNCERTAINTY
from tfpar.plans import PipelinePlan, Plan
from tfpar.spec import MemoryLimitError, Mesh, PlanError


def test_stages_and_microbatches_are_those_with_the_least_seconds():
    costs = Costs(bubble)
    plan = costs.choose()
    best = {
        stages: min((bubble(stages, m, False), m) for m in (1, 2, 4, 8, 16) if stages > 1 or m == 1)
        for stages in (1, 2, 4, 8)
    }
    stages = min(best, key=best.__getitem__)
    assert best[4][0] <= best[8][0] * (1 + UNCERTAINTY), "fewer stages are as near as can be told"
    assert plan.stages.num_stages == stages == 8
    assert (plan.cost.seconds, plan.microbatches) == best[stages]
    assert costs.searched == [1, 2, 4, 8]
    assert [rival.cost.seconds for rival in plan.findings.rivals] == sorted(
        rival.cost.seconds for rival in plan.findings.rivals
    )
    assert {rival.name.split(" (")[0].split(",")[0] for rival in plan.findings.rivals} == {
        f"{s} stages" for s in (2, 4, 8) if s != plan.stages.num_stages
    } | {"no stages"}


def test_no_stages_where_predictions_cannot_tell_that_they_are_faster():
    plan = Costs(lambda stages, micro, again: 1.0 if stages == 1 else 0.92).choose()
    assert plan.stages is None and plan.findings.rivals[0].cost.seconds == pytest.approx(0.92)


@pytest.mark.parametrize("seed", seeds(10, 50))
def test_the_chosen_plan_is_no_slower_than_the_one_without_stages(seed):
    random_s = random.Random(seed)
    known: dict[tuple, float] = {}

    def seconds(*asked) -> float:
        return known.setdefault(asked, random_s.uniform(0.8, 1.2))

    plan = Costs(seconds).choose()
    assert plan.cost.seconds <= known[1, 1, False]


def test_more_stages_are_not_searched_where_the_work_alone_takes_as_long():
    costs = Costs(lambda stages, micro, again: 1.0, enough=1.0)
    plan = costs.choose()
    assert costs.searched == [1] and plan.stages is None
    rivals = plan.findings.rivals
    assert [r.name.split(",")[0] for r in rivals] == ["2 stages", "4 stages", "8 stages"]
    assert all(r.reason == "estimated, not planned: it is fast enough" for r in rivals)
    assert [r.cost.seconds for r in rivals] == [0.5, 0.5, 0.5], "their work alone"


def test_numbers_of_stages_that_are_no_better_end_no_search():
    costs = Costs(lambda stages, micro, again: {1: 2.0, 2: 3.0, 4: 4.0, 8: 1.0}[stages])
    assert costs.choose(stages=(1, 2, 4, 8)).stages.num_stages == 8


def test_stages_that_no_schedule_would_make_faster_are_kept_as_estimated():
    costs = Costs(lambda stages, micro, again: {1: 2.0, 2: 2.5, 4: 3.0, 8: 1.5}[stages])
    promises = {
        1: estimated(2.0, 0.5),
        2: estimated(2.3, 0.5, bubble_s=0.2),
        4: estimated(2.3, 0.5, bubble_s=0.9),
        8: estimated(1.5, 0.5, bubble_s=0.1),
    }
    plan = choose_pipeline((1, 2, 4, 8), BATCH, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.searched == [1, 8, 4], "the fastest by its estimate first"
    left = plan.findings.rivals[-1]
    assert left.name.startswith("2 stages, ") and "not faster in any microbatches" in left.reason
    assert left.cost == promises[2].cost


def test_what_does_not_fit_is_cut_in_microbatches_or_computed_again():
    def memory(stages, micro, again):
        return 8 / stages * (0.25 if again else 1.0) + 8 / micro

    costs = Costs(bubble, memory, limit=1.6)
    plan = costs.choose(stages=(1, 2, 4))
    assert plan.stages.recompute
    assert plan.cost.memory_bytes <= 1.6
    moves = [(one.name, one.fits) for one in plan.findings.attempts]
    assert moves == [("16 microbatches", False)]
    names = [rival.name for rival in plan.findings.rivals]
    assert "no stages" in names and any(
        "a rank would store" in r.reason for r in plan.findings.rivals
    )


def test_gradients_are_added_up_where_only_that_fits():
    costs = Costs(lambda *_: 1.0, lambda stages, micro, again: 16 / micro + stages, limit=6)
    plan = costs.choose(stages=(1,))
    assert plan.stages is None and plan.microbatches == 4  # the fewest that fit, equally fast


def test_nothing_fits():
    costs = Costs(bubble, lambda stages, *_: 100.0 / stages, limit=1.0)
    with pytest.raises(MemoryLimitError) as raised:
        costs.choose()
    assert raised.value.needed_bytes == pytest.approx(12.5)


def test_a_number_of_stages_without_a_plan_is_passed_over():
    class Refusing(Costs):
        def planned(self, pipeline):
            if pipeline is not None and pipeline.order.num_stages == 2:
                raise PlanError("There are fewer layers. Use fewer stages.")
            return super().planned(pipeline)

    plan = Refusing(bubble).choose()
    assert ("2 stages", "There are fewer layers") in [
        (r.name, r.reason) for r in plan.findings.rivals
    ]
    with pytest.raises(PlanError, match="fewer layers"):
        Refusing(bubble).choose(stages=(2,))


def test_numbers_of_stages_are_those_that_divide_the_ranks():
    assert numbers_of_stages(Mesh.of([2, 4])) == (1, 2, 4, 8)
    assert numbers_of_stages(Mesh.of([6])) == (1, 2, 3, 6)
    assert numbers_of_stages(Mesh.of([2, 4]), least=3) == (4, 8)
    assert numbers_of_stages(Mesh.of([3, 8])) == (1, 2, 3, 4, 6, 8, 12, 24)


def test_ctrl_c_while_more_stages_are_searched_leaves_the_best_of_the_others():
    class Interrupted(Costs):
        def planned(self, pipeline):
            if pipeline is not None and pipeline.order.num_stages == 4:
                raise SearchInterrupted(lambda: None)
            return super().planned(pipeline)

    with pytest.raises(SearchInterrupted) as stopped:
        Interrupted(bubble).choose()
    assert stopped.value.plan.stages.num_stages == 2 and stopped.value.plan.findings.cut_short


def test_ctrl_c_while_microbatches_are_priced_leaves_the_best_so_far():
    class Interrupted(Costs):
        def repriced(self, plan, pipeline):
            if pipeline.order.num_stages == 4 and pipeline.order.num_microbatches == 8:
                raise KeyboardInterrupt
            return super().repriced(plan, pipeline)

    with pytest.raises(SearchInterrupted) as stopped:
        Interrupted(bubble).choose()
    plan = stopped.value.plan
    assert plan.findings.cut_short and (plan.stages.num_stages, plan.microbatches) == (4, 16)
    assert [rival.name[:8] for rival in plan.findings.rivals] == ["2 stages", "no stage"]


def test_the_schedule_is_the_one_that_suits_the_stages_best():
    costs = Costs(bubble)

    def scheduled(plan: Plan) -> Plan:
        return plan.with_findings(cost=dataclasses.replace(plan.cost, seconds=0.1))

    evaluator = ScriptedEvaluator(costs.planned, costs.repriced, scheduled, lambda plan: False)
    chosen = choose_pipeline((1, 2), BATCH, evaluator, math.inf, MESH.size)
    assert chosen.cost.seconds == pytest.approx(0.1)


@pytest.mark.parametrize("waits, faster, each", [(0.3, 0.6, 2), (0.3, 0.95, 1), (0.05, 0.6, 1)])
def test_sets_of_ranks_have_several_stages_where_they_wait_long_and_that_is_faster(
    waits, faster, each
):
    costs, asked = Costs(lambda stages, *_: 4.0 / stages), []

    def scheduled(plan: Plan) -> Plan:
        cost = dataclasses.replace(plan.cost, seconds=0.9, bubble_s=0.9 * waits)
        return plan.with_findings(cost=cost)

    def restaged(plan: Plan, pipeline: Pipeline) -> Plan | None:
        asked.append(pipeline.order)
        scopes = {f"layer_{stage}": stage for stage in range(pipeline.order.num_stages)}
        stages = PipelinePlan(pipeline.order, scopes)
        cost = dataclasses.replace(plan.cost, seconds=faster * plan.cost.seconds, bubble_s=0.0)
        return dataclasses.replace(plan, stages=stages).with_findings(cost=cost)

    evaluator = ScriptedEvaluator(
        costs.planned, costs.repriced, scheduled, lambda _: False, restaged=restaged
    )
    plan = choose_pipeline((1, 2), BATCH, evaluator, math.inf, MESH.size)
    assert (plan.stages.num_actors, plan.stages.num_stages) == (2, 2 * each)
    assert all(o.num_actors == 2 and o.num_microbatches == plan.microbatches for o in asked)
    if each > 1:
        assert name_of_plan(plan).startswith("4 stages on 2 sets of ranks (interleaved), ")
    elif waits > UNCERTAINTY:
        assert [o.num_stages for o in asked] == [4, 4, 8], "looped, as a V, and looped"
    else:
        assert not asked


@pytest.mark.parametrize("bubbles, is_cut", [((0.0, 0.2), True), ((0.0, 0.02), False)])
def test_stages_are_cut_evenly_where_one_is_busier_than_the_others_by_much(bubbles, is_cut):
    costs, asked = Costs(lambda stages, *_: 4.0 / stages), []

    def scheduled(plan: Plan) -> Plan:
        shares = tuple(StageCost((), 0, 0, 0, 0, b, 0, 0, 0, 0, 0, "") for b in bubbles)
        stages = dataclasses.replace(plan.stages, cost=PipelineCost(1.95, 0.1, shares))
        plan = plan.with_findings(cost=dataclasses.replace(plan.cost, seconds=1.95))
        return dataclasses.replace(plan, stages=stages)

    def restaged(plan: Plan, pipeline: Pipeline) -> Plan | None:
        asked.append((pipeline.stages, pipeline.num_microbatches, pipeline.tolerance))
        return plan.with_findings(cost=dataclasses.replace(plan.cost, seconds=1.9))

    evaluator = ScriptedEvaluator(
        costs.planned, costs.repriced, scheduled, lambda _: False, restaged=restaged
    )
    plan = choose_pipeline((1, 2), BATCH, evaluator, math.inf, MESH.size)
    assert plan.cost.seconds == (1.9 if is_cut else 1.95)
    assert asked == [(2, plan.microbatches, 0.0)] * is_cut


def test_a_plan_without_a_price_is_taken_as_it_is():
    class Unpriced(Costs):
        def planned(self, pipeline):
            return super().planned(pipeline).with_findings(cost=None)

    costs = Unpriced(bubble)
    assert costs.choose().cost is None and costs.searched == [1]


# --- numbers of stages of which the fastest plan does not fit -------------------------------


def promising(costs: Costs, promises: dict[int, RelaxedEstimate], asked: list) -> ScriptedEvaluator:
    def promised(pipeline: Pipeline | None) -> RelaxedEstimate:
        asked.append(pipeline)
        return promises[1 if pipeline is None else pipeline.order.num_stages]

    return ScriptedEvaluator(
        costs.planned, costs.repriced, lambda plan: plan, lambda plan: False, "", promised
    )


def test_stages_whose_fastest_plan_does_not_fit_come_last_the_most_promising_first():
    costs = Costs(lambda stages, micro, again: {1: 9.0, 2: 6.0, 4: 5.0, 8: 7.0}[stages])
    promises = {
        1: estimated(3.0, 2.0),
        2: estimated(2.9, 2.0),
        4: estimated(1.0, 2.0),
    }
    promises[8] = estimated(0.5, 0.5)
    plan = choose_pipeline((1, 2, 4, 8), BATCH, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.searched == [8, 4, 2, 1] and plan.stages.num_stages == 4


def test_stages_whose_fastest_plan_does_not_fit_are_planned_in_the_schedule_that_fits_best():
    class Recorded(Costs):
        planned_in: list[object] = []

        def planned(self, pipeline: Pipeline | None) -> Plan:
            self.planned_in.append(None if pipeline is None else pipeline.schedule)
            return super().planned(pipeline)

    costs = Recorded(lambda stages, micro, again: {1: 9.0, 2: 6.0, 4: 5.0}[stages])
    promises = {1: estimated(3.0, 2.0), 2: estimated(2.9, 2.0), 4: estimated(1.0, 2.0)}
    choose_pipeline((1, 2, 4), BATCH, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.planned_in == ["auto", "auto", None]


@pytest.mark.parametrize("fits", [True, False])
def test_stages_that_compute_too_long_alone_are_not_estimated_unless_no_others_fit(fits):
    """Eight stages compute twice as long as two take by their estimate."""

    def planned(pipeline: Pipeline | None) -> Plan:
        if not fits and (pipeline is None or pipeline.num_stages < 8):
            raise MemoryLimitError("It does not fit.", 2.0)
        return costs.planned(pipeline)

    costs, asked = Costs(lambda stages, micro, again: float(stages)), []
    promises = {1: estimated(3.0, 2.0), 2: estimated(1.0, 2.0), 8: estimated(2.0, 2.0)}
    evaluator = dataclasses.replace(promising(costs, promises, asked), planned=planned)
    evaluator = dataclasses.replace(evaluator, computing={8: 2.0})
    plan = choose_pipeline((1, 2, 8), BATCH, evaluator, math.inf, MESH.size)
    assert any(p and p.num_stages == 8 for p in asked) != fits
    if fits:
        left = {one.name: one.reason for one in plan.findings.rivals}
        assert any("by what it computes alone" in why for why in left.values())
    else:
        assert plan.stages.num_stages == 8


def test_stages_that_promise_nothing_better_are_not_searched():
    costs = Costs(lambda stages, micro, again: 2.0)
    promises = {
        1: estimated(2.5, 2.0),
        2: estimated(1.0, 2.0),
        4: estimated(2.1, 2.0),
    }
    plan = choose_pipeline((1, 2, 4), BATCH, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.searched == [2] and plan.stages.num_stages == 2
    left = {rival.name.split(",")[0]: rival for rival in plan.findings.rivals}
    assert set(left) == {"no stages", "4 stages"}
    assert all("it is hardly faster" in rival.reason for rival in left.values())
    assert left["4 stages"].cost == promises[4].cost


def test_stages_whose_plan_fits_come_before_faster_ones_that_are_then_left_if_hardly_better():
    costs = Costs(lambda stages, micro, again: 2.0)
    promises = {
        1: estimated(9.0, 2.0),
        2: estimated(1.85, 2.0),
        4: estimated(1.9, 0.5),
    }
    plan = choose_pipeline((1, 2, 4), BATCH, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.searched == [4] and plan.stages.num_stages == 4
    promises[2] = estimated(1.8, 2.0)  # falls short of it as the other one did
    choose_pipeline((1, 2, 4), BATCH, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.searched == [4, 4]
    promises[2] = estimated(1.7, 2.0)  # more than a tenth faster
    choose_pipeline((1, 2, 4), BATCH, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.searched == [4, 4, 4, 2]


def test_as_long_as_nothing_fits_more_stages_are_looked_at_however_slow():
    costs, asked = Costs(lambda stages, micro, again: float(stages)), []
    promises = {
        1: estimated(1.0, 9.0),
        2: estimated(2.0, 5.0),
        4: estimated(4.0, 3.0),
    }
    promises[8] = estimated(8.0, 0.5)
    plan = choose_pipeline(
        (1, 2, 4, 8), BATCH, promising(costs, promises, asked), math.inf, MESH.size
    )
    assert asked[-1].order.num_stages == 8 and costs.searched == [8]
    assert plan.stages.num_stages == 8
    left = {rival.name.split(",")[0]: rival for rival in plan.findings.rivals}
    assert list(left) == ["no stages", "2 stages", "4 stages"], (
        "the fastest by their estimates first"
    )
    assert all("more than 2 times what there is" in rival.reason for rival in left.values())


def test_a_fast_plan_that_does_not_fit_is_no_reason_to_look_at_no_more_stages():
    costs = Costs(lambda stages, micro, again: 3.0)
    promises = {
        1: estimated(1.0, 9.0),
        2: estimated(3.0, 0.9),
        4: estimated(2.8, 0.9),
    }
    promises[8] = estimated(2.8, 0.5)
    choose_pipeline((1, 2, 4, 8), BATCH, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.searched == [8], "the first with room to spare, of those that promise as much"


@pytest.mark.parametrize("second", [1.0, 2.0])
def test_all_stages_are_ranked_however_slow_those_are_that_do_not_fit(second):
    costs = Costs(lambda stages, micro, again: {1: 2.0, 8: 0.9}[stages])
    promises = {
        1: estimated(2.0, 0.5),
        2: estimated(second, 3.0),
        4: estimated(second, 3.0),
    }
    promises[8] = estimated(0.9, 0.5)
    choose_pipeline((1, 2, 4, 8), BATCH, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.searched == [1, 8]


def test_stages_that_would_have_to_store_far_less_are_searched_where_no_others_fit():
    costs = Costs(lambda stages, micro, again: float(stages))
    promises = {1: estimated(1.0, 9.0), 2: estimated(2.0, 5.0)}
    plan = choose_pipeline((1, 2), BATCH, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.searched == [1] and plan.stages is None, "and then no others"


@pytest.mark.parametrize(
    ("batch", "stages", "first"),
    [(16, 2, 8), (1536, 8, 24), (1536, 16, 48), (1536, 1024, 768), (6, 2, 6), (17, 2, 17)],
)
def test_microbatches_are_cut_so_that_the_ranks_of_a_stage_can_share_them(batch, stages, first):
    tried = []

    def planned(pipeline):
        tried.append(pipeline.num_microbatches)
        raise MemoryLimitError("Too large.", 1.0)

    evaluator = dataclasses.replace(promising(Costs(bubble), {}, []), planned=planned)
    evaluator = dataclasses.replace(evaluator, promised=lambda _: None)
    with pytest.raises(MemoryLimitError):
        choose_pipeline((stages,), batch, evaluator, math.inf, ranks=128 * stages)
    assert tried[0] == first and min(tried) > 1


def test_no_pipeline_has_one_microbatch():
    """Its stages would work one after the other. Who asks for it by name gets it."""
    costs = Costs(bubble)
    promises = {1: estimated(1.0, 0.5)}
    plan = choose_pipeline((1, 2, 4), 1, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.searched == [1] and plan.stages is None
    left = {one.name: one.reason for one in plan.findings.rivals}
    assert left.keys() == {"2 stages", "4 stages"}
    assert all(why.startswith("not searched: the batch cannot be cut") for why in left.values())
    with pytest.raises(PlanError, match=r"Ask for one by name, such as tap.Pipeline\(2, 1\)"):
        choose_pipeline((2, 4), 1, promising(costs, {}, []), math.inf, MESH.size)


@pytest.mark.parametrize(("batch", "tried"), [(24, [6, 4]), (16, [8, 4])])
def test_other_microbatches_are_those_that_ranks_share_as_evenly(batch, tried):
    priced = []

    class OverTwo(Costs):
        def made(self, pipeline):
            plan = super().made(pipeline)
            return dataclasses.replace(plan, mesh=Mesh.of({"data": 2}), batch_axes=("data",))

        def repriced(self, plan, pipeline):
            priced.append(pipeline.order.num_microbatches)
            return super().repriced(plan, pipeline)

    OverTwo(lambda stages, micro, again: 1.0).choose((4,), batch)
    assert priced == tried


def test_of_promises_that_are_alike_the_fewest_stages_with_enough_room_come_first():
    costs = Costs(lambda stages, micro, again: 2.0)
    promises = {
        1: estimated(9.0, 2.0),
        2: estimated(1.95, 0.9),
        4: estimated(2.0, 0.6),
    }
    promises[8] = estimated(1.9, 0.4)
    choose_pipeline((1, 2, 4, 8), BATCH, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.searched == [4]


def test_of_promises_that_are_alike_without_much_room_the_one_with_most_comes_first():
    costs = Costs(lambda stages, micro, again: 2.0)
    promises = {
        1: estimated(9.0, 2.0),
        2: estimated(1.95, 0.8),
        4: estimated(1.9, 0.9),
    }
    promises[8] = estimated(1.0, 2.0)
    choose_pipeline((1, 2, 4, 8), BATCH, promising(costs, promises, []), math.inf, MESH.size)
    assert costs.searched == [2, 8]


def test_a_plan_is_searched_first_with_microbatches_with_which_one_fits():
    costs, asked, first = Costs(bubble), [], []

    def promised(pipeline: Pipeline | None) -> RelaxedEstimate:
        asked.append(pipeline)
        return estimated(1.0, 0.5 if pipeline and pipeline.order.num_microbatches == 16 else 2.0)

    def planned(pipeline: Pipeline | None) -> Plan:
        first.append(pipeline.order.num_microbatches)
        return costs.planned(pipeline)

    evaluator = dataclasses.replace(promising(costs, {}, asked), promised=promised, planned=planned)
    plan = choose_pipeline((2,), BATCH, evaluator, math.inf, MESH.size)
    assert [p.order.num_microbatches for p in asked] == [8, 16]
    assert first == [16] and plan.stages.num_stages == 2


def test_alone_recomputing_comes_before_accumulation():
    tried = []

    def seconds(stages, micro, again):
        tried.append((stages, micro, again))
        return 1.0

    promises = {1: estimated(1.0, 2.0), 2: estimated(2.0, 2.0)}
    choose_pipeline((1, 2), BATCH, promising(Costs(seconds), promises, []), math.inf, MESH.size)
    assert tried[0] == (1, 1, False)


def test_an_interruption_among_the_last_keeps_what_was_found():
    costs = Costs(bubble)
    evaluator = promising(costs, {1: estimated(0.6, 2.0), 2: estimated(1.0, 0.5)}, [])

    def planned(pipeline):
        if pipeline is None:
            raise KeyboardInterrupt
        return costs.planned(pipeline)

    with pytest.raises(SearchInterrupted) as stopped:
        choose_pipeline(
            (1, 2), BATCH, dataclasses.replace(evaluator, planned=planned), math.inf, MESH.size
        )
    assert stopped.value.plan.stages.num_stages == 2 and stopped.value.plan.findings.cut_short
