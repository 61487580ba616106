"""What a plan does with the whole step, as text."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfpar.ir.graph import Op, Shape, itemsize
from tfpar.report.layers import collective_times, layer_reports
from tfpar.report.pipeline import (
    batch_text,
    memory_limit,
    mesh_text,
    stage_table,
    statistics_text,
)
from tfpar.report.rivals import rivals_table
from tfpar.report.stages import idle_ranks, schedules_table, stages_table
from tfpar.report.tables import render_table
from tfpar.report.trials import trials_table
from tfpar.report.variables import local_text, placement_text, variable_bytes, variable_specs
from tfpar.spec import (
    Mesh,
    Shard,
    Spec,
    dim_is_even,
    local_shape,
)
from tfpar.spec.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from tfpar.plans import Plan
    from tfpar.propagation.partitioned import PartitionedGraph


def summary(plan: Plan, partitioned: PartitionedGraph | None = None) -> str:
    """The plan as tables: placements and bytes; with `partitioned` also what one step moves."""
    ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
    stages = plan.stages
    parts = [
        f"Plan on {'mesh ' if stages is None else ''}{mesh_text(plan)} ({ranks}), "
        + batch_text(plan)
        + (f", {plan.chunks} chunks of it one behind the other" if plan.chunks > 1 else "")
        + (f", in {plan.microbatches} microbatches" if plan.microbatches > 1 else "")
        + (f", {statistics_text(plan)}" if plan.takes_own_statistics else ""),
        *_prediction(plan),
        *_rivals(plan),
        *([trials_table(plan.trials)] if plan.trials else []),
        *_recomputed(plan),
        *_offloaded(plan),
        *_split_slots(plan),
        *_stages(plan, partitioned),
        *_layers(plan, partitioned),
        _variable_table(plan, partitioned),
        _totals(plan, partitioned),
    ]
    if plan.tensors:
        rows = [[n, placement_text(s, plan.mesh)] for n, s in sorted(plan.tensors.items())]
        parts.append(
            render_table("Activations fixed by constraints", ("Tensor", "Placement"), rows)
        )
    if partitioned is not None:
        parts += [
            *_inputs(partitioned),
            *_planned_ops(plan, partitioned),
            _padding(plan, partitioned),
            _collectives(plan, partitioned),
            _fallbacks(partitioned),
        ]
        if partitioned.replicated_regions:
            parts.append(_held(partitioned))
    return "\n".join(parts)


# --- cost -----------------------------------------------------------------------


def simpler_than(plan: Plan) -> list[str]:
    """What the plan was preferred to, though that was predicted to be faster."""
    if plan.passed_over is None or plan.cost is None:
        return []
    seconds, collectives = plan.passed_over
    return [
        f"Taken because it is simpler: within {100 * (plan.cost.seconds / seconds - 1):.1f} % of "
        f"the fastest plan found ({format_seconds(seconds)}), which is nearer than predictions can "
        f"tell plans apart, with {count_text(plan.cost.collectives)} a step in place of "
        f"{collectives}."
    ]


def count_text(collectives: int) -> str:
    """`1 collective`, `12 collectives`."""
    return f"{collectives} collective{'s' if collectives != 1 else ''}"


def _prediction(plan: Plan) -> list[str]:
    """What the plan was found to cost."""
    if plan.cost is None or plan.cluster is None:
        return []
    cost, machines = plan.cost, plan.cluster
    forward, backward, update = (
        format_seconds(c + w) for c, w in zip(cost.compute_s, cost.communication_s, strict=True)
    )
    found = (
        f"Found by the {plan.planner} planner" if plan.planner else "Given by constraints, priced"
    )
    text = (
        f"{found} for cluster {machines.name!r} ("
        f"{machines.shape_text()}). Predicted: {format_seconds(cost.seconds)} a step "
        f"(forward {forward}, backward {backward}, update {update}; of these "
        f"{format_seconds(sum(cost.communication_s))} collectives"
        + (f", {format_seconds(cost.hidden_s)} of it behind other work)" if cost.hidden_s else ")")
    )
    if cost.gradients_s:
        text += (
            f"; gradients are reduced in {format_seconds(cost.gradients_s)}, "
            f"{format_seconds(cost.exposed_s)} of it after the backward pass, in buckets of "
            f"{format_bytes(cost.bucket_bytes)}"
        )
    if cost.bubble_s + cost.transfer_s:
        waited = format_seconds(cost.bubble_s + cost.transfer_s)
        text += f"; {waited} are spent waiting for other stages"
        if cost.transfer_s:
            text += f", {format_seconds(cost.transfer_s)} of it for what they send"
    memory = (
        f"Memory of a device: {format_bytes(cost.memory_bytes)} of "
        f"{format_bytes(memory_limit(plan))} (weights "
        f"{format_bytes(cost.weight_bytes)}, slots and other state "
        f"{format_bytes(cost.state_bytes)}, gradients "
        f"{format_bytes(cost.gradient_bytes)}, activations kept for the backward pass "
        f"{format_bytes(cost.activation_bytes)}; not all at the same time)"
    )
    lines = [f"{text}.", memory]
    lines += simpler_than(plan)
    if plan.cut_short:
        lines.append("The search was cut short before its end: there may be better plans.")
    if plan.layouts:
        shown = [f"{name}: {format_seconds(s)}" for name, s, _ in plan.layouts[:3]]
        lines.append(f"Next best layouts: {'; '.join(shown)}")
    if plan.mesh.size > 1 and not plan.splits_anything():
        lines.append(
            "Every rank computes the same: for this model and batch, communication would take "
            "longer than what it saves."
        )
    return lines


def _planned_ops(plan: Plan, partitioned: PartitionedGraph) -> list[str]:
    """The ops that the plan itself decides, by how many of a type."""
    types = {op.name: op.type for op in partitioned.graph.ops}
    counts = collections.Counter(types[name] for name in plan.ops if name in types)
    if not counts:
        return []
    shown = [f"{count} {kind}" for kind, count in counts.most_common(4)]
    more = ", ..." if len(counts) > 4 else ""
    return [
        f"Ops that run as the plan says, where by themselves they would run otherwise: "
        f"{counts.total()} ({', '.join(shown)}{more})"
    ]


def _recomputed(plan: Plan) -> list[str]:
    names = plan.recompute
    if not names:
        return []
    return [f"Computed again in the backward pass, to store less: {_blocks(names)}"]


def _blocks(names: Sequence[str]) -> str:
    """`2 blocks (block_0, block_1)`."""
    shown = ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ..., {names[-1]}"
    return f"{len(names)} block{'s' if len(names) > 1 else ''} ({shown})"


def _offloaded(plan: Plan) -> list[str]:
    lines = []
    if count := len(plan.offloaded.slots):
        weights = f"{count} weight{'s' if count > 1 else ''}"
        lines.append(f"Optimizer slots in host memory: those of {weights}")
    if plan.offloaded.activations:
        blocks = _blocks(plan.offloaded.activations)
        lines.append(f"In host memory from the forward to the backward pass: what {blocks} keep")
    return lines


def _split_slots(plan: Plan) -> list[str]:
    count = sum(variable.slots is not None for variable in plan.variables.values())
    if not count:
        return []
    weights = f"{count} weight{'s' if count > 1 else ''}"
    return [
        f"Optimizer slots split over ranks that have the same of a weight, to store less (ZeRO-1): "
        f"those of {weights}"
    ]


def _rivals(plan: Plan) -> list[str]:
    return [rivals_table(plan)] if plan.rivals and plan.cost is not None else []


def _stages(plan: Plan, partitioned: PartitionedGraph | None) -> list[str]:
    if plan.stages is None:
        return []
    lines = [stage_table(plan, plan.stages, variable_specs(plan, partitioned))]
    cost = plan.stages.cost
    if cost is not None:
        lines += [stages_table(cost), *idle_ranks(cost)]
        if cost.schedules:
            lines.append(schedules_table(cost.schedules, bool(plan.shares)))
    return lines


def _layers(plan: Plan, partitioned: PartitionedGraph | None) -> list[str]:
    if partitioned is None or plan.cluster is None:
        return []
    rows, rest = [], [0, 0.0, 0.0]
    specs = variable_specs(plan, partitioned)
    for report in layer_reports(partitioned, plan.cluster):
        if not report.node.weights:
            found = len(report.node.ops), report.activation_bytes, report.seconds
            rest = [a + b for a, b in zip(rest, found, strict=True)]
            continue
        placements = {placement_text(specs[w.name] or (), plan.mesh) for w in report.node.weights}
        rows.append(
            [
                report.node.name,
                "; ".join(sorted(placements - {"replicated"})) or "replicated",
                format_bytes(report.num_bytes),
                format_bytes(report.activation_bytes),
                report.collectives_text(),
                format_seconds(report.seconds),
            ]
        )
    between = f"{rest[0]} ops between them"
    rows.append([between, "", "", format_bytes(rest[1]), "", format_seconds(rest[2])])
    columns = ("Layer", "Placement", "Weights", "Kept", "Collectives", "Time")
    title = (
        "Layers (per device; weights, and activations kept for the backward pass; time of forward, "
        "backward and update without overlap and packing)"
    )
    return [render_table(title, columns, rows, numeric=(2, 3, 5))]


# --- variables -------------------------------------------------------------------


def _variable_table(plan: Plan, partitioned: PartitionedGraph | None) -> str:
    specs = variable_specs(plan, partitioned)
    rows = []
    rest: list[str] = []
    for name, variable in plan.variables.items():
        if not variable.trainable and variable.spec is None:
            rest.append(name)
            continue
        spec = specs[name]
        laid = "left to propagation" if spec is None else placement_text(spec, plan.mesh)
        size, local = format_bytes(variable_bytes(variable)), local_text(plan, [name], specs)
        rows.append([name, str(variable.shape), laid, *_stages_of(plan, [name]), size, local])
    if rest:
        sharded = sum(any(isinstance(p, Shard) for p in specs[n] or ()) for n in rest)
        total = sum(variable_bytes(plan.variables[n]) for n in rest)
        placement = f"{sharded} sharded, as their weights" if sharded else "replicated"
        if any(specs[n] is None for n in rest):
            placement = "left to propagation"
        # No rank of a pipeline holds all of them; the table of stages says what each does.
        local = local_text(plan, rest, specs) if plan.stages is None else ""
        head = f"{len(rest)} optimizer and other state"
        size = format_bytes(total)
        rows.append([head, "", placement, *_stages_of(plan, rest), size, local])
    columns = ["Variable", "Shape", "Placement", "Bytes", "Per device"]
    if plan.stages is not None:
        columns.insert(3, "Stage")
    return render_table("Variables", columns, rows, numeric=(len(columns) - 2, len(columns) - 1))


def _stages_of(plan: Plan, names: Sequence[str]) -> list[str]:
    """A cell with the stages of these variables, in a plan that has stages."""
    if plan.stages is None:
        return []
    found = {plan.stages.owners[name] for name in names if name in plan.stages.owners}
    return [f"{min(found)}-{max(found)}" if len(found) > 1 else "".join(map(str, found))]


def _totals(plan: Plan, partitioned: PartitionedGraph | None) -> str:
    specs = variable_specs(plan, partitioned)
    whole = sum(map(variable_bytes, plan.variables.values()))
    weights = sum(variable_bytes(v) for v in plan.variables.values() if v.trainable)
    text = f"Total: {format_bytes(whole)} in {len(plan.variables)} variables (weights "
    text += f"{format_bytes(weights)})"
    if plan.stages is not None:
        return text
    return f"{text}; per device {local_text(plan, list(plan.variables), specs)}"


# --- what one step does ----------------------------------------------------------


def _inputs(partitioned: PartitionedGraph) -> list[str]:
    """What each rank is given of the step's inputs, and what its ops take of that.

    Where ops are split one by one, "the batch is not split" says little: one input may be needed
    whole by each rank, and another only in part.
    """
    mesh, consumers = partitioned.mesh, partitioned.prepared.consumers
    rows = []
    for tensor in partitioned.graph.inputs:
        if not tensor.shape or mesh.size == 1:
            continue
        taken: dict[Spec, None] = {}
        for op in consumers.get(tensor, ()):
            specs = partitioned.decisions[op].strategy.in_specs
            taken.update((s, None) for t, s in zip(op.inputs, specs, strict=True) if t is tensor)
        given = _given(partitioned.specs[tensor], mesh)
        used = "; ".join(dict.fromkeys(_given(spec, mesh) for spec in taken)) or "nothing"
        rows.append([tensor.op.name, str(tensor.shape), given, used])
    columns = ("Input", "Shape", "A rank is given", "Its ops take")
    return [render_table("Inputs of the step", columns, rows)] if rows else []


def _given(spec: Spec, mesh: Mesh) -> str:
    text = placement_text(spec, mesh)
    return "all of it" if text == "replicated" else text


def _padding(plan: Plan, partitioned: PartitionedGraph) -> str:
    mesh = partitioned.mesh
    padded = [v for v, s in partitioned.variable_specs.items() if _is_padded(v.shape, s, mesh)]
    handles = {v.handle for v in partitioned.graph.variables}
    seen: dict[tuple[Shape, Spec], bool] = {}
    tensors = 0
    for tensor, spec in partitioned.specs.items():
        if tensor in handles or not tensor.is_static:
            continue
        key = (tensor.shape, spec)
        if key not in seen:
            seen[key] = _is_padded(tensor.shape, spec, mesh)
        tensors += seen[key]
    if not padded and not tensors:
        return "Padding: none, every split divides"
    extra = sum(
        math.prod(local_shape(v.shape, partitioned.variable_specs[v], mesh))
        * itemsize(v.dtype)
        * _num_shards(partitioned.variable_specs[v], mesh)
        - v.num_bytes
        for v in padded
    )
    names = ", ".join(v.name for v in padded[:4]) + (", ..." if len(padded) > 4 else "")
    lines = ["Padding where sizes do not divide:"]
    if padded:
        lines.append(f"  {len(padded)} variables, {format_bytes(extra)} in all: {names}")
    if tensors:
        lines.append(f"  {tensors} activations and gradients")
    return "\n".join(lines)


def _num_shards(spec: Spec, mesh: Mesh) -> int:
    return mesh.group_size(tuple(a for a, p in enumerate(spec) if isinstance(p, Shard)))


def _is_padded(shape: Sequence[int], spec: Spec, mesh: Mesh) -> bool:
    dims = {p.dim for p in spec if isinstance(p, Shard)}
    return any(not dim_is_even(shape, spec, mesh, d) for d in dims)


def _collectives(plan: Plan, partitioned: PartitionedGraph) -> str:
    count: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    size: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for kind, axes, num_bytes in partitioned.collectives():
        count[kind, axes] += 1
        size[kind, axes] += num_bytes
    if not count:
        return "Collectives of one step: none"
    rows = [
        [kind, " x ".join(axes), str(count[kind, axes]), format_bytes(size[kind, axes])]
        for kind, axes in sorted(count)
    ]
    columns: tuple[str, ...] = ("Collective", "Over", "Count", "Bytes per rank")
    if plan.cluster is not None:
        seconds = collective_times(partitioned, plan.cluster)
        columns = (*columns, "Time")
        for row, key in zip(rows, sorted(count), strict=True):
            row.append(format_seconds(seconds.get(key, 0.0)))
    title = "Collectives of one step (before those of one kind and group are packed)"
    return render_table(title, columns, rows, numeric=(2, 3, 4))


def _fallbacks(partitioned: PartitionedGraph) -> str:
    by_type: dict[str, list[Op]] = {}
    for op in partitioned.prepared.all_fallbacks():
        by_type.setdefault(op.type, []).append(op)
    if not by_type:
        return "Fallbacks: none, every op has a rule"
    rows = [[t, str(len(ops)), ops[0].name] for t, ops in sorted(by_type.items())]
    title = "Ops run replicated for want of a rule (inputs gathered, every rank computes)"
    return render_table(title, ("Op type", "Count", "First op"), rows, numeric=(1,))


def _held(partitioned: PartitionedGraph) -> str:
    axes = partitioned.mesh.axis_names
    rows = [[op.type, axes[axis], op.name] for op, axis in partitioned.replicated_regions]
    title = "Loops, branches and calls that run whole along an axis: their bodies need collectives"
    return render_table(title, ("Op type", "Mesh axis", "Op"), rows)
