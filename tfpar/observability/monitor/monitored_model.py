"""A model that trains, as a monitor sees it: what its steps do, and what ranks agree on."""

from __future__ import annotations

import dataclasses
import math
import statistics
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tfpar.cluster.description import Cluster, MeasuredCollective
from tfpar.cluster.scaling import AS_DESCRIBED, LinkSlowdown, scale_times, spans_nodes
from tfpar.cost.collectives import lines
from tfpar.jobs.calibration.links import axes_to_measure, collectives_of
from tfpar.jobs.calibration.timing import Timer
from tfpar.jobs.calibration.workload import ON_CPU, ON_GPU
from tfpar.observability.monitor.figures import StepVolume, Tally, Times, figures, peak_memory
from tfpar.observability.monitor.step_parts import (
    EACH_S,
    IN_STAGES,
    WORK,
    StepPart,
    parts_of,
    replanned_text,
    time_collectives,
    verdict,
)
from tfpar.plans import Plan
from tfpar.spec import Mesh
from tfpar.spec.quantities import format_seconds
from tfpar.tf.distributed.world import World, joined_world
from tfpar.tf.interop.keras_internals import print_msg
from tfpar.tf.keras.model import ParallelModel
from tfpar.tf.runtime.ranks import Ranks
from tfpar.tf.steps.replanning import ReplanResult, replan
from tfpar.tf.steps.shared_plan import SharedPlan

T = TypeVar("T")


class _Plain:
    """Stand-in for the compiled step of a model that is not parallel."""


class MonitoredModel:
    """A model that trains. Where ranks are processes, all call the same methods after the same
    step, and get the same answers.

    Attributes:
        state: what tfpar knows of the model; None if it runs on one device.
    """

    def __init__(self, state: ParallelModel | None) -> None:
        self.state = state
        self._works: weakref.WeakKeyDictionary[Any, StepVolume] = weakref.WeakKeyDictionary()
        self._samples: int | None = None  # of the batch that the plan was made for
        self._planned: Any = None  # what a step of such a batch runs
        self._version: tuple[SharedPlan, int] | None = None
        self._plain = _Plain()

    @property
    def world(self) -> World | None:
        """The processes that train the model together."""
        return None if self.state is None else self.state.world

    @property
    def priced(self) -> Plan | None:
        """The plan in force, if it was priced for some machines."""
        plan = None if self.state is None else self.state.plan
        return None if plan is None or plan.cost is None or plan.cluster is None else plan

    def first(self, what: str, make: Callable[[], T]) -> T | None:
        """Make a value on the first rank; None on the others. All ranks raise its error."""
        world, made = self.world, []
        if world is None:
            job = joined_world()  # processes that train alike, each for itself
            return make() if job is None or job.rank == 0 else None
        world.first(what, lambda: made.append(make()))
        return made[0] if made else None

    # --- steps -------------------------------------------------------------------------

    def ran(self, steps: int) -> Sequence[Any]:
        """Return what ran in each step of the last call of the train function.

        Of a model on one device only the number of steps is known.
        """
        return [self._plain] * steps if self.state is None else self.state.ran

    @property
    def read_s(self) -> float:
        """Seconds that the last call waited for data; 0 where it is not known."""
        return 0.0 if self.state is None else self.state.read_s

    def learn(self, ran: Sequence[Any]) -> None:
        """Find out what steps do that ran for the first time."""
        state = self.state
        if state is None or state.plan is None or not ran:
            return
        new = [one for one in dict.fromkeys(ran) if one not in self._works]
        self._works.update({one: StepVolume.of(one, state.plan) for one in new})
        program = state.program
        if (program, program.version) != self._version:
            self._version, self._planned = (program, program.version), None
            self._samples = program.batch_size or self._works[ran[0]].samples
        for one in new:
            if self._works[one].samples == self._samples:
                self._planned = one

    def agreed(self, tally: Tally) -> Times:
        """Return the times of steps on the slowest rank."""
        read_s = tally.read_s / tally.steps if tally.steps else math.nan
        own = tally.step_s, tally.step_s_of(self._planned), read_s
        return Times(*self._most("times of steps", own))

    def figures(self, tally: Tally) -> dict[str, float]:
        """Return figures of steps, with the largest memory of a rank, by names in Keras's logs."""
        state = self.state
        ranks = None if state is None else state.session.ranks
        devices = [] if ranks is None else [ranks.devices[rank] for rank in ranks.local]
        name, own = peak_memory(devices)
        (peak,) = self._most("memory", [own])
        plan = None if state is None else state.plan
        return {**figures(self.agreed(tally), tally.ran, self._works, plan), name: peak}

    def _most(self, what: str, own: Sequence[float]) -> Sequence[float]:
        """The largest of what all ranks say, one by one."""
        world = self.world
        if world is None:
            return own
        with world.at(f"comparing {what}"):
            told = world.exchange.messages(list(own))
        return [max(some) for some in zip(*told, strict=True)]

    def compare(self, ran: Sequence[Any]) -> None:
        """Check that ranks agree on what they hold in common, after the step that ran last.

        Raises:
            RuntimeMismatchError: names the first variable and ranks that differ.
        """
        if self.state is not None and ran:
            ran[-1].check()

    # --- against the plan --------------------------------------------------------------

    def tell(self, text: str, below_bar: bool = False) -> None:
        """Show the user a line, once.

        Args:
            below_bar: a progress bar is at the end of the line that is shown last.
        """
        session, world = None if self.state is None else self.state.session, self.world
        if (
            below_bar
            and (session is None or session.options.verbose)
            and not (world and world.rank)
        ):
            print_msg("")
        if session is None:
            print_msg(f"tfpar: {text}")
        else:
            session.tell(text)

    def verdict(self, tally: Tally) -> tuple[str, list[StepPart]]:
        """One line on what was predicted and measured, and the parts of a step; none where nothing
        was predicted."""
        state, plan, times = self.state, self.priced, self.agreed(tally)
        measured = f"measured {format_seconds(times.step_s)} a step"
        if state is None:
            return f"{measured}, on one device", []
        if plan is None or math.isnan(times.planned_s):
            return f"{measured}; nothing was predicted for it", []
        assert plan.cost is not None
        parts = self._parts(state, plan, times)
        return verdict(plan.cost.seconds, times.planned_s, parts), parts

    def plan_anew(self, times: Times, gain: float) -> ReplanResult | None:
        """Replan the model for its machines as they are, and take the new plan if it gains enough.

        Args:
            times: of steps by the plan in force.
            gain: see `tf.steps.replanning.replan`.
        """
        state, plan = self.state, self.priced
        if state is None or plan is None or state.trained_by is None:
            return None
        assert plan.cluster is not None
        session = state.session
        parts, step_s = self._parts(state, plan, times), times.planned_s
        work = next((part.ratio for part in parts if part.name in (WORK, IN_STAGES)), 1.0)
        links = measure_links(session.mesh, session.ranks)
        machines = correct_cluster(plan.cluster, links, work)
        found = replan(state.trained_by, self._planned, machines, step_s, gain)
        if found is not None:
            self.tell(replanned_text(step_s, found.before_s, found.after_s, found.taken))
        return found

    def _parts(self, state: ParallelModel, plan: Plan, times: Times) -> list[StepPart]:
        collectives = time_collectives(plan, self._planned, state.session.ranks)
        return parts_of(plan, self._planned, collectives, times.planned_s, times.read_s)


