"""Candidates of an outer search, and the proposals that are evaluated to them.

A proposal names the decisions of a candidate. Evaluated (`drive`), it is a plan that has a layout,
fits, and has its cost.
"""

from __future__ import annotations

import dataclasses
import math

from tfpar.cluster.description import Cluster
from tfpar.pipeline import Pipeline
from tfpar.planning.meshes import LogicalMesh
from tfpar.planning.problem import Problem
from tfpar.plans import Plan

Order = tuple[int, ...]
"""Ranks, actor by actor, those of each ascending; none: all as they are."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that fits, with its cost (None if it has no price), and the problem that it solves: of
    a pipeline, that of the ranks of one stage."""

    plan: Plan
    problem: Problem

    @property
    def seconds(self) -> float:
        """Of a step; infinite without a price."""
        return math.inf if self.plan.cost is None else self.plan.cost.seconds

    @property
    def num_actors(self) -> int:
        """Actors of its pipeline."""
        return self.plan.num_ranks // self.plan.mesh.size


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

    base: Candidate
    pipeline: Pipeline


@dataclasses.dataclass(frozen=True)
class BestSchedule:
    """A candidate in the schedule that is simulated to be fastest."""

    base: Candidate


@dataclasses.dataclass(frozen=True)
class OtherStages:
    """The layout of a candidate on the same actors, cut into the stages of another pipeline, in the
    schedule that suits them best."""

    base: Candidate
    pipeline: Pipeline


@dataclasses.dataclass(frozen=True)
class BalancedShares:
    """A candidate with shares of the batch by the speeds of ranks, where that is faster."""

    base: Candidate


def describe_pipeline(pipeline: Pipeline | None) -> str:
    """Describe a pipeline by what is decided of it: `2 stages, 8 microbatches`."""
    if pipeline is None:
        return "no stages"
    stages, count = pipeline.order.num_stages, pipeline.order.num_microbatches
    again = ", recomputing" if pipeline.recompute else ""
    return f"{f'{stages} stages' if stages > 1 else 'no stages'}, {count} microbatches{again}"


Proposal = NewLayout | OtherMicrobatches | BestSchedule | OtherStages | BalancedShares
"""Candidate that an outer search proposes, before it is evaluated."""
