"""`PipelinePlan`: the stages of a plan.

The stage of each forward op is kept by scope (`plans.scopes`). So the table is short, people can
read it, and it holds for steps of other batch shapes, and for those of an optimizer, whose ops
differ in places.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from tfpar.cluster.description import Cluster
from tfpar.cost.pipeline_cost import PipelineCost
from tfpar.ir.graph import Op
from tfpar.ir.roles import Roles
from tfpar.ir.step import StepGraph
from tfpar.pipeline import Schedule
from tfpar.pipeline.colocation import infer_variable_stages
from tfpar.pipeline.pipeline import groups_of
from tfpar.pipeline.recompute import RecomputeOf, read_recompute
from tfpar.pipeline.stage_partition import partition_step
from tfpar.pipeline.step_stages import assignable
from tfpar.plans.scopes import renamed_scopes, stages_by_scope, table_of
from tfpar.plans.variables import PlannedVariable
from tfpar.propagation.partitioned_graph import OpPlan, PartitionedGraph
from tfpar.spec import Mesh, OtherModelError, PlanError, Spec
from tfpar.spec.arguments import integer, text


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """Layout of the step on the ranks of some actors.

    Attributes:
        mesh, batch_axes, variables, tensors, ops, shares: as of a `Plan`; variables of other stages
            have specs that nothing uses.
        partitioned: what propagation made of it, once known; not saved.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    variables: Mapping[str, PlannedVariable]
    tensors: Mapping[str, Spec]
    ops: Mapping[str, OpPlan] = dataclasses.field(default_factory=dict)
    shares: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    partitioned: PartitionedGraph | None = dataclasses.field(default=None, compare=False)


def meshes_text(meshes: Sequence[Mesh]) -> str:
    """Name the meshes of a pipeline's actors: `each data=2`, or `on data=1 and data=2`."""
    if len({*meshes}) == 1:
        return f"each {meshes[0]}"
    *first, last = map(str, meshes)
    return f"on {', '.join(first)} and {last}"


_Value = TypeVar("_Value")


