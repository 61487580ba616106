"""Plans as JSON text: sorted, one line for each variable, tensor and op."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import tfpar
from tfpar.cluster.files import cluster_of, describe
from tfpar.cost.cost import Cost
from tfpar.cost.staged import StagedCost
from tfpar.pipeline import Schedule
from tfpar.pipeline.statistics import BATCH_STATISTICS
from tfpar.plans.offload import Offloaded
from tfpar.plans.priced import PricedPlan
from tfpar.plans.rivals import Rival
from tfpar.plans.stages import PlannedStages
from tfpar.plans.trials import Trial
from tfpar.plans.variables import Alternative, PlannedVariable
from tfpar.propagation.partitioned import OpPlan
from tfpar.readable import UnreadableError, parse_json
from tfpar.spec import Mesh, PlanError, Spec, TfparError, format_spec, parse_spec
from tfpar.spec.arguments import finite, flag, integer, listed, one_of, optional, refused

if TYPE_CHECKING:
    from tfpar.plans.plan import Plan

T = TypeVar("T")

FORMAT_VERSION = 2

_OFFLOADED = [field.name for field in dataclasses.fields(Offloaded)]


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
        ("shares", json.dumps({name: list(found) for name, found in plan.shares.items()})),
        ("chunks", json.dumps(plan.chunks)),
        ("microbatches", json.dumps(plan.microbatches)),
        ("batch_statistics", json.dumps(plan.batch_statistics)),
        ("stages", _stages_json(plan.stages)),
        ("cut_short", json.dumps(plan.cut_short)),
        ("passed_over", json.dumps(plan.passed_over)),
        ("rivals", _block("[]", map(_rival_json, plan.rivals))),
        ("trials", _block("[]", (json.dumps(dataclasses.asdict(one)) for one in plan.trials))),
        ("layouts", _block("[]", map(json.dumps, plan.layouts))),
        ("baselines", _block("[]", map(json.dumps, plan.baselines))),
        ("constraints", _block("[]", map(json.dumps, plan.constraints))),
        ("recompute", json.dumps(list(plan.recompute))),
        ("offloaded", json.dumps(dataclasses.asdict(plan.offloaded))),
        ("variables", _block("{}", _pairs(plan.variables, _variable_json))),
        ("tensors", _block("{}", _pairs(plan.tensors, lambda s: json.dumps(format_spec(s))))),
        ("ops", _block("{}", _pairs(plan.ops, _op_json))),
        *([] if plan.report is None else [("report", _report_json(plan.report))]),
    ]
    return "{\n" + ",\n".join(f'  "{key}": {value}' for key, value in lines) + "\n}\n"


def fields_of(text: str, source: str) -> dict[str, Any]:
    """The fields of the plan that `text_of` wrote; `source` names the text in errors.

    Raises:
        PlanError: corrupt, malformed, or written by a newer tfpar.
    """
    try:
        data = parse_json(text)
    except UnreadableError as error:
        raise PlanError(
            f"The plan file {source!r} is corrupt: {error}. Save the plan again."
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
        cluster = data["cluster"]
        return dict(
            mesh=_mesh("mesh", data["mesh"]),
            batch_axes=_texts("batch_axes", data["batch_axes"]),
            variables=_each(_read_variable, "variables", data["variables"]),
            tensors=_each(_spec, "tensors", data["tensors"]),
            constraints=_texts("constraints", data["constraints"]),
            fingerprint=_text("fingerprint", data["fingerprint"]),
            tfpar_version=_text("tfpar", data["tfpar"]),
            planner=_text("planner", data["planner"]),
            cluster=None if cluster is None else cluster_of(cluster, "the plan's cluster"),
            layouts=_priced_plans("layouts", data["layouts"]),
            baselines=_priced_plans("baselines", data.get("baselines", ())),  # older files
            cost=optional(_cost, "cost", data["cost"]),
            recompute=_texts("recompute", data.get("recompute", ())),  # older files have none
            offloaded=_read_offloaded("offloaded", data.get("offloaded", {})),  # older files
            shares=_each(_shape, "shares", data.get("shares", {})),
            chunks=integer("chunks", data.get("chunks", 1)),
            microbatches=integer("microbatches", data.get("microbatches", 1)),
            batch_statistics=one_of(
                "batch_statistics", data.get("batch_statistics", "exact"), BATCH_STATISTICS
            ),
            stages=optional(_read_stages, "stages", data.get("stages")),
            cut_short=flag("cut_short", data.get("cut_short", False)),
            passed_over=optional(_passed_over, "passed_over", data.get("passed_over")),
            rivals=tuple(_rival("rivals", one) for one in _list("rivals", data.get("rivals", ()))),
            trials=tuple(_trial("trials", one) for one in _list("trials", data.get("trials", ()))),
            ops=_each(_read_op, "ops", data.get("ops", {})),
            report=optional(_table, "report", data.get("report")),
        )
    except KeyError as error:
        raise PlanError(f"The plan file {source!r} lacks the field {error}.") from None
    except (TypeError, ValueError, TfparError) as error:
        raise PlanError(f"The plan file {source!r} is malformed: {error}") from error


def _report_json(report: Mapping[str, Any]) -> str:
    """A line for each field, and for each entry of a list."""

    def field(value: Any) -> str:
        if isinstance(value, list | tuple) and value:
            return _block("[]", map(json.dumps, value), 6)
        return json.dumps(value)

    return _block("{}", (f"{json.dumps(name)}: {field(value)}" for name, value in report.items()))


def _variable_json(variable: PlannedVariable) -> str:
    apart = {} if variable.slots is None else {"slots": format_spec(variable.slots)}
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
            **apart,
        }
    )


def _stages_json(stages: PlannedStages | None) -> str:
    """A line for each actor, scope and variable; scopes stay in graph order."""
    if stages is None:
        return json.dumps(None)
    fields = {
        "schedule": _block("[]", map(json.dumps, str(stages.schedule).splitlines()), 6),
        "recompute": json.dumps(stages.recompute),
        "scopes": _block("{}", (f"{json.dumps(n)}: {s}" for n, s in stages.scopes.items()), 6),
        "owners": _block("{}", _pairs(stages.owners, json.dumps), 6),
        "cost": json.dumps(stages.cost and dataclasses.asdict(stages.cost)),
        "ranks": json.dumps(list(stages.ranks)),
    }
    return _block("{}", (f"{json.dumps(key)}: {value}" for key, value in fields.items()))


def _rival_json(rival: Rival) -> str:
    cost = rival.cost and dataclasses.asdict(rival.cost)
    fields = {"name": rival.name, "cost": cost, "reason": rival.reason, "links": rival.links}
    return json.dumps(fields)


def _op_json(op: OpPlan) -> str:
    made, kept = ([format_spec(s) for s in specs] for specs in (op.made, op.kept))
    fields = {"in": [format_spec(s) for s in op.in_specs], "out": made}
    return json.dumps(fields if kept == made else {**fields, "kept": kept})


# --- reading: each takes the name of a field, for messages, and what JSON has there ------


def _read_op(name: str, value: Any) -> OpPlan:
    data = _table(name, value)
    read, made = (_specs(f"{name}.{key}", data[key]) for key in ("in", "out"))
    return OpPlan(read, made, _specs(f"{name}.kept", data.get("kept", data["out"])))


def _read_offloaded(name: str, value: Any) -> Offloaded:
    data = _table(name, value)
    return Offloaded(*(_texts(f"{name}.{key}", data.get(key, ())) for key in _OFFLOADED))


def _read_stages(name: str, value: Any) -> PlannedStages:
    data = _table(name, value)
    return PlannedStages(
        Schedule.parse("\n".join(_texts(f"{name}.schedule", data["schedule"]))),
        _each(integer, f"{name}.scopes", data["scopes"]),
        flag(f"{name}.recompute", data["recompute"]),
        _each(integer, f"{name}.owners", data["owners"]),
        optional(_staged_cost, f"{name}.cost", data.get("cost")),
        _ranks(f"{name}.ranks", data.get("ranks", ())),
    )


def _ranks(name: str, value: Any) -> tuple[int, ...]:
    return tuple(integer(name, rank, 0) for rank in _list(name, value))


def _staged_cost(name: str, value: Any) -> StagedCost:
    return StagedCost.of(_table(name, value))


def _read_variable(name: str, value: Any) -> PlannedVariable:
    data = _table(name, value)
    found = _list(f"{name}.alternatives", data["alternatives"])
    return PlannedVariable(
        _shape(f"{name}.shape", data["shape"]),
        _text(f"{name}.dtype", data["dtype"]),
        flag(f"{name}.trainable", data["trainable"]),
        optional(_spec, f"{name}.spec", data["spec"]),
        _text(f"{name}.why", data["why"]),
        tuple(_alternative(f"{name}.alternatives[{i}]", one) for i, one in enumerate(found)),
        optional(_spec, f"{name}.slots", data.get("slots")),  # older files have none
    )


def _alternative(name: str, value: Any) -> Alternative:
    spec, seconds, layout = _list(name, value, 3)
    found = math.inf if seconds is None else finite(f"{name}, seconds,", seconds)
    return Alternative(_spec(name, spec), found, _text(f"{name}, layout,", layout))


def _priced_plans(name: str, value: Any) -> tuple[PricedPlan, ...]:
    return tuple(_priced_plan(name, one) for one in _list(name, value))


def _priced_plan(name: str, value: Any) -> PricedPlan:
    fields = _list(name, value)
    found, seconds, memory = _list(name, [*fields, None][:3], 3)  # older files have no bytes
    stored = optional(finite, f"{name}, bytes,", memory)
    return PricedPlan(_text(name, found), finite(name, seconds), stored)


def _passed_over(name: str, value: Any) -> tuple[float, int]:
    seconds, collectives = _list(name, value, 2)
    return finite(name, seconds, above=0.0), integer(name, collectives, 0)


def _rival(name: str, value: Any) -> Rival:
    data = _table(name, value)
    return Rival(
        _text(f"{name}.name", data["name"]),
        optional(_cost, f"{name}.cost", data["cost"]),
        _text(f"{name}.reason", data["reason"]),
        optional(_factor, f"{name}.links", data.get("links")),
    )


def _factor(name: str, value: Any) -> float:
    return finite(name, value, above=0.0)


def _trial(name: str, value: Any) -> Trial:
    data = _table(name, value)
    predicted, measured = (
        optional(finite, f"{name}.{key}", data[key]) for key in ("predicted_s", "measured_s")
    )
    return Trial(
        _text(f"{name}.name", data["name"]),
        predicted,
        measured,
        _text(f"{name}.reason", data["reason"]),
    )


def _cost(name: str, value: Any) -> Cost:
    return Cost.of(_table(name, value))


def _mesh(name: str, value: Any) -> Mesh:
    axes = [_list(name, axis, 2) for axis in _list(name, value)]
    return Mesh(tuple(axis for axis, _ in axes), tuple(size for _, size in axes))


def _shape(name: str, value: Any) -> tuple[int, ...]:
    shape = tuple(integer(name, size, 0) for size in _list(name, value))
    if math.prod(shape) >= 2**60:
        raise refused(name, value, "the shape of something that can be stored")
    return shape


def _specs(name: str, value: Any) -> tuple[Spec, ...]:
    return tuple(_spec(name, one) for one in _list(name, value))


def _spec(name: str, value: Any) -> Spec:
    return parse_spec(_text(name, value))


def _texts(name: str, value: Any) -> tuple[str, ...]:
    return tuple(_text(name, one) for one in _list(name, value))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refused(name, value, "a string")
    return value


def _list(name: str, value: Any, length: int | None = None) -> tuple[Any, ...]:
    expected = "a list" + (f" of {length}" if length else "")
    found = listed(name, value, expected)
    if length not in (None, len(found)):
        raise refused(name, value, expected)
    return found


def _table(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise refused(name, value, "an object with fields")
    return value


def _each(read: Callable[[str, Any], T], name: str, value: Any) -> dict[str, T]:
    return {key: read(f"{name}[{key!r}]", one) for key, one in _table(name, value).items()}


# --- writing ---------------------------------------------------------------------------


def _pairs(values: Mapping[str, Any], to_json: Any) -> list[str]:
    return [f"{json.dumps(name)}: {to_json(values[name])}" for name in sorted(values)]


def _block(brackets: str, items: Any, indent: int = 4) -> str:
    lines = ",\n".join(f"{' ' * indent}{item}" for item in items)
    return f"{brackets[0]}\n{lines}\n{' ' * (indent - 2)}{brackets[1]}" if lines else brackets
