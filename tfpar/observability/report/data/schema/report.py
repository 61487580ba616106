"""`Report`, the data that views show of a plan, and reading it from JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from tfpar.cluster.scaling import Correction
from tfpar.observability.report.data.schema.measured import MeasuredStep
from tfpar.observability.report.data.schema.plan import (
    CostSummary,
    Facts,
    Machines,
    PartOfStep,
    PipelineSummary,
    RentalSummary,
    SecondsByCause,
)
from tfpar.observability.report.data.schema.step import (
    Collective,
    FlowSummary,
    Input,
    LayerSummary,
    Padding,
    RunWhole,
    VariableSummary,
    WithoutRule,
)
from tfpar.readable import UnreadableError, convert
from tfpar.spec import PlanError

FORMAT, VERSION = "tfpar report", 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Report of a plan: all that views show of it.

    Attributes:
        verdict: one sentence: what the plan is, and what it gains.
        cost, machines: None where nothing was priced.
        layers: in the order of the model; empty where the graph is not known, as of a plan that
            was saved without its report.
        flows: between layers, in the forward pass.
        collectives: of the whole step.
        planned_ops: how many ops of each type run as the plan says, where by themselves they would
            run otherwise.
        correction: of the cluster, by trials; None: there were none.
        idle_axes: of the mesh, along which all ranks compute and store the same.
        rentals: the plan's devices, first, and others that were compared; empty where their rent is
            not known.
        measured: a step of a timeline, beside the predicted one; None where none was given.
        warnings, hints: sentences; `hints` at most three, of what would change the plan.
    """

    format: Literal["tfpar report"] = "tfpar report"
    version: Literal[1] = 1
    tfpar_version: str
    verdict: str
    facts: Facts
    machines: Machines | None
    cost: CostSummary | None
    layers: tuple[LayerSummary, ...]
    variables: tuple[VariableSummary, ...]
    collectives: tuple[Collective, ...]
    flows: tuple[FlowSummary, ...]
    inputs: tuple[Input, ...]
    pipeline: PipelineSummary | None
    candidates: tuple[CandidateSummary, ...]
    what_if: tuple[WhatIf, ...]
    planned_ops: dict[str, int]
    padding: Padding | None
    without_rule: tuple[WithoutRule, ...]
    run_whole: tuple[RunWhole, ...]
    correction: Correction | None = None
    idle_axes: tuple[str, ...] = ()
    rentals: tuple[RentalSummary, ...] = ()
    measured: MeasuredStep | None = None
    warnings: tuple[str, ...]
    hints: tuple[str, ...]

    def elsewhere(self, found: Iterable[WhatIf]) -> Report:
        """The same, with what the best plans on other machines take."""
        return dataclasses.replace(self, what_if=tuple(found))

    def to_builtins(self) -> dict[str, Any]:
        """Return the report as JSON has it: objects, lists, numbers, strings."""
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return found


def read_report(data: Any, source: str) -> Report:
    """The report that `to_builtins` made an object of.

    Args:
        source: names it in errors.

    Raises:
        PlanError: it is none, of a newer version, or malformed; says where.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f"{source} holds no report of a plan.")
    if data.get("version") != VERSION:
        raise PlanError(
            f"The report of {source} has the version {data.get('version')!r}; this tfpar reads "
            f"{VERSION}. Make the plan again with this tfpar, or use the one that made it."
        )
    try:
        return convert(data, Report, lax=True)
    except UnreadableError as error:
        raise PlanError(f"The report of {source} is malformed: {error}.") from error


# --- plans that a plan is compared with -----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CandidateSummary:
    """A plan that was found or priced, and why it lost.

    Attributes:
        kind: `plan`: this one; `layout`: the best on another mesh; `pipeline`: another number of
            stages; `move`: what a move made of a plan that did not fit into memory; `baseline`:
            `one device` or `data parallel`, or `lower bound`, below which no plan is; `trial`: it
            was run.
        seconds, memory_bytes: None where they are not known.
        why: it was not taken; empty for the plan, and for baselines.
        parts: of its time, where they are known.
        measured_s: of a trial.
        corrected_s: predicted seconds on the cluster that trials have corrected.
        causes: of its time, where the parts are known.
    """

    name: str
    kind: Literal["plan", "layout", "pipeline", "move", "baseline", "trial"]
    seconds: float | None
    memory_bytes: float | None
    fits: bool | None
    why: str = ""
    parts: tuple[PartOfStep, ...] = ()
    measured_s: float | None = None
    corrected_s: float | None = None
    causes: SecondsByCause | None = None


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """The best plan for the same model on other machines.

    Attributes:
        seconds, memory_bytes: None: no plan was found; `note` says why.
    """

    cluster: str
    mesh: str
    ranks: int
    seconds: float | None
    memory_bytes: float | None
    fits: bool
    note: str = ""
