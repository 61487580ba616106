"""Problems for planners, from the steps of small models."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.graphs import saved
from tfpar.cluster import Cluster, find_cluster
from tfpar.cost import Cost, evaluate
from tfpar.ir import StepGraph
from tfpar.planning.objective import Budget
from tfpar.planning.pricing.plan_propagation import priced_roles, propagate_plan
from tfpar.planning.problem import Problem
from tfpar.planning.problems import state_problem
from tfpar.planning.request import PlanRequest
from tfpar.plans import Plan
from tfpar.propagation import PartitionedGraph
from tfpar.spec import Mesh


@dataclasses.dataclass(frozen=True)
class Captured:
    """A model's step without its update, and the batch that it was captured for."""

    step: StepGraph
    batch: int

    @classmethod
    def saved(cls, name: str) -> Captured:
        """The step that is saved under this name; see `tests.graphs`."""
        step = saved(name)
        return cls(step, step.graph.inputs[0].shape[0])

    @classmethod
    def of(cls, build: Callable[[], Any], batch: int, data: Any = None) -> Captured:
        """The step of the Keras model that `build` makes, which is captured now."""
        import tfpar as tap
        from benchmarks.models import batch_of, compile_model
        from tfpar.compile import simplify_step
        from tfpar.tf.capture import argument_specs
        from tfpar.tf.keras import parallel_model

        with tap.auto_parallel([1], planner=None):
            model = build()
            if not model.compiled:
                compile_model(model)
        specs = argument_specs((data or batch_of(model, batch),))
        step = parallel_model(model).capture_gradients(specs)
        simplify_step(step)
        return cls(step, batch)

    def problem(
        self,
        mesh: Sequence[int],
        cluster: str | Cluster,
        constraints: Sequence[Any] = (),
        uncertainty: float = 0.0,
    ) -> Problem:
        """The problem of planning it; unless told, the fastest plan is asked for, however near
        simpler ones come: what a search finds is to be seen."""
        grid = Mesh.of(mesh)
        request = PlanRequest(grid, find_cluster(cluster, grid), tuple(constraints))
        problem = state_problem(self.step, request, self.batch, state_ratio=2.0)
        return problem.with_objective(uncertainty=uncertainty)


def within(seconds: float | None, problem: Problem) -> Problem:
    """The problem of finding a plan in so many seconds."""
    return problem.with_aim(budget=Budget(seconds))


def partition(problem: Problem, plan: Plan) -> PartitionedGraph:
    """The whole, unfolded graph laid as `plan` says, by plain propagation."""
    return propagate_plan(plan, problem)


def price(problem: Problem, plan: Plan) -> Cost:
    """What the evaluator says of it."""
    partitioned = partition(problem, plan)
    roles = priced_roles(partitioned, problem)
    return evaluate(partitioned, problem.cluster, roles, problem.step.state_ratio)


def assert_priced_as_a_whole(problem: Problem, plan: Plan) -> None:
    """A plan costs, and stores, what the evaluator says of the whole, unfolded model."""
    cost = price(problem, plan)
    assert plan.cost is not None
    assert plan.cost.seconds == pytest.approx(cost.seconds, rel=1e-4)
    assert plan.cost.memory_bytes == pytest.approx(cost.memory_bytes, rel=0.05)


def laid(plan: Plan, ending: str) -> set[str]:
    """The specs of the variables whose paths end so."""
    found = {
        ",".join(map(str, v.spec)) if v.spec else "open"
        for name, v in plan.variables.items()
        if name.endswith(ending)
    }
    assert found, ending
    return found


def assignments(options: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every choice of one option for each name."""
    for picks in itertools.product(*options.values()):
        yield dict(zip(options, picks, strict=True))
