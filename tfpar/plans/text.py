"""Plans as JSON text: sorted, one line for each variable, tensor and op."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tfpar
from tfpar.cluster.files import cluster_of, describe
from tfpar.cost.evaluate import Cost
from tfpar.plans.variables import Alternative, PlannedVariable
from tfpar.propagation.partitioned import OpPlan
from tfpar.spec import Mesh, PlanError, TfparError, format_spec, parse_spec

if TYPE_CHECKING:
    from tfpar.plans.plan import Plan

FORMAT_VERSION = 2


def text_of(plan: Plan) -> str:
    """`plan` as JSON."""
    lines = [
        ("format", json.dumps("tfpar plan")),
        ("version", json.dumps(FORMAT_VERSION)),
        ("tfpar", json.dumps(plan.tfpar_version)),
        ("mesh", json.dumps([*zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)])),
        ("batch_axes", json.dumps(list(plan.batch_axes))),
        ("fingerprint", json.dumps(plan.fingerprint)),
        ("planner", json.dumps(plan.planner)),
        ("cluster", json.dumps(plan.cluster and describe(plan.cluster))),
        ("cluster_fingerprint", json.dumps(plan.cluster and plan.cluster.fingerprint())),
        ("cost", json.dumps(plan.cost and dataclasses.asdict(plan.cost))),
        ("chunks", json.dumps(plan.chunks)),
        ("cut_short", json.dumps(plan.cut_short)),
        ("layouts", _block("[]", map(json.dumps, plan.layouts))),
        ("constraints", _block("[]", map(json.dumps, plan.constraints))),
        ("recompute", json.dumps(list(plan.recompute))),
        ("variables", _block("{}", _pairs(plan.variables, _variable_json))),
        ("tensors", _block("{}", _pairs(plan.tensors, lambda s: json.dumps(format_spec(s))))),
        ("ops", _block("{}", _pairs(plan.ops, _op_json))),
    ]
    return "{\n" + ",\n".join(f'  "{key}": {value}' for key, value in lines) + "\n}\n"


def fields_of(text: str, source: str) -> dict[str, Any]:
    """The fields of the plan that `text_of` wrote; `source` names the text in errors.

    Raises:
        PlanError: corrupt, malformed, or written by a newer tfpar.
    """
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
        return dict(
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
