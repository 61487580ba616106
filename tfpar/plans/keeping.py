"""`keep`: constraints that hold on to what a plan does with some of a model."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

from tfpar.constraints import Constraint, shard_output
from tfpar.constraints.constraint_types import (
    PutInStage,
    SplitBatch,
    VariableConstraint,
    check_pattern,
)
from tfpar.constraints.patterns import compile_pattern, matches_nothing, without_call_counts
from tfpar.plans.plan import Plan
from tfpar.spec import Mesh, Placement, PlanError, Shard, Spec, SpecError, arguments


@dataclasses.dataclass(frozen=True)
class KeptVariable(VariableConstraint):
    """The spec that a plan gives the variable `pattern`, a path; see `keep`."""

    pattern: str
    axes: tuple[str, ...]
    spec: Spec
    exact: ClassVar[bool] = True
    paired: ClassVar[bool] = True

    @property
    def named_axes(self) -> tuple[str, ...]:
        return self.axes

    def placements(self, name: str, shape: Sequence[int], mesh: Mesh) -> dict[int, Placement]:
        if set(mesh.axis_names) != set(self.axes):
            raise SpecError(
                f"{self}: the plan that it is from has the mesh axes {', '.join(self.axes)}, but "
                f"the mesh is {mesh}. Give a mesh of the plan's axes, such as plan.whole_mesh."
            )
        return {mesh.axis(a): p for a, p in zip(self.axes, self.spec, strict=True)}

    def __str__(self) -> str:
        laid = ", ".join(f"{p} over {a!r}" for a, p in zip(self.axes, self.spec, strict=True))
        return f"keep({self.pattern!r}: {laid})"


@dataclasses.dataclass(frozen=True)
class KeptBatch(SplitBatch):
    """The axes that split the batch of a plan; `said` is the call of `keep`."""

    said: str

    def __str__(self) -> str:
        return f"{self.said}, with a batch over {' and '.join(self.axes) or 'no axis'}"


def keep(plan: Plan | str | os.PathLike[str], pattern: str) -> tuple[Constraint, ...]:
    """Hold on to what `plan` does with the variables and layers that match; the rest is searched.

        constraints = tap.keep("plan.json", "block_.*")
        plan = tap.plan(build, batch, old.whole_mesh, constraints=constraints)

    The weights keep the specs of the plan, those that it leaves to propagation are left to it, what
    it pinned of their activations stays so, and the batch is split over the same axes. If the plan
    has stages, layers with such weights stay in theirs, for a pipeline that has as many. Optimizer
    slots, weights that are stored in parts, and what is computed again or is in host memory, are
    found again. As a path that is written out, what is kept wins over other constraints whose
    patterns match.

    Args:
        plan: or the path of a plan file. The mesh that is then planned for has to have its axes
            (`plan.whole_mesh` has); sizes may differ.
        pattern: a regular expression for the path of a variable or of a layer around it, or for its
            end from some component on.

    Raises:
        ArgumentError: of another type.
        PlanError: the file cannot be read, or the plan fixes none of what matches.
        SpecError: the pattern is no regular expression, or matches nothing of the plan.
    """
    source = "plan"
    if not isinstance(plan, Plan):
        source = repr(arguments.path("plan", plan, "a Plan, or the path of a plan file"))
        plan = Plan.load(plan)
    said = f"keep({source}, {arguments.written(pattern)})"
    check_pattern(said, pattern)
    return (*_kept(plan, pattern, said), KeptBatch(plan.batch_axes, said))


def _kept(plan: Plan, pattern: str, said: str) -> list[Constraint]:
    names = [name for name in plan.variables if _matches(pattern, name)]
    tensors = [name for name in plan.tensors if _matches(pattern, name.rpartition(":")[0])]
    if not names and not tensors:
        raise SpecError(matches_nothing(said, pattern, list(plan.variables), "variable or layer"))
    found: list[Constraint] = []
    axes = plan.mesh.axis_names
    for name in names:
        variable = plan.variables[name]
        spec = variable.gathered or variable.spec
        if spec is not None:
            found.append(KeptVariable(name, axes, spec))
    for name in tensors:
        op = re.escape(_in_model(name.rpartition(":")[0]))
        for axis, placement in zip(axes, plan.tensors[name], strict=True):
            dim = placement.dim if isinstance(placement, Shard) else None
            found.append(shard_output(op, dim, axis))
    found += _in_stages(plan, names)
    if not found:
        raise PlanError(
            f"{said}: the plan leaves all that matches to propagation, {len(names)} variables such "
            f"as {names[0]!r}. Keep the weights beside them, from which that follows."
        )
    return found


def _matches(pattern: str, name: str) -> bool:
    """Whether `pattern` is that of a path, or of a layer or scope that it is in."""
    compiled, parts = compile_pattern(pattern), name.split("/")
    around = ("/".join(parts[: end + 1]) for end in range(len(parts)))
    return any(compiled.fullmatch(n) or compiled.fullmatch(without_call_counts(n)) for n in around)


def _in_model(name: str) -> str:
    """A path or scope without the model's own name, which counts the models of a process."""
    return name.partition("/")[2] or name


def _in_stages(plan: Plan, names: Sequence[str]) -> Iterator[Constraint]:
    """The layers of these variables, each in its stage."""
    if plan.stages is None:
        return
    owners = plan.stages.owners
    weights = [name for name in names if name in owners and plan.variables[name].trainable]
    whole = {name.partition("/")[0] for name, v in plan.variables.items() if v.trainable}
    named = [(name, _in_model(name) if len(whole) == 1 else name) for name in weights]
    layers = {path.rpartition("/")[0]: owners[name] for name, path in named if "/" in path}
    for layer, stage in layers.items():
        inside = (other for other in layers if other.startswith(f"{layer}/"))
        if all(layers[other] == stage for other in inside):  # else each is named by itself
            yield PutInStage(re.escape(layer), stage)
