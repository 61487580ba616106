"""Comparison of a step's parts with the prediction: collectives are timed, the rest is left.

What a step waits for data is known. The dearest kinds of its collectives run by themselves, on all
ranks of the plan at once and through the backend of the training, at the size that they have in the
step, as a calibration runs them (`jobs.calibration.timing`); how long the step then waits for them
follows from what it is predicted to wait (`expectation`). What is left of the measured step is the
work between them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.compile.local.reshard import COLLECTIVE_TYPES
from tfpar.cost.collectives import collective_seconds
from tfpar.cost.cost import Cost
from tfpar.ir.roles import BACKWARD, Roles, When
from tfpar.jobs.calibration.programs import chain_of, collective, operand_of
from tfpar.jobs.calibration.timing import Timer
from tfpar.planning.objective import UNCERTAINTY
from tfpar.plans import Plan
from tfpar.spec import Mesh
from tfpar.spec.names import GROUP_OPERATIONS
from tfpar.spec.quantities import format_seconds
from tfpar.tf.runtime.executable import Executable
from tfpar.tf.runtime.ranks import Ranks

MOST = 3
"""How many kinds of collectives are timed."""

EACH_S = 0.3
"""About how many seconds each of them may take, besides compiling what is timed."""

DATA = "waiting for data"
WORK = "all but collectives (compute)"
IN_STAGES = "all but collectives (compute, waiting for other stages)"
"""The part of a step that is left when the others are known."""

_LEAST_S = 1e-9  # that count as a prediction
_KINDS = {"".join(part.title() for part in kind.split("_")): kind for kind in GROUP_OPERATIONS}


class TimedCollective(NamedTuple):
    """A collective that was timed by itself.

    Attributes:
        mesh, axes: of each of the groups of ranks that ran it side by side.
        num_bytes: its payload.
        predicted_s, measured_s: seconds of one.
    """

    kind: str
    mesh: Mesh
    axes: tuple[int, ...]
    num_bytes: int
    predicted_s: float
    measured_s: float

    @property
    def name(self) -> str:
        """`all_reduce over data`."""
        return f"{self.kind} over {' x '.join(self.mesh.axis_names[a] for a in self.axes)}"

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""
        return self.measured_s / max(self.predicted_s, _LEAST_S)


class StepPart(NamedTuple):
    """A part of a step; seconds of the whole step.

    Attributes:
        measured_s: by what was timed; never below 0.
    """

    name: str
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""
        return self.measured_s / max(self.predicted_s, _LEAST_S)

    def as_dict(self) -> dict[str, Any]:
        """Return the part as files have it, in milliseconds."""
        return {
            "name": self.name,
            "predicted_ms": 1e3 * self.predicted_s,
            "measured_ms": 1e3 * self.measured_s,
        }


def time_collectives(plan: Plan, executable: Executable, ranks: Ranks) -> list[TimedCollective]:
    """Time the dearest kinds of collectives of a step; all ranks call it together.

    Args:
        plan: priced, that the step runs by.
        ranks: all of the job.
    """
    sizes, machines, expected = (
        _emitted(executable),
        machines_of(plan),
        ExpectedCollectives.of(plan, executable),
    )
    seconds = {
        kind: expected.waited_s.get(kind, 0.0) + expected.beside_s.get(kind, 0.0) for kind in sizes
    }
    kinds = sorted(seconds, key=lambda kind: -seconds[kind])[:MOST]
    if not kinds:
        return []
    groups = () if plan.stages is None else plan.stages.groups(plan.mesh.size)
    timer = Timer(ranks, EACH_S * len(kinds), groups)
    typical = {kind: round(statistics.fmean(sizes[kind])) for kind in kinds}
    return [_timed(timer, plan.mesh, *kind, typical[kind], machines) for kind in kinds]


def _timed(
    timer: Timer, mesh: Mesh, kind: str, axes: tuple[int, ...], num_bytes: int, cluster: Cluster
) -> TimedCollective:
    """A collective over axes of the timer's groups, of about `num_bytes`."""
    shape, num_bytes = operand_of(kind, mesh.group_size(axes), num_bytes)
    seconds = timer.seconds(chain_of(mesh, collective(kind, mesh, axes), [shape]), EACH_S)
    predicted_s = collective_seconds(kind, axes, num_bytes, mesh, cluster)
    return TimedCollective(kind, mesh, axes, num_bytes, predicted_s, seconds)


def parts_of(
    plan: Plan,
    executable: Executable,
    collectives: Sequence[TimedCollective],
    step_s: float,
    read_s: float,
) -> list[StepPart]:
    """The timed collectives of a step that took `step_s`, waiting for data, and all else of it.

    Collectives that were not timed count as predicted. All else is left out where the others alone
    would take longer than the step did: then they hide behind other work more than predicted.

    Args:
        read_s: how long it waited for its batch.
    """
    assert plan.cost is not None, "a plan that was priced"
    expected = ExpectedCollectives.of(plan, executable)
    predicted = expected.seconds({})
    measured = expected.seconds({(one.kind, one.axes): one.ratio for one in collectives})
    found = [StepPart(DATA, 0.0, read_s)]
    for one in collectives:
        key = one.kind, one.axes
        found.append(StepPart(one.name, predicted.get(key, 0.0), measured.get(key, 0.0)))
    own_s, left_s = work_s(plan.cost), step_s - read_s - sum(measured.values())
    if own_s > 0 and left_s > 0:
        found.append(StepPart(WORK if plan.stages is None else IN_STAGES, own_s, left_s))
    return found


