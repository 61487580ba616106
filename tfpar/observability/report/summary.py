"""Summary of a plan for the whole step, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfpar.observability.report.candidates import (
    correction_text,
    rivals_table,
    trials_table,
)
from tfpar.observability.report.data.schema import CandidateSummary, Report
from tfpar.observability.report.details import details, totals
from tfpar.observability.report.layer_rows import every_layer, folded_variables, layers_table
from tfpar.observability.report.pipeline import (
    idle_ranks,
    schedules_table,
    stages_tables,
    statistics_text,
)
from tfpar.observability.report.rentals import rent_lines
from tfpar.spec.quantities import format_bytes, format_seconds

MOST_LINES = 40
"""Of a summary, as long as no row takes two."""

AROUND_ROWS, LEAST_ROWS = 6, 4
"""Of the table of layers: title, head and rules with what all come to; and its rows, where stages
leave no room."""


def summary(report: Report, full: bool = False, sort: str | None = None) -> str:
    """Format a plan's headline, its predicted step and its layers.

    Without `full` it takes at most `MOST_LINES`, however many layers there are.

    Args:
        full, sort: as of `Plan.summary`.
    """
    head = [headline(report), *_prediction(report), *rent_lines(report.rentals, full)]
    if full:
        head += [*_tables(report)]
    head += [*_kept_apart(report), *_stages(report, full)]
    tail = [*(details(report) if full else [totals(report)]), *report.hints]
    table = []
    if report.layers and full:
        table = [every_layer(report, sort)]
    elif report.layers:
        around = sum(len(part.splitlines()) for part in (*head, *tail)) + AROUND_ROWS
        table = [layers_table(report, sort, max(LEAST_ROWS, MOST_LINES - around))]
    elif not full:
        table = [folded_variables(report)]
    return "\n".join([*head, *table, *tail])


def headline(report: Report) -> str:
    """Mesh, batch and pieces, in a line."""
    facts = report.facts
    ranks = f"{facts.ranks} rank{'s' if facts.ranks > 1 else ''}"
    model = f" for {facts.model!r}" if facts.model else ""
    text = f"Plan{model} on {'mesh ' if report.pipeline is None else ''}{facts.where} ({ranks}), "
    text += facts.batch
    if facts.chunks > 1:
        text += f", {facts.chunks} chunks of it one behind the other"
    if facts.microbatches > 1:
        text += f", in {facts.microbatches} microbatches"
        if facts.batch_statistics == "microbatch":
            text += f", {statistics_text(facts.microbatches)}"
    return text


# --- cost -----------------------------------------------------------------------


def simpler_than(report: Report) -> list[str]:
    """Explain that the plan was preferred to one that was predicted to be faster, if it was."""
    if report.facts.passed_over is None or report.cost is None:
        return []
    seconds, collectives = report.facts.passed_over
    return [
        f"Taken because it is simpler: within {100 * (report.cost.seconds / seconds - 1):.1f} % of "
        f"the fastest plan found ({format_seconds(seconds)}), which is nearer than predictions can "
        f"tell plans apart, with {count_text(report.cost.collectives)} a step in place of "
        f"{collectives}."
    ]


def count_text(collectives: int) -> str:
    """`1 collective`, `12 collectives`."""
    return f"{collectives} collective{'s' if collectives != 1 else ''}"


def _prediction(report: Report) -> Iterator[str]:
    """Yield the predicted cost of the plan, and its warnings."""
    cost, machines = report.cost, report.machines
    if cost is None or machines is None:
        yield from report.warnings
        return
    forward, backward, update = (
        format_seconds(getattr(cost.compute_s, phase) + getattr(cost.communication_s, phase))
        for phase in ("forward", "backward", "update")
    )
    planner = report.facts.planner
    found = f"Found by the {planner} planner" if planner else "Given by constraints, priced"
    text = (
        f"{found} for cluster {machines.name!r} ({machines.shape}). Predicted: "
        f"{format_seconds(cost.seconds)} a step (forward {forward}, backward {backward}, update "
        f"{update}; of these {format_seconds(cost.communication_s.total)} collectives"
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
    if cost.host_wait_s:
        text += f"; for {format_seconds(cost.host_wait_s)} devices wait for their host to issue ops"
        text += " (jit_compile=True or a larger batch would shorten that)"
    yield f"{text}."
    limit = "inf B" if machines.memory_limit is None else format_bytes(machines.memory_limit)
    yield (
        f"Memory of a device: {format_bytes(cost.memory_bytes)} of {limit} (weights "
        f"{format_bytes(cost.memory.weights)}, slots and other state "
        f"{format_bytes(cost.memory.slots)}, gradients {format_bytes(cost.gradient_bytes)}, "
        f"activations kept for the backward pass {format_bytes(cost.activation_bytes)}; not all at "
        f"the same time)"
    )
    yield from _host_memory(report)
    yield from _baselines(report.candidates)
    yield from simpler_than(report)
    yield from report.warnings
    layouts = [c for c in report.candidates if c.kind == "layout" and c.memory_bytes is not None]
    if layouts:
        shown = [f"{found.name}: {format_seconds(found.seconds or 0.0)}" for found in layouts[:3]]
        yield f"Next best layouts: {'; '.join(shown)}"


def _host_memory(report: Report) -> Iterator[str]:
    """Yield a rank's use of host memory and its limit."""
    cost, machines = report.cost, report.machines
    assert cost is not None and machines is not None, "a plan that was priced"
    parts = {"slots": cost.host_slot_bytes, "activations": cost.host_activation_bytes}
    if total := sum(parts.values()):
        room = machines.host_memory_limit
        of = " (how much there is is not known)" if room is None else f" of {format_bytes(room)}"
        what = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        yield f"Host memory of a rank: {format_bytes(total)}{of}: {what}"