def renamed_keys(table: Mapping[str, _Value], now: Mapping[str, str]) -> dict[str, _Value]:
    """Return a table by the new names of what it is by, which are given by the old ones."""
    return {now.get(name, name): value for name, value in table.items()}


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """The stages of a plan, and the order in which they run.

    Stage s runs on the ranks of actor `schedule.actors[s]`; see `groups`.

    Attributes:
        scopes: the stage of forward ops, by name scope or by the whole name of an op, in graph
            order; see `plans.scopes`. Without any, the step trains nothing, and runs in the stages
            of the variables that it reads; stages of which it reads none have nothing to do.
        recompute: the stages whose backward pass runs their forward pass again: True for all,
            False for none, or the numbers of some.
        owners: the stage of each variable of the step, by path; slots are with their weights.
        cost: what each stage takes, where that was priced; what a step does is `Plan.cost`.
        ranks: of the job, actor by actor: those of the first ascend, then come those of the second;
            empty: all in their order.
        layouts: of actors beside that of the plan, where they have others.
        layout_of: the number of the layout of each actor: 0 is that of the plan, those in `layouts`
            follow. Empty: all have that of the plan.
        memory_limits: bytes that a rank of each actor may store, where these were given.

    Raises:
        PlanError: a stage that the schedule does not have, or one of several without ops; ranks
            that cannot be shared out among its actors.
        ArgumentError: of another type.
    """

    schedule: Schedule
    scopes: Mapping[str, int]
    recompute: RecomputeOf = False
    owners: Mapping[str, int] = dataclasses.field(default_factory=dict)
    cost: PipelineCost | None = None
    ranks: tuple[int, ...] = ()
    layouts: tuple[StageLayout, ...] = ()
    layout_of: tuple[int, ...] = ()
    memory_limits: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._check_layouts()
        recompute = read_recompute("recompute", self.recompute, self.num_stages)
        object.__setattr__(self, "recompute", recompute)
        for what, table in (("scope", self.scopes), ("variable", self.owners)):
            for name, stage in table.items():
                text(f"The name of a {what}", name)
                if integer(f"The stage of {what} {name!r}", stage, 0) >= self.num_stages:
                    raise PlanError(
                        f"The plan puts {what} {name!r} into stage {stage}; its schedule has "
                        f"{self.num_stages} stages, numbered from 0."
                    )
        if self.memory_limits and len(self.memory_limits) != self.num_actors:
            raise PlanError(
                f"The plan limits the memory of {len(self.memory_limits)} sets of ranks, but its "
                f"schedule has {self.num_actors}."
            )
        if self.cost is not None and len(self.cost.stages) != self.num_stages:
            raise PlanError(
                f"The plan has prices of {len(self.cost.stages)} stages, but {self.num_stages} "
                f"stages."
            )
        empty = sorted({*range(self.num_stages)} - {*self.scopes.values()})
        if empty and self.scopes:
            raise PlanError(
                f"The plan puts no ops into stage {empty[0]}; its schedule has {self.num_stages} "
                f"stages."
            )

    def _check_layouts(self) -> None:
        numbers = {*self.layout_of} - {0}
        if len(self.layout_of) not in (0, self.num_actors) or numbers != {
            *range(1, len(self.layouts) + 1)
        }:
            raise PlanError(
                f"The plan gives its {self.num_actors} sets of ranks the layouts "
                f"{list(self.layout_of)}, and has {len(self.layouts)} beside its own."
            )

    def check_ranks(self, size: int) -> None:
        """Check that stages have ranks of a job, each once, where the plan's own mesh has so many.

        Raises:
            PlanError: they have not.
        """
        sizes = self.sizes(size)
        if self.ranks and (
            sorted(self.ranks) != list(range(len(self.ranks))) or sum(sizes) != len(self.ranks)
        ):
            raise PlanError(
                f"The plan places stages on the ranks {list(self.ranks)}: they are not those of a "
                f"job, each once, for sets of {' + '.join(map(str, sizes))}."
            )
        for group in self.groups(size):
            if list(group) != sorted(group):
                raise PlanError(f"The plan places a stage on the ranks {list(group)}: they ascend.")

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        forward_stages: Mapping[Op, int],
        recompute: RecomputeOf = False,
        owners: Mapping[str, int] | None = None,
    ) -> PipelinePlan:
        """Return the stages that forward ops are given, in the smallest table.

        Args:
            forward_stages: in the order of the graph.

        Raises:
            PlanError: as of `PipelinePlan`.
        """
        return cls(schedule, table_of(forward_stages), recompute, owners or {})

    @property
    def num_stages(self) -> int:
        """Number of stages, virtual ones counted."""
        return self.schedule.num_stages

    @property
    def num_actors(self) -> int:
        """Number of actors."""
        return self.schedule.num_actors

    def placed(self, cluster: Cluster) -> Cluster:
        """Return the machines of a job in the order in which actors have them."""
        return cluster.part(self.ranks) if self.ranks else cluster

    def sizes(self, size: int) -> tuple[int, ...]:
        """Return the number of ranks of each actor, where the mesh of the plan has `size`."""
        sizes = size, *(layout.mesh.size for layout in self.layouts)
        return tuple(sizes[number] for number in self.layout_of) or (size,) * self.num_actors

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each actor, where the mesh of the plan has `size`."""
        return groups_of(self.sizes(size), self.ranks)

    def forward_stages(self, ops: Iterable[Op]) -> dict[Op, int]:
        """Return the stages of `ops`, as far as anything is known of them.

        Args:
            ops: those that `pipeline.step_stages.assignable` lists, in the order of their graph.
                Scopes hold others too that are given no stage, such as reads of variables.
        """
        return stages_by_scope(self.scopes, ops)

    def cut(self, step: StepGraph, part: bool = False) -> dict[Op, int]:
        """Cut a simplified step into these stages, in place; gives the stage of every op of its
        graph, which is another one now.

        Args:
            part: the step is part of the planned one, such as an evaluation: its ops have other
                names, and go with what they read.

        Raises:
            PlanError: the table gives an op no stage, or a variable two.
        """
        graph = step.graph
        ops = assignable(graph, Roles.of(graph, step.gradient_tensors))
        if part or not self.scopes:
            return partition_step(step, infer_variable_stages(graph, ops, self.owners), self.owners)
        return partition_step(step, self.forward_stages(ops))

    def with_partitioned(self, partitioned: Sequence[PartitionedGraph]) -> PipelinePlan:
        """Return the same stages, knowing what propagation made of each of `layouts`, or of
        none."""
        layouts = tuple(
            dataclasses.replace(layout, partitioned=found)
            for layout, found in itertools.zip_longest(self.layouts, partitioned)
        )
        return dataclasses.replace(self, layouts=layouts)

    def renamed(self, now: Mapping[str, str]) -> PipelinePlan:
        """Return the same with new names for variables, given by their old ones."""
        layouts = tuple(
            dataclasses.replace(layout, variables=renamed_keys(layout.variables, now))
            for layout in self.layouts
        )
        return dataclasses.replace(self, owners=renamed_keys(self.owners, now), layouts=layouts)

    def fitted(self, ops: Sequence[Op]) -> PipelinePlan:
        """Return the same with the names that models have in a step.

        Args:
            ops: of it, as of `forward_stages`.

        Raises:
            OtherModelError: nothing is known of the stage of an op.
        """
        found = dataclasses.replace(self, scopes=renamed_scopes(self.scopes, ops))
        known = found.forward_stages(ops)
        missing = [repr(op.name) for op in ops if op not in known]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise OtherModelError(
                f"The plan is for another step: its stages say nothing of {missing[0]}{more}. "
                f"Build the model with the names that it had when the plan was made, or make a new "
                f"plan.",
                "other stages",
            )
        return found
