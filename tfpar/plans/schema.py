"""Schema of plan files: the keys in their order, and how each becomes a part of a plan.

Keys with a default came later: older files lack them.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from tfpar.cluster.files import cluster_of, describe
from tfpar.cluster.scaling import Correction
from tfpar.cost.cost import Cost
from tfpar.cost.pipeline_cost import PipelineCost
from tfpar.pipeline import Schedule
from tfpar.pipeline.statistics import BatchStatisticsOf
from tfpar.plans.attention import AttentionMode
from tfpar.plans.findings import Candidate, Findings, Rental
from tfpar.plans.offload import OffloadPlan
from tfpar.plans.stages import PipelinePlan, StageLayout
from tfpar.plans.variables import PlannedVariable, SpecOption
from tfpar.propagation.partitioned_graph import OpPlan
from tfpar.spec import Mesh, Spec, TfparError, format_spec, parse_spec
from tfpar.spec.arguments import shown
from tfpar.spec.quantities import Amount, Count

if TYPE_CHECKING:
    from tfpar.plans.plan import Plan

FORMAT, VERSION = "tfpar plan", 2

Whole = Annotated[int, msgspec.Meta(ge=1 - 2**63, le=2**63 - 1, description="a whole number")]
AtLeastOne = Annotated[
    int, msgspec.Meta(ge=1, le=2**63 - 1, description="a whole number, 1 or more, below 2^63")
]
AboveZero = Annotated[
    float, msgspec.Meta(gt=0, le=sys.float_info.max, description="a finite number above 0")
]


class SpecText:
    """A spec that was read; files have it as text: `S(0),R`."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec


def read_custom(kind: Any, value: Any) -> SpecText:
    if not isinstance(value, str):
        raise ValueError(f"is {shown(value)}; it must be a spec, such as 'S(0),R'")
    try:
        return SpecText(parse_spec(value))
    except TfparError as error:
        raise ValueError(f"is {shown(value)}: {error}".removesuffix(".")) from None


def _write_spec(spec: Spec | None) -> Any:
    """The text of a spec, which is written in place of a `SpecText`."""
    return None if spec is None else format_spec(spec)


def _read_spec(text: SpecText | None) -> Spec | None:
    return None if text is None else text.spec


def _write_seconds(seconds: float) -> float | None:
    """Seconds in JSON, which has no infinity: what is not known, or never ends, is null."""
    return seconds if math.isfinite(seconds) else None


