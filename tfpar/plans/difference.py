"""Differences between two plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tfpar.pipeline.generators import name_of
from tfpar.plans.stages import PipelinePlan, meshes_text
from tfpar.spec import Spec, format_spec
from tfpar.spec.quantities import format_seconds

if TYPE_CHECKING:
    from tfpar.plans.plan import Plan


def difference(plan: Plan, other: Plan) -> list[str]:
    """List the differences of `other`, one readable line each; empty for equal plans."""
    lines = []
    if plan.mesh != other.mesh:
        lines.append(f"mesh: {plan.mesh} -> {other.mesh}")
    if plan.batch_axes != other.batch_axes:
        lines.append(f"batch axes: {_axes(plan.batch_axes)} -> {_axes(other.batch_axes)}")
    for name in sorted({*plan.variables, *other.variables}):
        mine, theirs = plan.variables.get(name), other.variables.get(name)
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
        if mine.slots != theirs.slots:
            lines.append(f"slots of {name}: {_slots(mine.slots)} -> {_slots(theirs.slots)}")
        if mine.gathered != theirs.gathered:
            both = (_gathered(one.gathered) for one in (mine, theirs))
            lines.append(f"{name} as layers read it: {' -> '.join(both)}")
        elif mine.keep_gathered != theirs.keep_gathered:
            when = "kept for" if theirs.keep_gathered else "gathered again for"
            lines.append(f"{name}: {when} the backward pass")
        if mine.scatters_gradient != theirs.scatters_gradient:
            when = "each microbatch" if theirs.scatters_gradient else "all of them"
            lines.append(f"gradient of {name}: reduced after {when}")
    for name in sorted({*plan.tensors, *other.tensors}):
        before, after = plan.tensors.get(name), other.tensors.get(name)
        if before != after:
            lines.append(f"{name}: {_spec(before)} -> {_spec(after)}")
    changed = [n for n in {**plan.ops, **other.ops} if plan.ops.get(n) != other.ops.get(n)]
    if changed:
        lines.append(f"ops that run otherwise: {abbreviate_list(changed)}")
    lines += [f"constraint dropped: {c}" for c in plan.constraints if c not in other.constraints]
    lines += [f"constraint added: {c}" for c in other.constraints if c not in plan.constraints]
    lines += [f"no longer computed again: {n}" for n in plan.recompute if n not in other.recompute]
    lines += [f"computed again: {n}" for n in other.recompute if n not in plan.recompute]
    if plan.attention != other.attention:
        lines.append(f"attention: {plan.attention} -> {other.attention}")
    for what in ("slots", "activations"):
        now, then = (getattr(one.offloaded, what) for one in (plan, other))
        lines += [f"{what} of {n}: back on the device" for n in now if n not in then]
        lines += [f"{what} of {n}: in host memory" for n in then if n not in now]
    if plan.shares != other.shares:
        lines.append(f"shares of the batch: {_shares(plan.shares)} -> {_shares(other.shares)}")
    if plan.chunks != other.chunks:
        lines.append(f"chunks: {plan.chunks} -> {other.chunks}")
    if plan.microbatches != other.microbatches:
        lines.append(f"microbatches: {plan.microbatches} -> {other.microbatches}")
    if plan.batch_statistics != other.batch_statistics:
        lines.append(f"batch statistics: {plan.batch_statistics} -> {other.batch_statistics}")
    lines += stages_difference(plan.stages, other.stages)
    lines += _layouts_difference(plan, other)
    if plan.planner != other.planner:
        lines.append(f"planner: {plan.planner or 'none'} -> {other.planner or 'none'}")
    machines = [p.cluster and p.cluster.fingerprint() for p in (plan, other)]
    if machines[0] != machines[1]:
        names = (p.cluster.name if p.cluster else "none" for p in (plan, other))
        lines.append(f"cluster: {' -> '.join(names)}")
    if plan.cost and other.cost and plan.cost != other.cost:
        times = (format_seconds(p.seconds) for p in (plan.cost, other.cost))
        lines.append(f"predicted step: {' -> '.join(times)}")
    if plan.fingerprint != other.fingerprint:
        lines.append(f"graph: {plan.fingerprint} -> {other.fingerprint}")
    return lines


def _layouts_difference(plan: Plan, other: Plan) -> list[str]:
    """List the differences in the layouts of stages that have others than the plan."""
    if plan.meshes != other.meshes and plan.stages is not None and other.stages is not None:
        return [f"meshes of stages: {meshes_text(plan.meshes)} -> {meshes_text(other.meshes)}"]
    pairs = zip(*(one.stages.layouts if one.stages else () for one in (plan, other)), strict=False)
    return [
        f"on {one.mesh}: {line}"
        for one, two in pairs
        if one != two
        for line in difference(plan.in_layout(one), other.in_layout(two))
    ]


def stages_difference(plan: PipelinePlan | None, other: PipelinePlan | None) -> list[str]:
    """List the differences in the stages of another plan."""
    if plan is None or other is None:
        counts = ("one" if one is None else str(one.num_stages) for one in (plan, other))
        return [] if plan is other else [f"stages: {' -> '.join(counts)}"]
    lines = []
    if plan.num_stages != other.num_stages:
        lines.append(f"stages: {plan.num_stages} -> {other.num_stages}")
    if plan.schedule != other.schedule:
        names = name_of(plan.schedule), name_of(other.schedule)
        alike = names[0] == names[1]
        lines.append(f"schedule: {'another' if alike else ' -> '.join(names)}")
    if plan.recompute != other.recompute:
        lines.append(f"stages recompute: {plan.recompute} -> {other.recompute}")
    if plan.ranks != other.ranks:
        orders = (str(list(stages.ranks or ("in their order",))) for stages in (plan, other))
        lines.append(f"ranks of stages: {' -> '.join(orders)}")
    for table, others in ((plan.owners, other.owners), (plan.scopes, other.scopes)):
        for name in dict.fromkeys((*table, *others)):
            before, after = table.get(name), others.get(name)
            if before != after and (table is plan.scopes or None not in (before, after)):
                lines.append(f"{name}: {_stage(before)} -> {_stage(after)}")
    return lines


def _stage(stage: int | None) -> str:
    return "no stage of its own" if stage is None else f"stage {stage}"


def abbreviate_list(items: Sequence[str], limit: int = 4, quote: bool = True) -> str:
    """Show the first of `items`, and how many more there are."""
    shown = ", ".join(repr(i) if quote else i for i in items[:limit])
    return shown + (f" and {len(items) - limit} more" if len(items) > limit else "")


def _spec(spec: Spec | None) -> str:
    return "open" if spec is None else format_spec(spec)


def _slots(spec: Spec | None) -> str:
    return "as it lies" if spec is None else format_spec(spec)


def _gathered(spec: Spec | None) -> str:
    return "as it is stored" if spec is None else format_spec(spec)


def _shares(shares: Mapping[str, tuple[int, ...]]) -> str:
    found = (f"{':'.join(map(str, each))} over {name}" for name, each in shares.items())
    return ", ".join(found) or "equal"


def _axes(axes: Sequence[str]) -> str:
    return ", ".join(axes) or "none"
