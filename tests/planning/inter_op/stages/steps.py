"""Saved steps in stages and microbatches, on slow machines."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from tests.planning.inter_op.stages.test_unit_builder import seconds
from tests.planning.problems import Captured
from tfpar.cluster import Cluster, Device, Level
from tfpar.compile.local import (
    LocalProgram,
    PipelineLowering,
    StagePass,
    WrittenStep,
    build_microbatched_program,
    build_uneven_program,
    split_stages,
)
from tfpar.cost import (
    Cost,
    PipelineCost,
    PipelineCostModel,
    ScatterGatherCost,
    TaskPartition,
    bottleneck_cost,
    staged_cost,
)
from tfpar.ir import BACKWARD, Op, Roles
from tfpar.pipeline import Schedule, generate
from tfpar.planning.inter_op.stages.pipeline_pricing import cut_in_stages
from tfpar.planning.inter_op.stages.unit_builder import assign_step
from tfpar.planning.pricing.sub_batches import SubBatchStep
from tfpar.planning.problem import Problem
from tfpar.plans import PipelinePlan, Plan, PlannedVariable
from tfpar.propagation import with_own_share
from tfpar.spec import Mesh, Shard, Spec, UnevenMesh, replicated_spec

DEVICE = Device({"float32": 1e9}, 2**30, 1e9, 1e-7)


def machines(between: float = 1e9, within: float = 4e9) -> Cluster:
    """Four nodes of four devices, with so many bytes/s between and within them."""
    levels = [Level(4, between, 1e-6), Level(4, within, 1e-7)]
    return Cluster.regular("slow", DEVICE, levels)


@dataclasses.dataclass(frozen=True, eq=False)
class Staged:
    """A saved step under a plan, with the stages of its ops."""

    plan: Plan
    problem: Problem
    step: SubBatchStep
    stage: Mapping[Op, int]
    num_stages: int

    @classmethod
    @functools.cache
    def of(cls, name: str, num_stages: int, model: int = 1) -> Staged:
        """Split over two ranks.

        Args:
            model: 2: the ranks split what widens and narrows in each block (Megatron's MLP), and
                not the batch.
        """
        mesh = Mesh.of({"data": 2 // model, "model": model} if model > 1 else {"data": 2})
        problem = Captured.saved(name).problem([2], machines())

        def spec(variable: str) -> Spec:
            whole = replicated_spec(mesh.num_axes)
            if model > 1 and variable.endswith(("fc1/kernel", "fc2/kernel")):
                return (*whole[:-1], Shard(1 if "fc1" in variable else 0))
            return whole

        variables = {
            v.name: PlannedVariable(v.shape, v.dtype, v.trainable, spec(v.name))
            for v in problem.step.variables
        }
        plan = problem.plan(
            mesh=mesh,
            variables=variables,
            batch_axes=("data",),
            planner="by hand",
            tfpar_version="0",
        )
        roles = Roles.of(problem.step.graph)
        units, found = assign_step(problem.step.graph, roles, seconds, num_stages)
        forward = units.forward_stages(found.stages)
        stages = PipelinePlan.of(generate("gpipe", num_stages, 1), forward)
        plan = dataclasses.replace(plan, stages=stages)
        cut = cut_in_stages(plan, problem)
        assert cut is not None
        (step,), (stage,) = cut
        return cls(plan, problem, step, stage, num_stages)

    @functools.cache  # noqa: B019 - there are as many as tests ask for
    def cut(self, microbatches: int) -> TaskPartition:
        laid = self.step.cut(microbatches)
        ratio = self.step.problem.step.state_ratio
        return TaskPartition(laid, self.step.roles, self.stage, self.num_stages, ratio)

    def programs(
        self,
        microbatches: int,
        schedule: Schedule,
        cluster: Cluster | None = None,
        recompute: bool = False,
        shares: UnevenMesh | None = None,
    ) -> list[LocalProgram]:
        """The program of each actor."""
        whole, roles = self.step.whole, self.step.roles
        slicing = ScatterGatherCost((whole.mesh,) * schedule.num_actors, cluster or machines())
        places = {
            op: StagePass(stage, roles.phase[op] == BACKWARD) for op, stage in self.stage.items()
        }
        laid, asked = (
            self.step.cut(microbatches),
            PipelineLowering(places, schedule, recompute, slicing),
        )
        write = functools.partial(build_microbatched_program, stages=asked)
        if shares is None:
            program = write(laid)
        else:
            program = build_uneven_program(laid, [shares.within(laid.mesh)], write)
        written = [WrittenStep(program)] * schedule.num_actors
        return [*split_stages(written, schedule).programs.values()]

    def priced(
        self,
        microbatches: int = 4,
        cluster: Cluster | None = None,
        actors: tuple[int, ...] | None = None,
        recompute: bool = False,
        shares: UnevenMesh | None = None,
    ) -> PipelineCostModel:
        actors, step = actors or tuple(range(self.num_stages)), self.cut(microbatches)
        if shares is not None:
            step = dataclasses.replace(step, laid=with_own_share(step.laid, shares))
        return PipelineCostModel.of(step, actors, cluster or machines(), recompute)


def priced_in_stages(
    step: SubBatchStep,
    stage: Mapping[Op, int],
    schedule: Schedule,
    cluster: Cluster,
    recompute: bool = False,
) -> tuple[Cost, PipelineCost]:
    """What a step costs in stages: as plans compare it, and stage by stage.

    Args:
        step: on the mesh of one stage.
        stage: of every op of it.
        cluster: the ranks of all stages: a mesh of them for each line of the schedule, in order.
        recompute: the backward pass of a stage runs its forward pass again.
    """
    cut = step.cut(schedule.num_microbatches)
    ratio, own = step.problem.step.state_ratio, step.statistics(cut)
    staged = TaskPartition(cut, step.roles, stage, schedule.num_stages, ratio, own)
    prices = PipelineCostModel.of(staged, schedule.actors, cluster, recompute, ())
    timeline = prices.run(schedule)
    return bottleneck_cost(prices, schedule, timeline), staged_cost(prices, schedule, timeline)
