"""`Pipeline`: a user's request for a pipeline; and the ranks of its actors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal

from tfpar.pipeline.generators import FAMILIES, check_passes, generate, stages_of_each
from tfpar.pipeline.recompute import RecomputeOf, read_recompute, recomputes
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.statistics import BATCH_STATISTICS, BatchStatisticsOf
from tfpar.pipeline.tasks import LAST
from tfpar.spec import ArgumentError, Mesh, SpecError, arguments
from tfpar.spec.arguments import argument_error, check_choice, finite, integer, shown

AUTO: Literal["auto"] = "auto"
"""In place of a `Pipeline`: the planner decides whether there is one, and which. In place of a
schedule's name: it is picked by simulation."""

ENUMERATE = "enumerate"

SEARCHES = (ENUMERATE, "anneal", "exhaustive", "alpa", "megatron", "random")
"""Searches for a pipeline, by name."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Pipeline in which a step runs: stages, microbatches and a schedule.

        Pipeline(stages=2, microbatches=8)                     # 1F1B
        Pipeline(stages=4, microbatches=8, schedule="zb-v")    # eight stages, two on each
        Pipeline(stages=4, microbatches=8, schedule="auto")    # the fastest by prediction
        Pipeline(schedule=tap.Schedule.load("mine.csv"))
        Pipeline(ranks=[[0], [1, 2]], microbatches=8)          # two stages, on 1 and on 2 ranks
        Pipeline(microbatches=4)                               # accumulates gradients
        Pipeline("auto", search="anneal")                      # whatever is best, or none

    Args:
        stages: number of actors, each the ranks of one stage or of `virtual_stages`. By default as
            many as a given schedule has, else 1. `"auto"`: the planner decides whether there are
            any, and everything else but `tolerance`, `search` and `seed`.
        microbatches: in which each rank's batch is cut; may be left out with a given schedule.
        schedule: `"gpipe"`, `"1f1b"`, `"interleaved"`, `"zb-h1"`, `"zb-v"`, or a `Schedule`.
            `"auto"`: the fastest in simulation for the stages that are found, among those that fit
            into memory; orders made from the durations of the stages compete, too.
        virtual_stages: of each actor; by default 2 with `"interleaved"` and `"zb-v"`, else 1. A
            given schedule says that itself.
        recompute: the backward pass of a stage runs its forward pass again; only what the stage
            reads of others is kept for each microbatch. True: of all stages; a list: of those with
            these numbers, virtual ones counted. Not of stages whose backward pass the schedule
            halves: each half would run it again.
        batch_statistics: what a layer with running averages, such as batch normalisation, takes
            its mean and variance over in training. `"exact"`: the batch, so that numbers are those
            of one device; microbatches wait for each other, and all their activations are stored.
            `"microbatch"`: each microbatch, of all ranks ("ghost batches"). That is another model.
            Running averages move once a step, by the average over microbatches.
        ranks: those of each actor, which may be any, and as many as each needs; all ranks of the
            job, each once. By default as many for each as can be, in their order or as is fastest.
        tolerance: by how much, as a part of the average, a stage may compute longer than an even
            share of the work, so that stages send each other less (Rhino §5.2): 0 balances them as
            well as can be. By default 0.1, or up to 0.5 where a link between stages limits the
            step. A stage takes no less than its longest op, such as a loop.
        search: how `"auto"` looks for a pipeline. `"enumerate"`: the numbers of stages that may be
            fastest, with the layout that the planner finds best. The others choose stages, layout,
            placement and microbatches together, by what the step's layers cost in each layout:
            `"anneal"` by simulated annealing (auto3d), `"exhaustive"` all of them, and, to compare
            with, `"random"`, `"alpa"` (Alpa's two levels) and `"megatron"` (Megatron-LM's
            heuristic). What they find best is planned in full.
        seed: of `"anneal"` and `"random"`: the same seed finds the same plan.

    Raises:
        ArgumentError: of another type or out of range, or not what the given schedule has; names
            it.
    """

    stages: int | Literal["auto"] | None = None
    microbatches: int | None = None
    schedule: str | Schedule = "1f1b"
    virtual_stages: int | None = None
    recompute: RecomputeOf = False
    batch_statistics: BatchStatisticsOf = "exact"
    ranks: Sequence[Sequence[int]] | None = None
    tolerance: float | None = None
    search: str = ENUMERATE
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("batch_statistics", self.batch_statistics, BATCH_STATISTICS)
        check_choice("search", self.search, SEARCHES)
        if self.tolerance is not None:
            object.__setattr__(self, "tolerance", finite("tolerance", self.tolerance))
        integer("seed", self.seed, 0)
        if self.is_searched:
            self._check_searched()
            return
        self._check_ranks()
        for name in ("search", "seed"):
            if getattr(self, name) != _DEFAULTS[name]:
                raise ArgumentError(
                    f"{name} is for a pipeline that is searched: give stages='auto' with it, or "
                    f"leave it out."
                )
        for name in ("stages", "microbatches"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 1)
        if isinstance(self.schedule, Schedule):
            self._check_given(self.schedule)
            self._check_recomputed()
            return
        names = [*FAMILIES, AUTO]
        if not isinstance(self.schedule, str) or self.schedule not in names:
            expected = f"one of {', '.join(map(repr, names))}, or a tap.Schedule"
            raise argument_error("schedule", self.schedule, expected)
        if self.picks_schedule and self.virtual_stages is not None:
            integer("virtual_stages", self.virtual_stages, 1)
        elif not self.picks_schedule:
            stages_of_each(self.schedule, self.virtual_stages)
        integer("microbatches", self.microbatches, 1)
        self._check_recomputed()

    def _check_searched(self) -> None:
        given = [
            name
            for name, default in _DEFAULTS.items()
            if name not in ("stages", "tolerance", "search", "seed")
            and not _is(getattr(self, name), default)
        ]
        if given:
            raise ArgumentError(
                f"stages='auto' finds everything else itself: leave out {' and '.join(given)}, or "
                f"give a number of stages."
            )
        if self.seed and self.search not in _DRAWING:
            raise ArgumentError(
                f"search={self.search!r} draws nothing at random: leave out seed, or give "
                f"search='anneal'."
            )

    def _check_ranks(self) -> None:
        if self.ranks is None:
            return
        if not isinstance(self.ranks, list | tuple):
            expected = "a list with the ranks of each stage, such as [[0], [1, 2]]"
            raise argument_error("ranks", self.ranks, expected)
        groups = tuple(tuple(sorted(arguments.instances("ranks", g, int))) for g in self.ranks)
        named = [rank for group in groups for rank in group]
        if not all(groups) or sorted(named) != list(range(len(named))):
            raise ArgumentError(
                f"ranks={shown(self.ranks)} is not the ranks of each stage: each has one at least, "
                f"and all ranks from 0 on are in one of them."
            )
        object.__setattr__(self, "ranks", groups)
        count = self.schedule.num_actors if isinstance(self.schedule, Schedule) else self.stages
        if count is None:
            object.__setattr__(self, "stages", len(groups))
        elif count != len(groups):
            raise argument_error("ranks", self.ranks, f"those of {count} stages, one list for each")

    def sizes(self, num_ranks: int) -> tuple[int, ...]:
        """Return the number of ranks of each actor, of so many of the job: where the pipeline does
        not say, as equal as they can be, and more for the first actors.

        Raises:
            SpecError: other ranks than those that the pipeline names, or fewer than actors.
        """
        if self.ranks is not None:
            sizes = tuple(map(len, self.ranks))
            if sum(sizes) != num_ranks:
                raise SpecError(
                    f"The pipeline's stages have {' + '.join(map(str, sizes))} ranks; the mesh has "
                    f"{num_ranks}."
                )
            return sizes
        each, more = divmod(num_ranks, self.num_actors)
        if not each:
            raise SpecError(
                f"The pipeline puts its stages on {self.num_actors} sets of ranks; the mesh "
                f"has {num_ranks}. Ask for fewer stages, or use more ranks."
            )
        return tuple(each + (actor < more) for actor in range(self.num_actors))

    @property
    def rank_order(self) -> tuple[int, ...] | None:
        """The ranks that it is given, actor by actor; None if it is given none."""
        if self.ranks is None:
            return None
        return tuple(rank for group in self.ranks for rank in group)

    def stage_mesh(self, mesh: Mesh) -> Mesh:
        """Return the mesh of the first actor, of all ranks that are in `mesh`.

        Raises:
            SpecError: as of `sizes`.
        """
        return mesh.sized(self.sizes(mesh.size)[0])

    @property
    def is_searched(self) -> bool:
        """Whether the planner decides about everything."""
        return _is(self.stages, AUTO)

    @property
    def picks_schedule(self) -> bool:
        """Whether the schedule is picked when it is known what the stages take."""
        return _is(self.schedule, AUTO)

    @functools.cached_property
    def kept_part(self) -> float:
        """The part of a stage's activations of the whole batch that a rank stores at most at the
        same time."""
        if self._is_plain:
            first = next((s for s in range(self.num_stages) if not self._recomputes(s)), None)
            most = 1 if first is None else min(self.num_microbatches, self.num_actors - first)
            return most / self.num_microbatches
        order, most = self.order, 1
        for tasks in order.orders:
            storing = [t for t in tasks if not self._recomputes(t.stage)]
            kept = itertools.accumulate(+1 if t.kind == "F" else -(t.kind in LAST) for t in storing)
            most = max((most, *kept))
        return most * order.num_actors / (order.num_stages * order.num_microbatches)

    def _recomputes(self, stage: int) -> bool:
        return recomputes(self.recompute, stage)

    @property
    def _is_plain(self) -> bool:
        """Whether its order is 1F1B, all of which is known without listing its tasks; so is that
        of one that is picked later, for a stage on each actor."""
        picked = self.picks_schedule and self.virtual_stages in (None, 1)
        return picked or _is(self.schedule, "1f1b")

    @property
    def num_actors(self) -> int:
        """Actors of its order."""
        return int(self.stages or 1) if self._is_plain else self.order.num_actors

    @property
    def num_stages(self) -> int:
        """Stages of its order."""
        return self.num_actors if self._is_plain else self.order.num_stages

    @property
    def num_microbatches(self) -> int:
        """Microbatches of its order."""
        return int(self.microbatches or 1) if self._is_plain else self.order.num_microbatches

    def _check_recomputed(self) -> None:
        if self._is_plain:
            check_passes(self.num_actors, self.num_microbatches)
        recompute = read_recompute("recompute", self.recompute, self.num_stages)
        object.__setattr__(self, "recompute", recompute)
        if self._is_plain or not recompute:
            return
        halved = [*filter(self._recomputes, sorted(self.order.halved_stages))]
        if halved:
            raise ArgumentError(
                f"Give recompute={recompute} or a schedule with halves of the backward pass, such "
                f"as {halved[0]}I0, not both: each half would run the forward pass again. '1f1b' "
                f"has whole ones."
            )

    def _check_given(self, schedule: Schedule) -> None:
        if self.virtual_stages is not None:
            raise ArgumentError(
                "Give a Schedule or virtual_stages, not both: a schedule says which stages lie "
                "together."
            )
        for name, asked, found in (
            ("stages", self.stages, schedule.num_actors),
            ("microbatches", self.microbatches, schedule.num_microbatches),
        ):
            if asked is not None and asked != found:
                has = "lines (sets of ranks)" if name == "stages" else name
                raise argument_error(name, asked, f"{found}: the schedule has {found} {has}")

    @functools.cached_property
    def order(self) -> Schedule:
        """Schedule of the pipeline, as given or as its name says. Of one that is picked later, a
        schedule with its stages, actors and microbatches."""
        if isinstance(self.schedule, Schedule):
            return self.schedule
        if isinstance(self.stages, str):
            raise ArgumentError("A pipeline that is searched for has no order yet.")
        microbatches, name = integer("microbatches", self.microbatches, 1), self.schedule
        if self.picks_schedule:
            name = "1f1b" if self.virtual_stages in (None, 1) else "gpipe"
        return generate(name, self.stages or 1, microbatches, self.virtual_stages)


def _is(given: object, value: object) -> bool:
    """Whether `given` is that value. Arrays and tensors, which compare by entry, are not."""
    return type(given) is type(value) and given == value


_DRAWING = "anneal", "random"
"""The searches that draw at random."""

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Pipeline)}


# --- ranks ----------------------------------------------------------------------------------


def groups_of(sizes: Sequence[int], ranks: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each actor.

    Args:
        sizes: the number of ranks of each.
        ranks: of the job, actor by actor; by default in their order.
    """
    ends = [*itertools.accumulate(sizes)]
    ranks = ranks or range(sum(sizes))
    return tuple(tuple(ranks[end - size : end]) for size, end in zip(sizes, ends, strict=True))