def _baselines(candidates: Sequence[CandidateSummary]) -> Iterator[str]:
    known = {c.name: c for c in candidates if c.kind == "baseline" and c.seconds is not None}
    bound = known.pop("lower bound", None)
    if known:
        shown = [
            f"{c.name} {format_seconds(c.seconds or 0.0)}"
            + (" (does not fit)" if c.fits is False else "")
            for c in known.values()
        ]
        yield f"To compare: {', '.join(shown)}"
    if bound is not None:
        plan = next(c for c in candidates if c.kind == "plan")
        least, taken = bound.seconds or 0.0, plan.seconds or 0.0
        yield (
            f"No plan among those searched takes less than {format_seconds(least)}: this one takes "
            f"at most {max(1.0, taken / least):.3g} times as long as the best"
        )


def _tables(report: Report) -> Iterator[str]:
    """Yield tables of the rejected candidates and of the trials, and how these corrected the
    cluster."""
    candidates = report.candidates
    if any(candidate.kind == "pipeline" for candidate in candidates):
        yield rivals_table(candidates)
    trials = [candidate for candidate in candidates if candidate.kind == "trial"]
    if trials:
        yield trials_table(trials)
    if report.correction is not None:
        yield f"By trials, {correction_text(report.correction)}"


def _kept_apart(report: Report) -> Iterator[str]:
    """Yield lines on what is recomputed, offloaded to host memory, or sharded further (ZeRO)."""
    facts = report.facts
    if facts.recompute:
        yield f"Computed again in the backward pass, to store less: {_blocks(facts.recompute)}"
    if facts.attention == "blockwise":
        yield "Attention runs on blocks of its scores, which the backward pass computes again"
    if facts.offloaded_slots:
        yield f"Optimizer slots in host memory: those of {_weights(facts.offloaded_slots)}"
    if facts.offloaded_activations:
        blocks = _blocks(facts.offloaded_activations)
        yield f"In host memory from the forward to the backward pass: what {blocks} keep"
    if facts.gathered_weights:
        yield (
            f"Stored in parts and gathered for their layers (ZeRO-3, FSDP): "
            f"{_weights(facts.gathered_weights)}"
        )
    if facts.split_slots:
        yield (
            f"Optimizer slots split over ranks that have the same of a weight, to store less "
            f"(ZeRO-1): those of {_weights(facts.split_slots)}"
        )


def _weights(count: int) -> str:
    return f"{count} weight{'s' if count > 1 else ''}"


def _blocks(names: Sequence[str]) -> str:
    """`2 blocks (block_0, block_1)`."""
    shown = ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ..., {names[-1]}"
    return f"{len(names)} block{'s' if len(names) > 1 else ''} ({shown})"


def _stages(report: Report, full: bool) -> Iterator[str]:
    if report.pipeline is None:
        return
    yield from stages_tables(report.pipeline, full)
    yield from idle_ranks(report.pipeline.stages)
    if full and report.pipeline.schedules:
        yield schedules_table(report.pipeline.schedules, report.facts.in_unequal_shares)
