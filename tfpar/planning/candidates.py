"""Candidates of an outer search, and the proposals that are evaluated to them.

A proposal names the decisions of a candidate. Evaluated (`drive`), it is a plan that has a layout,
fits, and has its cost.
"""

from __future__ import annotations

import dataclasses

from tfpar.cluster.description import Cluster
from tfpar.pipeline import Pipeline
from tfpar.pipeline.generators import name_of
from tfpar.pipeline.recompute import recompute_text
from tfpar.planning.meshes import LogicalMesh
from tfpar.planning.problem import Problem
from tfpar.plans import Candidate, Plan
from tfpar.plans.stages import PipelinePlan, meshes_text

NO_STAGES = "no stages"
"""Name of what has none; more may follow."""

Order = tuple[int, ...]
"""Ranks, actor by actor, those of each ascending; none: all as they are."""

Groups = tuple[tuple[int, ...], ...]
"""The ranks of each actor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolvedCandidate(Candidate):
    """A candidate that fits, of which a search may make others.

    Attributes:
        plan: with its layout, and its cost if it has a price.
        problem: that the layout solves: of a pipeline, that of the ranks of one stage.
    """

    plan: Plan
    problem: Problem

    @classmethod
    def of(cls, plan: Plan, problem: Problem) -> SolvedCandidate:
        name, cost = name_of_plan(plan), plan.cost
        if cost is None:
            return cls(name=name, plan=plan, problem=problem)
        return cls(
            name=name,
            seconds=cost.seconds,
            memory_bytes=cost.memory_bytes,
            cost=cost,
            plan=plan,
            problem=problem,
        )

    @property
    def num_actors(self) -> int:
        """Actors of its pipeline."""
        return 1 if self.plan.stages is None else self.plan.stages.num_actors

    @property
    def groups(self) -> Groups:
        """The ranks of each actor."""
        stages, size = self.plan.stages, self.plan.mesh.size
        return (tuple(range(size)),) if stages is None else stages.groups(size)


@dataclasses.dataclass(frozen=True)
class NewLayout:
    """A layout that is searched for a pipeline.

    Attributes:
        pipeline: its stages and microbatches; None: one of each.
        ranks: of its actors.
        machines: for those of one actor it is searched; None: the first actor's.
        meshes: the logical meshes of a stage to choose from; none: all.
    """

    pipeline: Pipeline | None
    ranks: Order = ()
    machines: Cluster | None = None
    meshes: tuple[LogicalMesh, ...] = ()


@dataclasses.dataclass(frozen=True)
class OtherMicrobatches:
    """The layout and the cut of a candidate, in the schedule of another pipeline."""

    base: SolvedCandidate
    pipeline: Pipeline


@dataclasses.dataclass(frozen=True)
class BestSchedule:
    """A candidate in the schedule that is simulated to be fastest."""

    base: SolvedCandidate


@dataclasses.dataclass(frozen=True)
class OtherStages:
    """The layout of a candidate on the same actors, cut into the stages of another pipeline, or as
    evenly as that asks for (its `tolerance`), in the schedule that suits them best."""

    base: SolvedCandidate
    pipeline: Pipeline


@dataclasses.dataclass(frozen=True)
class FewerRecomputed:
    """A candidate whose stages are recomputed, with those alone that would store too much else:
    they get less to do than the others."""

    base: SolvedCandidate


@dataclasses.dataclass(frozen=True)
class BalancedShares:
    """A candidate with shares of the batch by the speeds of ranks, where that is faster."""

    base: SolvedCandidate


def describe_pipeline(pipeline: Pipeline | None) -> str:
    """Describe a pipeline by what is decided of it: `2 stages, 8 microbatches`."""
    if pipeline is None:
        return NO_STAGES
    stages, count = pipeline.num_stages, pipeline.num_microbatches
    return f"{stages_text(stages)}, {microbatches_text(count)}{recomputing_text(pipeline)}"


def name_of_plan(plan: Plan) -> str:
    """Name a plan: `2 stages (1f1b), 8 microbatches, each data=4 x model=2`."""
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
    split = " and ".join(axis for axis in plan.batch_axes if sizes[axis] > 1)
    if plan.stages is None:
        name = f"{NO_STAGES}, {plan.mesh}" + (f", batch over {split}" if split else "")
        return f"{name}, {microbatches_text(plan.microbatches)}" if plan.microbatches > 1 else name
    name = name_of(plan.stages.schedule)
    schedule = "an order of its own" if name == "given" else name
    stages, actors = plan.stages.num_stages, plan.stages.num_actors
    shared = f" on {actors} sets of ranks" if stages > actors else ""
    return (
        f"{stages_text(stages)}{shared} ({schedule}{recomputing_text(plan.stages)}), "
        f"{microbatches_text(plan.microbatches)}, {meshes_text(plan.meshes)}"
        + (f", batch over {split}" if split else "")
    )


def recomputing_text(stages: Pipeline | PipelinePlan) -> str:
    """Say which stages are recomputed: `, recomputing`, or of some `, recomputing stage 0`."""
    some = recompute_text(stages.recompute)
    return f", recomputing{some and f' {some}'}" if stages.recompute else ""


def stages_text(number: int) -> str:
    """Name a number of stages."""
    return NO_STAGES if number == 1 else f"{number} stages"


def microbatches_text(number: int) -> str:
    """Name a number of microbatches."""
    return "1 microbatch" if number == 1 else f"{number} microbatches"


Proposal = (
    NewLayout | OtherMicrobatches | BestSchedule | OtherStages | FewerRecomputed | BalancedShares
)
"""Candidate that an outer search proposes, before it is evaluated."""
