"""`Findings`: knowledge of a plan, none of which changes how it runs; `Candidate`: what else there
was."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tfpar.cluster.scaling import Correction
from tfpar.cost.cost import Cost

if TYPE_CHECKING:
    from tfpar.plans.plan import Plan


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to run a step.

    Attributes:
        name: what it is: stages, microbatches, schedule and mesh; of a baseline or a memory move,
            what that is called.
        seconds: of a step, as predicted; infinite where that is not known.
        memory_bytes: the most that a rank stores; None where that is not known.
        cost: what a step costs so by part, where that was kept.
        fits: whether it stores no more than it may; None where that was not looked at.
        measured_s: seconds of a step: the median of the steps that were run, of the slowest rank;
            None: it was not run.
        corrected_s: seconds of a step, as predicted for the cluster that all trials have corrected;
            None: it was not priced there.
        reason: why it was not planned, so that its cost is an estimate, if it has one; or why it
            could not be run.
        links: how many times as fast links would have to be for it to be taken; below 1, slower.
            None where that is not known, or no links are enough.
        find_links: finds that, once; None where it is known, or cannot be. Not saved
            (`Plan.with_turning_points`).
        batch: how many times as large the batch would have to be for it to be taken, or how many
            times fewer the devices; below 1, smaller, or more. None as of links.
        memory_limit: bytes that a device would have to have for it to be taken: at least, if it
            stores more than there is, else fewer. None as of links.
        plan: that it would be, where it was found now; not saved.
    """

    name: str
    seconds: float = math.inf
    memory_bytes: float | None = None
    cost: Cost | None = None
    fits: bool | None = None
    measured_s: float | None = None
    corrected_s: float | None = None
    reason: str = ""
    links: float | None = None
    batch: float | None = None
    memory_limit: float | None = None
    plan: Plan | None = dataclasses.field(default=None, compare=False, repr=False)
    find_links: Callable[[], float | None] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    def __getstate__(self) -> dict[str, object]:
        """Leave out what finds links: it holds a search, which does not leave its process."""
        return {**vars(self), "find_links": None}

    @classmethod
    def priced(cls, name: str, cost: Cost | None, *, plan: Plan | None = None) -> Candidate:
        """Return a candidate of this cost, with all its parts."""
        if cost is None:
            return cls(name, plan=plan)
        return cls(name, cost.seconds, cost.memory_bytes, cost, plan=plan)


@dataclasses.dataclass(frozen=True)
class Rental:
    """Devices that a step may rent, and what that costs.

    Attributes:
        name: in words, as `8 x A100-SXM4-80GB`.
        ranks: of the cluster, that they are.
        dollars_per_hour: of all of them.
        samples: of a step.
        seconds: of a step of the best plan on them; infinite where there is none.
        reason: why there is none, or none was searched.
    """

    name: str
    ranks: tuple[int, ...]
    dollars_per_hour: float
    samples: int
    seconds: float = math.inf
    reason: str = ""

    @property
    def dollars_per_million(self) -> float:
        """Dollars that a million samples cost."""
        if math.isinf(self.seconds):
            return math.inf
        return self.dollars_per_hour / 3600 * self.seconds / self.samples * 1e6


class Bound(NamedTuple):
    """Distance of a plan from the best one, at most.

    Attributes:
        seconds: that no plan takes less than.
        gap: by what part of it the plan takes longer; 0: it is the best.
    """

    seconds: float
    gap: float


@dataclasses.dataclass(frozen=True)
class Findings:
    """Knowledge of a plan that a search has found, and of others beside it.

    Attributes:
        cost: what a step costs on the plan's cluster; None where nothing was priced.
        layouts: the best plan on each other logical mesh, best first; where none was searched,
            since no plan there comes near, the seconds that one takes at least, and no memory.
        baselines: the step on one device, and in data parallelism.
        bound_s: seconds that no plan takes less than (`planning.lower_bound`): no plan at all, or
            where no stages were searched, none that runs the batch in one piece on all ranks. None
            where nothing was priced.
        rivals: what else `pipeline="auto"` found, the fastest first; then what it estimated, or
            found no plan for, with why.
        rentals: its devices, first, and others on which the step was planned, the cheapest first;
            empty where their rent is not known.
        trials: the plans that were run before one was taken, this one first.
        correction: of the plan's cluster, by what these took; None: nothing was measured.
        attempts: what was tried to make it fit into memory, in order, by the name of the move.
        passed_over: (seconds, collectives) of the fastest plan that was found, where a simpler one
            was taken that predictions cannot tell from it (`planning.intra_op.tie_breaking`).
        cut_short: the search, or an integer program of it, ended because its time was over, or the
            search was interrupted: there may be better plans.
    """

    cost: Cost | None = None
    layouts: tuple[Candidate, ...] = ()
    baselines: tuple[Candidate, ...] = ()
    bound_s: float | None = None
    rivals: tuple[Candidate, ...] = ()
    rentals: tuple[Rental, ...] = ()
    trials: tuple[Candidate, ...] = ()
    correction: Correction | None = None
    attempts: tuple[Candidate, ...] = ()
    passed_over: tuple[float, int] | None = None
    cut_short: bool = False
