"""`PlannedStages`: what a plan says of the stages of a pipeline.

Which forward ops lie in which stage is kept by scope: where all ops under a scope are in one stage,
the scope stands for them. So the table is short, people can read it, and it holds for steps of
other batch shapes, whose ops differ in places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from tfpar.ir.graph import Op
from tfpar.pipeline import Schedule
from tfpar.spec import PlanError
from tfpar.spec.arguments import flag, integer, text


@dataclasses.dataclass(frozen=True)
class PlannedStages:
    """The stages of a plan, and the order in which they run.

    Stage s runs on the ranks of actor `schedule.actors[s]`; those of actor a are the contiguous
    block of `mesh.size` ranks that begins at rank `a * mesh.size` of the job.

    Attributes:
        scopes: the stage of forward ops, by name scope or by the whole name of an op, in graph
            order. Of an op the longest one decides that its name begins with.
        recompute: the backward pass of a stage runs its forward pass again.
        owners: the stage that each variable of the step lies in, by path; slots lie with their
            weights.

    Raises:
        PlanError: a stage that the schedule does not have, or one without ops.
        ArgumentError: of another type.
    """

    schedule: Schedule
    scopes: Mapping[str, int]
    recompute: bool = False
    owners: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        flag("recompute", self.recompute)
        for what, table in (("scope", self.scopes), ("variable", self.owners)):
            for name, stage in table.items():
                text(f"The name of a {what}", name)
                if integer(f"The stage of {what} {name!r}", stage, 0) >= self.num_stages:
                    raise PlanError(
                        f"The plan puts {what} {name!r} into stage {stage}; its schedule has "
                        f"{self.num_stages} stages, numbered from 0."
                    )
        empty = sorted({*range(self.num_stages)} - {*self.scopes.values()})
        if empty:
            raise PlanError(
                f"The plan puts no ops into stage {empty[0]}; its schedule has {self.num_stages} "
                f"stages."
            )

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        forward_stages: Mapping[Op, int],
        recompute: bool = False,
        owners: Mapping[str, int] | None = None,
    ) -> PlannedStages:
        """The stages that forward ops are given, in the smallest table.

        Raises:
            PlanError: as of `PlannedStages`.
        """
        by_name = {op.name: stage for op, stage in forward_stages.items()}
        return cls(schedule, _smallest_table(by_name), recompute, owners or {})

    @property
    def num_stages(self) -> int:
        """Number of stages, virtual ones counted."""
        return self.schedule.num_stages

    @property
    def num_actors(self) -> int:
        """Number of sets of ranks."""
        return self.schedule.num_actors

    def forward_stages(self, ops: Iterable[Op]) -> dict[Op, int]:
        """The stages of those `ops` that a scope names.

        A scope may hold ops that are given no stage, such as the reads of variables:
        `pipeline.step_stages.assignable` lists those that are.
        """
        stages = ((op, _longest(self.scopes, op.name)) for op in ops)
        return {op: stage for op, stage in stages if stage is not None}

    def renamed(self, now: Mapping[str, str]) -> PlannedStages:
        """The same with new names for variables, given by their old ones."""
        owners = {now.get(name, name): stage for name, stage in self.owners.items()}
        return dataclasses.replace(self, owners=owners)


def _longest(scopes: Mapping[str, int], name: str) -> int | None:
    while name:
        if name in scopes:
            return scopes[name]
        name = name.rpartition("/")[0]
    return None


@dataclasses.dataclass
class _Scope:
    """A part of a name: what lies under it, by the next part, and the stage of an op of that
    name."""

    below: dict[str, _Scope] = dataclasses.field(default_factory=dict)
    own: int | None = None
    stages: set[int] = dataclasses.field(default_factory=set)

    def table(self, name: str, inherited: int | None) -> Iterator[tuple[str, int]]:
        """The fewest entries for this scope and all below.

        A scope whose ops are in one stage takes one entry, or none where that of a longer name
        around it says the same. Where it takes one for the op of its name, what lies below
        inherits that.
        """
        if name and len(self.stages) == 1:
            (stage,) = self.stages
            if stage != inherited:
                yield name, stage
            return
        if self.own is not None:
            if self.own != inherited:
                yield name, self.own
            inherited = self.own
        for part, scope in self.below.items():
            yield from scope.table(f"{name}/{part}" if name else part, inherited)


def _smallest_table(stages: Mapping[str, int]) -> dict[str, int]:
    """A stage for scopes whose ops are all in it, and for ops, such that all names get theirs."""
    root = _Scope()
    for name, stage in stages.items():
        scope = root
        scope.stages.add(stage)
        for part in name.split("/"):
            scope = scope.below.setdefault(part, _Scope())
            scope.stages.add(stage)
        scope.own = stage
    return dict(root.table("", None))