# --- Correction of a cluster's figures by what a training measured ---

_LEAST = 1e-3  # how many times as long anything takes: a time of nothing is noise


def measure_links(mesh: Mesh, ranks: Ranks) -> list[MeasuredCollective]:
    """All-reduces of two sizes along each axis that a search may lay over the ranks, timed as a
    calibration times them; all ranks call it together.

    Args:
        mesh: all ranks, in their physical shape.
    """
    sizes = ON_GPU if "GPU" in ranks.devices[0] else ON_CPU
    sizes = dataclasses.replace(sizes, payloads=sizes.payloads[:2])
    timer = Timer(ranks, EACH_S * len(sizes.payloads) * len(axes_to_measure(mesh)))
    return collectives_of(mesh, timer, sizes, 0.0, lambda what: None, kinds=("all_reduce",))


def correct_cluster(cluster: Cluster, found: Sequence[MeasuredCollective], work: float) -> Cluster:
    """`cluster` with the collectives that were found, and all else in proportion.

    What was not measured starts, and moves a byte, as many times as slowly as described as
    all-reduces do over the same kind of links, within nodes or between them.

    Args:
        found: all-reduces, along axes of meshes of all ranks.
        work: how many times as long as described the work between collectives takes.
    """
    within, between = (
        _mean(
            [
                _pace(one, cluster)
                for one in found
                if not one.group and spans_nodes(cluster, one.mesh, one.axis) == spans
            ]
        )
        for spans in (False, True)
    )
    changed = scale_times(cluster, work=work, within=within, between=between)
    known = {(one.kind, one.mesh, one.axis) for one in found}
    kept = [m for m in changed.measured if (m.kind, m.mesh, m.axis) not in known]
    return dataclasses.replace(changed, measured=(*found, *kept))


def _pace(one: MeasuredCollective, cluster: Cluster) -> LinkSlowdown:
    """Return the slowdown of a measured collective against the described algorithm.

    Of several algorithms it is the one that is fastest for large payloads.
    """
    described = lines(one.kind, (one.axis,), Mesh.of(one.mesh), cluster)
    start_s, per_byte_s = min(described, key=lambda line: line[1])
    start = max(one.startup_s / start_s, _LEAST) if start_s else 1.0
    return LinkSlowdown(start, max(1.0 / (one.bandwidth * per_byte_s), _LEAST))


def _mean(paces: Sequence[LinkSlowdown]) -> LinkSlowdown:
    """Average the slowdowns of links of a type; without any, links are as described."""
    if not paces:
        return AS_DESCRIBED
    start, byte = (statistics.geometric_mean(some) for some in zip(*paces, strict=True))
    return LinkSlowdown(start, byte)