def _read_seconds(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _or_unset(seconds: float | None) -> float | UnsetType:
    """Seconds of a key that files leave out where they are not known."""
    return UNSET if seconds is None else seconds


def _or_none(seconds: float | UnsetType) -> float | None:
    return None if seconds is UNSET else seconds


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object of a plan file."""


class AlternativeEntry(NamedTuple):
    """An `SpecOption`; without seconds no such plan is valid."""

    spec: SpecText
    seconds: Amount | None
    layout: str


_SPECS = ("spec", "slots", "gathered")  # of a variable


class VariableEntry(_Part, frozen=True, omit_defaults=True):
    """A `PlannedVariable`."""

    shape: tuple[Count, ...]
    dtype: str
    trainable: bool
    spec: SpecText | None
    why: str
    alternatives: tuple[AlternativeEntry, ...]
    slots: SpecText | None = None
    gathered: SpecText | None = None
    keep_gathered: bool = False
    scatters_gradient: bool = False

    @classmethod
    def of(cls, variable: PlannedVariable) -> VariableEntry:
        specs = {name: _write_spec(getattr(variable, name)) for name in _SPECS}
        alternatives = tuple(
            AlternativeEntry(_write_spec(a.spec), _write_seconds(a.seconds), a.layout)
            for a in variable.alternatives
        )
        return cls(**{**vars(variable), **specs, "alternatives": alternatives})

    def read(self) -> PlannedVariable:
        specs = {name: _read_spec(getattr(self, name)) for name in _SPECS}
        alternatives = tuple(
            SpecOption(a.spec.spec, _read_seconds(a.seconds), a.layout) for a in self.alternatives
        )
        fields = {**msgspec.structs.asdict(self), **specs, "alternatives": alternatives}
        return PlannedVariable(**fields)


class OpEntry(_Part, frozen=True, omit_defaults=True, rename={"reads": "in", "makes": "out"}):
    """An `OpPlan`; what it makes is kept so, unless it is said how."""

    reads: tuple[SpecText, ...]
    makes: tuple[SpecText, ...]
    kept: tuple[SpecText, ...] | None = None

    @classmethod
    def of(cls, op: OpPlan) -> OpEntry:
        reads, makes, kept = (
            tuple(map(_write_spec, specs)) for specs in (op.in_specs, op.made, op.kept)
        )
        return cls(reads, makes, None if op.kept == op.made else kept)

    def read(self) -> OpPlan:
        kept = self.makes if self.kept is None else self.kept
        return OpPlan(*(tuple(t.spec for t in texts) for texts in (self.reads, self.makes, kept)))


class StageLayoutEntry(_Part, frozen=True):
    """A `StageLayout`."""

    mesh: tuple[tuple[str, Whole], ...]
    batch_axes: tuple[str, ...]
    variables: dict[str, VariableEntry]
    tensors: dict[str, SpecText]
    ops: dict[str, OpEntry] = {}
    shares: dict[str, tuple[Count, ...]] = {}

    @classmethod
    def of(cls, layout: StageLayout) -> StageLayoutEntry:
        return cls(
            tuple(zip(layout.mesh.axis_names, layout.mesh.shape, strict=True)),
            layout.batch_axes,
            {name: VariableEntry.of(v) for name, v in sorted(layout.variables.items())},
            {name: _write_spec(spec) for name, spec in sorted(layout.tensors.items())},
            {name: OpEntry.of(op) for name, op in sorted(layout.ops.items())},
            dict(layout.shares),
        )

    def read(self) -> StageLayout:
        return StageLayout(
            _read_mesh(self.mesh),
            self.batch_axes,
            {name: entry.read() for name, entry in self.variables.items()},
            {name: text.spec for name, text in self.tensors.items()},
            {name: entry.read() for name, entry in self.ops.items()},
            self.shares,
        )


def _read_mesh(axes: Sequence[tuple[str, int]]) -> Mesh:
    names, sizes = zip(*axes, strict=True) if axes else ((), ())
    return Mesh(names, sizes)


class StagesEntry(_Part, frozen=True):
    """`PipelinePlan`; scopes stay in the order of the graph."""

    schedule: tuple[str, ...]
    recompute: bool | tuple[Count, ...]
    scopes: dict[str, Whole]
    owners: dict[str, Whole]
    cost: PipelineCost | None = None
    ranks: tuple[Count, ...] = ()
    layouts: tuple[StageLayoutEntry, ...] | UnsetType = UNSET
    layout_of: tuple[Count, ...] | UnsetType = UNSET
    memory_limits: tuple[AboveZero, ...] | UnsetType = UNSET

    @classmethod
    def of(cls, stages: PipelinePlan) -> StagesEntry:
        return cls(
            tuple(str(stages.schedule).splitlines()),
            stages.recompute if isinstance(stages.recompute, bool) else tuple(stages.recompute),
            dict(stages.scopes),
            dict(sorted(stages.owners.items())),
            stages.cost,
            stages.ranks,
            tuple(map(StageLayoutEntry.of, stages.layouts)) or UNSET,
            stages.layout_of or UNSET,
            stages.memory_limits or UNSET,
        )

    def read(self) -> PipelinePlan:
        schedule = Schedule.parse("\n".join(self.schedule))
        layouts = () if self.layouts is UNSET else tuple(entry.read() for entry in self.layouts)
        return PipelinePlan(
            schedule,
            self.scopes,
            self.recompute,
            self.owners,
            self.cost,
            self.ranks,
            layouts,
            () if self.layout_of is UNSET else self.layout_of,
            () if self.memory_limits is UNSET else self.memory_limits,
        )


class LayoutEntry(NamedTuple):
    """A `Candidate` of another mesh, or a baseline."""

    name: str
    seconds: Amount
    memory_bytes: Amount | None = None

    @classmethod
    def of(cls, layout: Candidate) -> LayoutEntry:
        return cls(layout.name, layout.seconds, layout.memory_bytes)

    def read(self) -> Candidate:
        return Candidate(*self)


class RivalEntry(_Part, frozen=True):
    """A `Candidate` that lost."""

    name: str
    cost: Cost | None
    reason: str
    links: AboveZero | None = None
    corrected_s: Amount | UnsetType = UNSET
    batch: AboveZero | UnsetType = UNSET
    memory_limit: AboveZero | UnsetType = UNSET

    @classmethod
    def of(cls, rival: Candidate) -> RivalEntry:
        corrected_s = _or_unset(rival.corrected_s)
        turns = _or_unset(rival.batch), _or_unset(rival.memory_limit)
        return cls(rival.name, rival.cost, rival.reason, rival.links, corrected_s, *turns)

    def read(self) -> Candidate:
        return dataclasses.replace(
            Candidate.priced(self.name, self.cost),
            reason=self.reason,
            links=self.links,
            corrected_s=_or_none(self.corrected_s),
            batch=_or_none(self.batch),
            memory_limit=_or_none(self.memory_limit),
        )


class RentalEntry(_Part, frozen=True):
    """A `Rental`."""

    name: str
    ranks: tuple[Count, ...]
    dollars_per_hour: Amount
    samples: AtLeastOne
    seconds: Amount | None
    reason: str = ""

    @classmethod
    def of(cls, rental: Rental) -> RentalEntry:
        return cls(**{**vars(rental), "seconds": _write_seconds(rental.seconds)})

    def read(self) -> Rental:
        fields = msgspec.structs.asdict(self)
        return Rental(**{**fields, "seconds": _read_seconds(self.seconds)})


class TrialEntry(_Part, frozen=True):
    """A `Candidate` that was run."""

    name: str
    predicted_s: Amount | None
    measured_s: Amount | None = None
    reason: str = ""
    corrected_s: Amount | UnsetType = UNSET

    @classmethod
    def of(cls, trial: Candidate) -> TrialEntry:
        return cls(
            trial.name,
            _write_seconds(trial.seconds),
            trial.measured_s,
            trial.reason,
            _or_unset(trial.corrected_s),
        )

    def read(self) -> Candidate:
        return Candidate(
            self.name,
            _read_seconds(self.predicted_s),
            measured_s=self.measured_s,
            corrected_s=_or_none(self.corrected_s),
            reason=self.reason,
        )


class CorrectionEntry(_Part, frozen=True):
    """A `Correction` of the plan's cluster."""

    work: AboveZero
    within: AboveZero
    between: AboveZero
    parts: dict[str, AboveZero] | UnsetType = UNSET

    @classmethod
    def of(cls, correction: Correction) -> CorrectionEntry:
        return cls(**{**vars(correction), "parts": dict(correction.parts) or UNSET})

    def read(self) -> Correction:
        parts = {} if self.parts is UNSET else self.parts
        return Correction(self.work, self.within, self.between, parts)


class AttemptEntry(NamedTuple):
    """A `Candidate` that a memory move has made."""

    move: str
    seconds: float | None
    memory_bytes: float
    fits: bool

    @classmethod
    def of(cls, made: Candidate) -> AttemptEntry:
        stored = made.memory_bytes or 0.0
        return cls(made.name, _write_seconds(made.seconds), stored, bool(made.fits))

    def read(self) -> Candidate:
        seconds = _read_seconds(self.seconds)
        return Candidate(self.move, seconds, self.memory_bytes, fits=self.fits)


class _CandidateEntry(Protocol):
    def read(self) -> Candidate: ...


def _read_candidates(
    entries: Iterable[_CandidateEntry] | UnsetType,
) -> tuple[Candidate, ...]:
    return () if entries is UNSET else tuple(entry.read() for entry in entries)


class PlanFile(_Part, frozen=True, kw_only=True, rename={"tfpar_version": "tfpar"}):
    """A plan as its file has it; most of it is so in the plan, too."""

    format: str
    version: int
    tfpar_version: str
    mesh: tuple[tuple[str, Whole], ...]
    batch_axes: tuple[str, ...]
    fingerprint: str
    planner: str
    cluster: dict[str, Any] | None
    cluster_fingerprint: str | None = None
    cost: Cost | None
    shares: dict[str, tuple[Count, ...]] = {}
    chunks: Whole = 1
    microbatches: Whole = 1
    batch_statistics: BatchStatisticsOf = "exact"
    stages: StagesEntry | None = None
    cut_short: bool = False
    attempts: tuple[AttemptEntry, ...] | UnsetType = UNSET
    passed_over: tuple[AboveZero, Count] | None = None
    rivals: tuple[RivalEntry, ...] = ()
    rentals: tuple[RentalEntry, ...] | UnsetType = UNSET
    trials: tuple[TrialEntry, ...] = ()
    correction: CorrectionEntry | UnsetType = UNSET
    layouts: tuple[LayoutEntry, ...]
    baselines: tuple[LayoutEntry, ...] = ()
    bound_s: Amount | UnsetType = UNSET
    constraints: tuple[str, ...]
    recompute: tuple[str, ...] = ()
    attention: AttentionMode | UnsetType = UNSET
    offloaded: OffloadPlan = OffloadPlan()
    variables: dict[str, VariableEntry]
    tensors: dict[str, SpecText]
    ops: dict[str, OpEntry] = {}
    report: dict[str, Any] | UnsetType | None = UNSET

    @classmethod
    def of(cls, plan: Plan) -> PlanFile:
        cluster, stages, found = plan.cluster, plan.stages, plan.findings
        changed: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "mesh": tuple(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
            "cluster": cluster and describe(cluster),
            "cluster_fingerprint": cluster and cluster.fingerprint(),
            "stages": stages and StagesEntry.of(stages),
            "cost": found.cost,
            "cut_short": found.cut_short,
            "attempts": tuple(map(AttemptEntry.of, found.attempts)) or UNSET,
            "passed_over": found.passed_over,
            "rivals": tuple(map(RivalEntry.of, found.rivals)),
            "rentals": tuple(map(RentalEntry.of, found.rentals)) or UNSET,
            "trials": tuple(map(TrialEntry.of, found.trials)),
            "correction": (
                UNSET if found.correction is None else CorrectionEntry.of(found.correction)
            ),
            "layouts": tuple(map(LayoutEntry.of, found.layouts)),
            "baselines": tuple(map(LayoutEntry.of, found.baselines)),
            "bound_s": _or_unset(found.bound_s),
            "attention": UNSET if plan.attention == "whole" else plan.attention,
            "variables": {name: VariableEntry.of(v) for name, v in sorted(plan.variables.items())},
            "tensors": {name: format_spec(spec) for name, spec in sorted(plan.tensors.items())},
            "ops": {name: OpEntry.of(op) for name, op in sorted(plan.ops.items())},
            "report": UNSET if plan.report is None else plan.report,
        }
        names = [name for name in cls.__struct_fields__ if name not in changed]
        return cls(**changed, **{name: getattr(plan, name) for name in names})

    def read(self) -> dict[str, Any]:
        """Read the fields of the plan."""
        fields = msgspec.structs.asdict(self)
        lists = ("attempts", "rivals", "trials", "layouts", "baselines")
        for name in ("format", "version", "cluster_fingerprint", "correction", "rentals", *lists):
            del fields[name]
        changed = {
            "mesh": _read_mesh(self.mesh),
            "cluster": self.cluster and cluster_of(self.cluster, "the plan's cluster"),
            "stages": self.stages and self.stages.read(),
            "findings": Findings(
                cost=fields.pop("cost"),
                passed_over=fields.pop("passed_over"),
                cut_short=fields.pop("cut_short"),
                bound_s=_or_none(fields.pop("bound_s")),
                correction=None if self.correction is UNSET else self.correction.read(),
                rentals=() if self.rentals is UNSET else tuple(r.read() for r in self.rentals),
                **{name: _read_candidates(getattr(self, name)) for name in lists},
            ),
            "attention": "whole" if self.attention is UNSET else self.attention,
            "variables": {name: entry.read() for name, entry in self.variables.items()},
            "tensors": {name: text.spec for name, text in self.tensors.items()},
            "ops": {name: entry.read() for name, entry in self.ops.items()},
            "report": None if self.report is UNSET else self.report,
        }
        return {**fields, **changed}
