"""Plan: what is fixed before a graph is partitioned, as a value that can be saved.

A plan names the mesh, the axes that split the batch, and the specs of variables and border
tensors; `anchors()` is what propagation reads of it. The file is small JSON, one line
per variable, and is checked against graph and mesh before it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tfpar
from tfpar.cluster.description import Cluster
from tfpar.cluster.files import cluster_of, describe
from tfpar.constraints import Constraint, batch_axes, resolve_outputs, resolve_variables
from tfpar.cost.evaluate import Cost
from tfpar.ir.fingerprint import fingerprint
from tfpar.ir.graph import Gradient, Graph
from tfpar.ir.planning_graph import planning_graph
from tfpar.propagation.engine import Anchors
from tfpar.propagation.partitioned import OpPlan
from tfpar.report.explain import explain
from tfpar.report.summary import summary
from tfpar.report.tables import format_seconds
from tfpar.spec import (
    Mesh,
    Partial,
    PlanError,
    Shard,
    Spec,
    SpecError,
    TfparError,
    format_spec,
    local_shape,
    parse_spec,
)

if TYPE_CHECKING:
    from tfpar.propagation.engine import PartitionedGraph

FORMAT_VERSION = 2


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A way to lay a variable, and the best step time found with it.

    Attributes:
        seconds: infinite where no such plan is valid.
        layout: the mesh and the batch axes it was priced on, where these are not the plan's.
    """

    spec: Spec
    seconds: float
    layout: str = ""

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Of the mesh that `layout` begins with; empty without one."""
        return tuple(re.findall(r"(\w+)=\d+", self.layout))


@dataclasses.dataclass(frozen=True)
class PlannedVariable:
    """A variable of the planned graph.

    Attributes:
        spec: None leaves it to propagation.
        why: what fixed the spec (constraints as text, a planner); empty where nothing did.
        alternatives: what else a planner has priced, the choice itself included.
    """

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    spec: Spec | None = None
    why: str = ""
    alternatives: tuple[Alternative, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """What is fixed of a partitioned program.

    Attributes:
        batch_axes: names of the mesh axes that split the batch.
        variables: by path; all variables of the graph.
        tensors: specs of border tensors, by tensor name.
        constraints: what the plan was made from, as text.
        fingerprint: of the graph; see `ir.fingerprint`.
        tfpar_version: the version that made it.
        layouts: (logical mesh and batch axes as text, seconds of the best plan on it) of what else
            the planner searched, best first.
        planner: the name of the planner that made it; empty for a plan from constraints alone.
        cluster: the machines it was made for, and `cost` what a step costs there; None where
            nothing was priced.
        recompute: the blocks that are computed again in the backward pass, by name; see
            `search.recompute`.
        chunks: how many pieces a rank computes its part of a training batch in.
        ops: how ops run that would not run so by themselves, by name.
        cut_short: the search ended because its time was over: there may be better plans.
        partitioned: what propagation made of it, once known; not saved.

    Raises:
        PlanError: a spec that does not fit the mesh or its variable.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    variables: Mapping[str, PlannedVariable]
    tensors: Mapping[str, Spec]
    constraints: tuple[str, ...]
    fingerprint: str
    tfpar_version: str = tfpar.__version__
    planner: str = ""
    cluster: Cluster | None = None
    cost: Cost | None = None
    layouts: tuple[tuple[str, float], ...] = ()
    recompute: tuple[str, ...] = ()
    chunks: int = 1
    ops: Mapping[str, OpPlan] = dataclasses.field(default_factory=dict)
    cut_short: bool = False
    partitioned: PartitionedGraph | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        for axis in self.batch_axes:
            if axis not in self.mesh.axis_names:
                raise PlanError(
                    f"The plan splits the batch over {axis!r}; its mesh is {self.mesh}."
                )
        if self.chunks < 1:
            raise PlanError(f"A plan computes the batch in 1 chunk or more, not in {self.chunks}.")
        for name, variable in self.variables.items():
            if variable.spec is not None:
                _check_spec(f"variable {name!r}", variable.spec, variable.shape, self.mesh)
        for name, spec in self.tensors.items():
            _check_spec(f"tensor {name!r}", spec, None, self.mesh)
        for name, op in self.ops.items():
            for spec in (*op.in_specs, *op.made, *op.kept):
                _check_spec(f"an operand of {name!r}", spec, None, self.mesh)

    def __repr__(self) -> str:
        fixed = sum(v.spec is not None for v in self.variables.values())
        return f"<Plan on {self.mesh}: {fixed} of {len(self.variables)} variables fixed>"

    # --- use ---------------------------------------------------------------------

    def anchors(self) -> Anchors:
        """What propagation needs; how graph inputs are fed is the caller's."""
        fixed = {n: v.spec for n, v in self.variables.items() if v.spec is not None}
        return Anchors(variables=fixed, tensors=dict(self.tensors), ops=self.ops)

    def check(
        self, graph: Graph, mesh: Mesh | None = None, *, gradients: Sequence[Gradient] = (),
        part: bool = False,
    ) -> None:  # fmt: skip
        """Check that the plan is one for `graph` (and `mesh`).

        Args:
            gradients: of the step (`CapturedStep.gradients`): what follows them may differ.
            part: `graph` is an evaluation or prediction of the planned training step: it has
                fewer variables and other ops.

        Raises:
            PlanError: says what differs.
        """
        if mesh is not None and mesh != self.mesh:
            raise PlanError(
                f"The plan is for the mesh {self.mesh}, not for {mesh}. Use that mesh, or make "
                f"a plan for this one."
            )
        found = {v.name: v for v in graph.variables}
        missing = sorted(set(self.variables) - set(found))
        extra = sorted(set(found) - set(self.variables))
        # Names of other state (seeds, metrics) may be counted up in one process.
        told = [n for n in missing if self.variables[n].trainable or self.variables[n].spec]
        differences = [
            *_difference("missing", [] if part else told),
            *_difference("unknown to the plan", [n for n in extra if found[n].trainable]),
            *_difference(
                "of another shape",
                [
                    f"{n!r} is {tuple(found[n].shape)}, planned as {v.shape}"
                    for n, v in self.variables.items()
                    if n in found and tuple(found[n].shape) != v.shape
                ],
                quote=False,
            ),
        ]
        if differences:
            raise PlanError(
                f"The plan is for another model: {'; '.join(differences)}. Build and compile the "
                f"model as when the plan was saved, or make a new plan."
            )
        searched = planning_graph(graph, gradients).graph
        if not part and fingerprint(searched) != self.fingerprint:
            state = _difference("missing", missing)
            raise PlanError(
                f"The plan is for another step: the weights are the same, but not the ops (the "
                f"graph's fingerprint differs{''.join(f'; {d}' for d in state)}). Was the loss, a "
                f"metric, an activation or the type of inputs or labels changed, or TensorFlow or "
                f"Keras updated? Make a new plan."
            )

    def check_ranks(self, mesh: Mesh, cluster: Cluster | None = None) -> None:
        """Check that the plan is one for as many ranks as `mesh` has, and for `cluster`.

        Raises:
            PlanError: says what differs.
        """
        if mesh.size != self.mesh.size:
            raise PlanError(
                f"The plan is for {self.mesh.size} ranks ({self.mesh}), not for the {mesh.size} of "
                f"{mesh}. Use a mesh of that size, or make a plan for this one."
            )
        planned = self.cluster
        # A limit of memory has chosen the plan, and does not make its prices wrong.
        prints = [c.with_memory(1.0).fingerprint() for c in (cluster, planned) if c]
        if cluster and planned and len(set(prints)) > 1:
            raise PlanError(
                f"The plan was made for cluster {planned.name!r}, which is not {cluster.name!r} as "
                f"described now. Leave out cluster= to use it all the same, or make a new plan."
            )

    def splits_anything(self) -> bool:
        """Whether the batch or some variable is split over several ranks."""
        split = {n for n in self.batch_axes if self.mesh.shape[self.mesh.axis(n)] > 1}
        return bool(split) or any(
            isinstance(p, Shard) for v in self.variables.values() for p in v.spec or ()
        )

    def with_partitioned(self, partitioned: PartitionedGraph) -> Plan:
        """The same plan, knowing what propagation made of it."""
        return dataclasses.replace(self, partitioned=partitioned)

    # --- reading -----------------------------------------------------------------

    def summary(self, partitioned: PartitionedGraph | None = None) -> str:
        """Tables of placements, bytes, collectives and fallbacks, as text to print."""
        return summary(self, partitioned or self.partitioned)

    def explain(self, name: str, partitioned: PartitionedGraph | None = None) -> str:
        """Where variable `name` lies and why, who reads it, and what that moves.

        Args:
            name: the variable's path, or an end of it that is its alone.

        Raises:
            PlanError: no such variable, or several.
        """
        return explain(self, name, partitioned or self.partitioned)

    def diff(self, other: Plan) -> list[str]:
        """What differs in `other`, one readable line each; empty for equal plans."""
        lines = []
        if self.mesh != other.mesh:
            lines.append(f"mesh: {self.mesh} -> {other.mesh}")
        if self.batch_axes != other.batch_axes:
            lines.append(f"batch axes: {_axes(self.batch_axes)} -> {_axes(other.batch_axes)}")
        for name in sorted({*self.variables, *other.variables}):
            mine, theirs = self.variables.get(name), other.variables.get(name)
            if mine is None or theirs is None:
                only = mine or theirs
                if only is None or (not only.trainable and only.spec is None):
                    continue  # slots and counters: a plan may be made without them
                lines.append(f"{name}: only in the {'other' if mine is None else 'first'} plan")
                continue
            if mine.shape != theirs.shape:
                lines.append(f"{name}: shape {mine.shape} -> {theirs.shape}")
            if mine.spec != theirs.spec:
                lines.append(f"{name}: {_spec(mine.spec)} -> {_spec(theirs.spec)}")
        for name in sorted({*self.tensors, *other.tensors}):
            before, after = self.tensors.get(name), other.tensors.get(name)
            if before != after:
                lines.append(f"{name}: {_spec(before)} -> {_spec(after)}")
        changed = [n for n in {**self.ops, **other.ops} if self.ops.get(n) != other.ops.get(n)]
        if changed:
            lines.append(f"ops that run otherwise: {_some(changed)}")
        lines += [
            f"constraint dropped: {c}" for c in self.constraints if c not in other.constraints
        ]
        lines += [f"constraint added: {c}" for c in other.constraints if c not in self.constraints]
        lines += [
            f"no longer computed again: {n}" for n in self.recompute if n not in other.recompute
        ]
        lines += [f"computed again: {n}" for n in other.recompute if n not in self.recompute]
        if self.chunks != other.chunks:
            lines.append(f"chunks: {self.chunks} -> {other.chunks}")
        if self.planner != other.planner:
            lines.append(f"planner: {self.planner or 'none'} -> {other.planner or 'none'}")
        machines = [p.cluster and p.cluster.fingerprint() for p in (self, other)]
        if machines[0] != machines[1]:
            names = (p.cluster.name if p.cluster else "none" for p in (self, other))
            lines.append(f"cluster: {' -> '.join(names)}")
        if self.cost and other.cost and self.cost != other.cost:
            times = (format_seconds(p.seconds) for p in (self.cost, other.cost))
            lines.append(f"predicted step: {' -> '.join(times)}")
        if self.fingerprint != other.fingerprint:
            lines.append(f"graph: {self.fingerprint} -> {other.fingerprint}")
        return lines

    # --- files -------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; the file appears whole or not at all.

        Raises:
            PlanError: the file cannot be written.
        """
        path = os.fspath(path)
        partial = f"{path}.{os.getpid()}.partial"
        try:
            with open(partial, "w", encoding="utf-8") as file:
                file.write(self.to_json())
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.remove(partial)
            raise PlanError(f"Cannot write the plan file {path!r}: {error.strerror}.") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: missing, unreadable, corrupt, or written by a newer tfpar.
        """
        path = os.fspath(path)
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            raise PlanError(
                f"There is no plan file {path!r}. Plans are written by plan.save(path)."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"Cannot read the plan file {path!r}: {error}.") from error
        return cls.from_json(text, path)

    def to_json(self) -> str:
        """The plan as JSON text: sorted, one line per variable and tensor."""
        lines = [
            ("format", json.dumps("tfpar plan")),
            ("version", json.dumps(FORMAT_VERSION)),
            ("tfpar", json.dumps(self.tfpar_version)),
            ("mesh", json.dumps([*zip(self.mesh.axis_names, self.mesh.shape, strict=True)])),
            ("batch_axes", json.dumps(list(self.batch_axes))),
            ("fingerprint", json.dumps(self.fingerprint)),
            ("planner", json.dumps(self.planner)),
            ("cluster", json.dumps(self.cluster and describe(self.cluster))),
            ("cluster_fingerprint", json.dumps(self.cluster and self.cluster.fingerprint())),
            ("cost", json.dumps(self.cost and dataclasses.asdict(self.cost))),
            ("chunks", json.dumps(self.chunks)),
            ("cut_short", json.dumps(self.cut_short)),
            ("layouts", _block("[]", map(json.dumps, self.layouts))),
            ("constraints", _block("[]", map(json.dumps, self.constraints))),
            ("recompute", json.dumps(list(self.recompute))),
            ("variables", _block("{}", _pairs(self.variables, _variable_json))),
            ("tensors", _block("{}", _pairs(self.tensors, lambda s: json.dumps(format_spec(s))))),
            ("ops", _block("{}", _pairs(self.ops, _op_json))),
        ]
        return "{\n" + ",\n".join(f'  "{key}": {value}' for key, value in lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, source: str = "text") -> Plan:
        """Inverse of `to_json`; `source` names the text in errors."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"The plan file {source!r} is corrupt: {error.msg} (line {error.lineno}, column "
                f"{error.colno}). Save the plan again."
            ) from None
        if not isinstance(data, dict) or data.get("format") != "tfpar plan":
            raise PlanError(f"{source!r} is not a plan file of tfpar.")
        version = data.get("version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise PlanError(
                f"The plan file {source!r} was written by a newer tfpar ({data.get('tfpar')}, "
                f"format {version}; this is {tfpar.__version__}, format {FORMAT_VERSION}). Upgrade "
                f"tfpar, or make a new plan."
            )
        if version != FORMAT_VERSION:
            raise PlanError(f"The plan file {source!r} has no known format version: {version!r}.")
        try:
            return cls(
                mesh=Mesh(*map(tuple, zip(*data["mesh"], strict=True))),
                batch_axes=tuple(data["batch_axes"]),
                variables={n: _read_variable(v) for n, v in data["variables"].items()},
                tensors={n: parse_spec(s) for n, s in data["tensors"].items()},
                constraints=tuple(map(str, data["constraints"])),
                fingerprint=str(data["fingerprint"]),
                tfpar_version=str(data["tfpar"]),
                planner=str(data["planner"]),
                cluster=data["cluster"] and cluster_of(data["cluster"], "the plan's cluster"),
                layouts=tuple((str(name), float(s)) for name, s in data["layouts"]),
                cost=data["cost"] and Cost.of(data["cost"]),
                recompute=tuple(map(str, data.get("recompute", ()))),  # older files have none
                chunks=int(data.get("chunks", 1)),
                cut_short=bool(data.get("cut_short", False)),
                ops={n: _read_op(o) for n, o in data.get("ops", {}).items()},
            )
        except KeyError as error:
            raise PlanError(f"The plan file {source!r} lacks the field {error}.") from None
        except (AttributeError, TypeError, ValueError, TfparError) as error:
            raise PlanError(f"The plan file {source!r} is malformed: {error}") from error


def plan_from_constraints(
    graph: Graph, mesh: Mesh, constraints: Sequence[Constraint] = (), *,
    gradients: Sequence[Gradient] = (), part: bool = False,
) -> Plan:  # fmt: skip
    """The plan that `constraints` make for `graph`; without any, data parallelism.

    Args:
        gradients: of the step, if known; see `Plan.check`.
        part: `graph` is only part of what the constraints speak of (an evaluation has no
            optimizer): they may match nothing in it.

    Raises:
        SpecError: a constraint that matches nothing or cannot hold, or two that contradict.
    """
    shapes = [(v.name, v.shape) for v in graph.variables]
    resolved = resolve_variables(constraints, shapes, mesh, must_match=not part)
    outputs = resolve_outputs(constraints, graph, mesh, must_match=not part)
    variables = {}
    for variable in graph.variables:
        planned = PlannedVariable(tuple(variable.shape), variable.dtype, variable.trainable)
        if variable.name in resolved:
            found = resolved[variable.name]
            planned = dataclasses.replace(planned, spec=found.spec, why=found.reason)
        variables[variable.name] = planned
    return Plan(
        mesh=mesh,
        batch_axes=batch_axes(constraints, mesh),
        variables=variables,
        tensors={n: r.spec for n, r in outputs.items()},
        constraints=tuple(map(str, constraints)),
        fingerprint=fingerprint(planning_graph(graph, gradients).graph),
    )


# --- checks and text -------------------------------------------------------------


def _check_spec(what: str, spec: Spec, shape: tuple[int, ...] | None, mesh: Mesh) -> None:
    if len(spec) != mesh.num_axes:
        raise PlanError(
            f"The plan lays {what} as {format_spec(spec)}; the mesh {mesh} needs "
            f"{mesh.num_axes} placements."
        )
    if shape is None:
        return
    if any(isinstance(p, Partial) for p in spec):
        raise PlanError(
            f"The plan lays {what} as {format_spec(spec)}: a variable is never Partial."
        )
    if any(isinstance(p, Shard) and p.dim >= len(shape) for p in spec):
        raise PlanError(f"The plan lays {what} as {format_spec(spec)}, but its shape is {shape}.")
    try:
        local_shape(shape, spec, mesh)
    except SpecError as error:
        raise PlanError(f"The plan lays {what} of shape {shape} on {mesh}: {error}") from None


def _variable_json(variable: PlannedVariable) -> str:
    return json.dumps(
        {
            "shape": list(variable.shape),
            "dtype": variable.dtype,
            "trainable": variable.trainable,
            "spec": None if variable.spec is None else format_spec(variable.spec),
            "why": variable.why,
            "alternatives": [
                [format_spec(a.spec), a.seconds if math.isfinite(a.seconds) else None, a.layout]
                for a in variable.alternatives
            ],
        }
    )


def _op_json(op: OpPlan) -> str:
    made, kept = ([format_spec(s) for s in specs] for specs in (op.made, op.kept))
    fields = {"in": [format_spec(s) for s in op.in_specs], "out": made}
    return json.dumps(fields if kept == made else {**fields, "kept": kept})


def _read_op(data: Mapping[str, Any]) -> OpPlan:
    read, made = (tuple(map(parse_spec, data[key])) for key in ("in", "out"))
    return OpPlan(read, made, tuple(map(parse_spec, data.get("kept", data["out"]))))


def _read_variable(data: Mapping[str, Any]) -> PlannedVariable:
    spec = data["spec"]
    return PlannedVariable(
        tuple(map(int, data["shape"])), str(data["dtype"]), bool(data["trainable"]),
        None if spec is None else parse_spec(spec), str(data["why"]),
        tuple(
            Alternative(parse_spec(spec), math.inf if seconds is None else seconds, layout)
            for spec, seconds, layout in data["alternatives"]
        ),
    )  # fmt: skip


def _pairs(values: Mapping[str, Any], to_json: Any) -> list[str]:
    return [f"{json.dumps(name)}: {to_json(values[name])}" for name in sorted(values)]


def _block(brackets: str, items: Any) -> str:
    lines = ",\n".join(f"    {item}" for item in items)
    return f"{brackets[0]}\n{lines}\n  {brackets[1]}" if lines else brackets


def _difference(what: str, items: Sequence[str], quote: bool = True) -> list[str]:
    return [f"variables {what}: {_some(items, quote=quote)}"] if items else []


def _some(items: Sequence[str], limit: int = 4, quote: bool = True) -> str:
    shown = ", ".join(repr(i) if quote else i for i in items[:limit])
    return shown + (f" and {len(items) - limit} more" if len(items) > limit else "")


def _spec(spec: Spec | None) -> str:
    return "open" if spec is None else format_spec(spec)


def _axes(axes: Sequence[str]) -> str:
    return ", ".join(axes) or "none"