def verdict(predicted_s: float, step_s: float, parts: Sequence[StepPart]) -> str:
    """One line: what was predicted, what was measured, and which part makes the difference."""
    text = f"predicted {format_seconds(predicted_s)} a step, measured {format_seconds(step_s)}"
    longer = step_s > predicted_s
    off = [part for part in parts if (part.ratio > 1) == longer]
    if abs(step_s / predicted_s - 1) <= UNCERTAINTY or not off:
        return text
    part = max(off, key=lambda part: abs(part.measured_s - part.predicted_s))
    if not part.predicted_s:
        advice = "" if part.name == DATA else "; `tfpar calibrate`"
        return f"{text}: {part.name} takes {format_seconds(part.measured_s)}{advice}"
    return f"{text}: {part.name} takes {_times(part.ratio)} times as long; `tfpar calibrate`"


def replanned_text(step_s: float, before_s: float, after_s: float, taken: bool) -> str:
    """Format the result of replanning, in a line, for a step that takes `step_s`.

    Predictions are those for the machines as they were measured.
    """
    choice = "takes a new plan" if taken else "keeps its plan"
    before, after = format_seconds(before_s), format_seconds(after_s)
    return (
        f"a step takes {format_seconds(step_s)}, and the model {choice}: on machines as measured, "
        f"the best plan found is predicted to take {after}, the one it had {before}"
    )


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _emitted(executable: Executable) -> Mapping[Kind, list[int]]:
    """Group the payloads of the program's collectives by kind and axes, packed ones as one."""
    found: dict[Kind, list[int]] = {}
    for kind, axes, num_bytes in _collectives(executable):
        found.setdefault((kind, axes), []).append(num_bytes)
    return found


def _collectives(executable: Executable) -> Iterator[tuple[str, tuple[int, ...], int]]:
    for graph in executable.local.graphs():
        for op in graph.ops:
            if op.type in COLLECTIVE_TYPES:
                sides = (sum(t.num_bytes for t in side) for side in (op.inputs, op.outputs))
                yield _KINDS[op.type], tuple(op.attrs["axes"]), max(sides)


# --- Predicted time of a step's collectives by kind ---

Kind = tuple[str, tuple[int, ...]]
"""A kind of collective, and the mesh axes that it runs over."""


def machines_of(plan: Plan) -> Cluster:
    """Return the cluster of a priced plan, in the order in which stages have its machines."""
    assert plan.cluster is not None, "a plan that was priced"
    return plan.cluster if plan.stages is None else plan.stages.placed(plan.cluster)


@dataclasses.dataclass(frozen=True)
class ExpectedCollectives:
    """Predicted seconds of the collectives of a step, by kind.

    Attributes:
        waited_s: of those that ops wait for.
        beside_s: of those that run beside the backward pass, which hides most of them.
        exposed_s: how long the update is predicted to wait for these.
        hideable_s: how much of them the backward pass can hide.
    """

    waited_s: Mapping[Kind, float]
    beside_s: Mapping[Kind, float]
    exposed_s: float
    hideable_s: float

    @classmethod
    def of(cls, plan: Plan, executable: Executable) -> ExpectedCollectives:
        """Predict the collectives of a step that runs by `plan`.

        The times of single collectives are scaled to what the plan expects of all, as some are
        packed or overlap.
        """
        cost, machines = plan.cost, machines_of(plan)
        assert cost is not None, "a plan that was priced"
        partitioned = executable.partitioned
        roles = Roles.of(partitioned.graph, executable.captured.gradient_tensors)
        alone: dict[bool, dict[Kind, float]] = {False: {}, True: {}}
        for moved in partitioned.communications():
            beside = moved.when(roles) is When.BESIDE
            kind = moved.kind, moved.axes
            seconds = collective_seconds(*kind, moved.num_bytes, plan.mesh, machines)
            alone[beside][kind] = alone[beside].get(kind, 0.0) + seconds
        return cls(
            _scaled(alone[False], max(sum(cost.communication_s) - cost.hidden_s, 0.0)),
            _scaled(alone[True], cost.gradients_s),
            cost.exposed_s,
            machines.overlap * cost.compute_s[BACKWARD],
        )

    def seconds(self, ratios: Mapping[Kind, float]) -> dict[Kind, float]:
        """Return how long a step waits for each kind if collectives take longer than predicted.

        Args:
            ratios: measured over predicted time of each kind; 1 for kinds that are not named.
        """
        waited = {kind: s * ratios.get(kind, 1.0) for kind, s in self.waited_s.items()}
        beside = {kind: s * ratios.get(kind, 1.0) for kind, s in self.beside_s.items()}
        together_s, predicted_s = sum(beside.values()), sum(self.beside_s.values())
        # What is longer hides first behind what is left of the backward pass.
        longer_s = max(together_s, self.hideable_s) - max(predicted_s, self.hideable_s)
        exposed = _scaled(beside, max(self.exposed_s + longer_s, 0.0))
        return {
            kind: waited.get(kind, 0.0) + exposed.get(kind, 0.0)
            for kind in dict.fromkeys([*waited, *exposed])
        }


def work_s(cost: Cost) -> float:
    """Return the predicted time of a step without the waits for collectives."""
    return cost.seconds - sum(cost.communication_s) + cost.hidden_s - cost.exposed_s


def _scaled(seconds: Mapping[Kind, float], together_s: float) -> dict[Kind, float]:
    """Scale times to another sum, in the same proportions."""
    now_s = sum(seconds.values())
    return {kind: s * together_s / now_s for kind, s in seconds.items()} if now_s else {}
