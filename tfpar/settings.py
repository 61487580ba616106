"""Settings of `auto_parallel` and its kin: the user's options, read in one place to one form each.

`Settings.of` takes what users give, and makes of it one form each, or says at once what is wrong.
What then depends on this machine (the default mesh, the cluster) is for the session to find.
"""

from __future__ import annotations

import dataclasses
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tfpar.cluster.description import Cluster
from tfpar.cluster.units import parse
from tfpar.compile.local.chunks import CHUNKS
from tfpar.constraints import Constraint, ContextParallel
from tfpar.constraints.constraint_types import check_pattern
from tfpar.constraints.keras_distribution import read_constraints, read_mesh
from tfpar.constraints.stages import check_stages
from tfpar.ir.roles import COMPRESSIONS
from tfpar.pipeline import AUTO, Pipeline, Schedule
from tfpar.pipeline.generators import generate
from tfpar.pipeline.pipeline import ENUMERATE
from tfpar.pipeline.recompute import RecomputeOf
from tfpar.pipeline.statistics import BatchStatisticsOf
from tfpar.planning.cache import PlanCache
from tfpar.planning.inter_op.stages.limits import NO_LIMITS, StageLimits
from tfpar.planning.intra_op.auto import AutoPlanner
from tfpar.planning.intra_op.planners import find_planner, make_budget
from tfpar.planning.objective import OBJECTIVES, Budget, ObjectiveName, Trials
from tfpar.planning.problem import Planner
from tfpar.plans import Offload, Plan
from tfpar.plans.attention import ATTENTION_MODES, AttentionMode
from tfpar.plans.equivalence import execution_key
from tfpar.spec import ArgumentError, Mesh
from tfpar.spec.arguments import (
    argument_error,
    check_choice,
    check_list,
    flag,
    integer,
    optional,
    path,
    written,
)

if TYPE_CHECKING:
    from tfpar.options import Options

PLAN_CACHE = "TFPAR_PLAN_CACHE"
"""The environment variable that names the folder of plans where nothing else does."""

MeshLike = Mesh | Mapping[str, int] | Sequence[int] | int
ConstraintsLike = Constraint | Mapping[str, Any] | Sequence[Constraint]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the user in one form each; see `Options` for their meaning.

    Attributes:
        mesh: None for all ranks that there are, or the plan's.
        budget: of a search.
        cluster: not looked up yet: presets are fitted to the mesh.
        memory_limit, bucket_bytes: in bytes.
        compression: the dtype in which gradients travel; None: their own.
        pipeline: the stages and microbatches of a training step; None: as the plan says; AUTO: as
            the planner finds.
        pipeline_search: how, where it is not by enumeration.
        limits: of its stages.
    """

    mesh: Mesh | None = None
    constraints: tuple[Constraint, ...] = ()
    plan: Plan | None = None
    planner: Planner | None = dataclasses.field(default_factory=AutoPlanner)
    budget: Budget = Budget()
    objective: ObjectiveName = "step_time"
    cluster: Cluster | Mapping[str, Any] | str | None = None
    plan_cache: PlanCache | None = None
    memory_limit: float | None = None
    bucket_bytes: int | None = None
    strict: bool = False
    compression: str | None = None
    recompute: bool | tuple[str, ...] | None = None
    attention: AttentionMode | None = None
    offload: Offload | None = None
    chunks: int | None = None
    pipeline: Pipeline | Literal["auto"] | None = None
    pipeline_search: Pipeline | None = None
    limits: StageLimits = NO_LIMITS
    early_collectives: bool | None = None
    trials: Trials | None = None
    verbose: bool = True

    @classmethod
    def of(
        cls, mesh: MeshLike | None, constraints: ConstraintsLike | None, options: Options
    ) -> Settings:
        """Read what a user gives.

        Raises:
            ArgumentError: names the argument and what was given.
        """
        own_mesh, own_constraints, options = _with_distribution(mesh, constraints, options)
        planner = find_planner(options.planner, options.level)
        settings = cls(
            mesh=own_mesh,
            constraints=own_constraints,
            plan=optional(_plan, "plan", options.plan),
            planner=planner,
            budget=make_budget(planner, options.search_seconds),
            objective=check_choice("objective", options.objective, OBJECTIVES),
            cluster=optional(_cluster, "cluster", options.cluster),
            plan_cache=_plan_cache("plan_cache", options.plan_cache),
            memory_limit=optional(_size_of_all, "memory_limit", options.memory_limit),
            bucket_bytes=optional(_whole_size, "bucket_bytes", options.bucket_bytes),
            strict=flag("strict", options.strict),
            compression=optional(_carried_as, "compression", options.compression),
            recompute=optional(_recompute, "recompute", options.recompute),
            attention=_attention("attention", options.attention, own_constraints),
            offload=optional(_offload, "offload", options.offload),
            chunks=optional(_chunks, "chunks", options.chunks),
            pipeline=optional(_pipeline, "pipeline", options.pipeline),
            pipeline_search=_pipeline_search(options.pipeline),
            limits=_limits(options.pipeline, options.memory_limit),
            early_collectives=optional(flag, "early_collectives", options.early_collectives),
            trials=optional(_trials, "trials", options.trials),
            verbose=_verbose("verbose", options.verbose),
        )
        if settings.pipeline == AUTO:
            if planner is None:
                raise ArgumentError("pipeline='auto' needs a planner, e.g. planner='tap'.")
        else:
            check_stages(settings.constraints, settings.schedule.num_stages)
        if settings.plan is not None and settings.constraints:
            raise ArgumentError(
                "Give a plan or constraints, not both: a plan holds its constraints."
            )
        if settings.plan is not None and settings.recompute is not None:
            raise ArgumentError(
                "Give a plan or recompute, not both: a plan holds what it recomputes."
            )
        if settings.plan is not None and settings.attention is not None:
            raise ArgumentError(
                "Give a plan or attention, not both: a plan holds how attentions run."
            )
        if settings.plan is not None and settings.offload is not None:
            raise ArgumentError("Give a plan or offload, not both: a plan holds what it offloads.")
        plan = settings.plan
        if settings.trials is not None and (plan is not None or planner is None):
            raise ArgumentError(
                "Give trials where plans are searched: with a plan, or planner=None, there is "
                "nothing to choose from."
            )
        if settings.chunks and (
            settings.pipeline is not None or (plan is not None and plan.in_microbatches)
        ):
            raise ArgumentError(
                "Give chunks or a pipeline (a plan may have one), not both: both cut the batch of "
                "a rank, and one runs what the other keeps apart."
            )
        _check_objective(settings)
        pipeline = settings.given_pipeline
        if plan is not None and pipeline is not None:
            _check_agreed(plan, pipeline)
        elif pipeline is not None and pipeline.picks_schedule and settings.planner is None:
            raise ArgumentError(
                "Give schedule='auto' or planner=None, not both: a schedule is picked by what the "
                "plan of each stage is predicted to take."
            )
        return settings

    def described(self) -> dict[str, str]:
        """Describe the options that have to be equal on all ranks of a job, as text by name.

        Not a pipeline, which is compared task by task, nor what concerns users, or the rank alone
        that plans for all.
        """
        names = (
            *(
                "objective",
                "memory_limit",
                "limits",
                "bucket_bytes",
                "strict",
                "compression",
                "recompute",
                "attention",
                "offload",
            ),
            *("chunks", "early_collectives", "trials"),
        )
        return {
            "mesh": str(self.mesh),
            "constraints": f"[{', '.join(map(str, self.constraints))}]",
            "plan": "None"
            if self.plan is None
            else _identified("a Plan", execution_key(self.plan)),
            "planner": "None" if self.planner is None else repr(self.planner.name),
            "cluster": _cluster_described(self.cluster),
            **{name: repr(getattr(self, name)) for name in names},
        }

    @property
    def given_pipeline(self) -> Pipeline | None:
        """The pipeline, where it is not for the planner to find."""
        return None if self.pipeline == AUTO else self.pipeline

    @property
    def schedule(self) -> Schedule:
        """Schedule of the given pipeline, or the plan's; else of one stage and microbatch."""
        if self.given_pipeline is not None:
            return self.given_pipeline.order
        if self.plan is None or self.plan.stages is None:
            return generate("1f1b", 1, 1 if self.plan is None else self.plan.microbatches)
        return self.plan.stages.schedule

    @property
    def picks_schedule(self) -> bool:
        """Whether the schedule is picked when a step is planned; until then it is a stand-in."""
        asked = self.given_pipeline
        return self.plan is None and asked is not None and asked.picks_schedule

    @property
    def recomputed_stages(self) -> RecomputeOf:
        """The stages whose backward pass runs their forward pass again."""
        asked = self.given_pipeline or (self.plan and self.plan.stages)
        return asked.recompute if asked else False

    @property
    def batch_statistics(self) -> BatchStatisticsOf:
        """Batch statistics of normalisations: exact, or those of a microbatch."""
        asked = self.given_pipeline or self.plan
        return "exact" if asked is None else asked.batch_statistics


def _with_distribution(
    mesh: Any, constraints: Any, options: Options
) -> tuple[Mesh | None, tuple[Constraint, ...], Options]:
    """Read mesh and constraints, also where they are objects of `keras.distribution`.

    A distribution says of each weight how it is laid out, so that nothing is left to search unless
    a planner or a pipeline is asked for.

    Raises:
        ArgumentError: they have meshes that differ.
    """
    ranks, fixed = read_mesh(mesh), read_constraints(constraints)
    whole = ranks.mesh or fixed.mesh
    if fixed.lays_out_all and whole != fixed.mesh:
        raise ArgumentError(
            f"The mesh is {whole}, but the constraints are for the mesh {fixed.mesh}. Give the "
            f"same to both, or leave out mesh."
        )
    by_default = isinstance(options.planner, str) and options.planner == "auto"
    undecided = by_default and options.pipeline is None and options.plan is None
    if undecided and (ranks.lays_out_all or fixed.lays_out_all):
        options = dataclasses.replace(options, planner=None)
    return whole, ranks.constraints + fixed.constraints, options


def _check_objective(settings: Settings) -> None:
    """Raise ArgumentError where other options leave nothing to be decided by the objective."""
    objective = settings.objective
    if objective == OBJECTIVES[0]:
        return
    if settings.plan is not None or settings.planner is None:
        raise ArgumentError(
            f"Give objective={objective!r} where plans are searched: with a plan, or planner=None, "
            f"there is nothing to choose from."
        )
    if objective == "latency" and settings.pipeline_search is not None:
        raise ArgumentError(
            f"search={settings.pipeline_search.search!r} searches pipelines of training steps, by "
            f"tables of forward and backward passes. For objective='latency' give pipeline='auto', "
            f"which prices forward passes."
        )


def _plan(name: str, value: Any) -> Plan:
    if isinstance(value, Plan):
        return value
    return Plan.load(path(name, value, "a Plan, or the path of a plan file"))


def _cluster(name: str, value: Any) -> Cluster | Mapping[str, Any] | str:
    if isinstance(value, Cluster | Mapping):
        return value
    return path(name, value, "a Cluster, the name of a preset, or the path of a cluster file")


def _plan_cache(name: str, value: Any) -> PlanCache | None:
    """Return the cache in a folder, by default that of the environment, if any."""
    folder = optional(path, name, value) or os.environ.get(PLAN_CACHE)
    return PlanCache(folder) if folder else None


def _size(name: str, value: Any, expected: str = "a size above 0 such as '16 GiB'") -> float:
    """Parse bytes, as `"16 GiB"` or a number."""
    try:
        size = parse(value, "bytes")
    except ValueError:
        size = math.nan
    if not size > 0:
        raise argument_error(name, value, f"{expected}, or a number of bytes")
    return size


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _size_of_all(name: str, value: Any) -> float | None:
    """Parse the limit of all devices; None where there is one for each stage."""
    return None if _is_list(value) else _size(name, value)


def _limits(pipeline: Any, memory_limit: Any) -> StageLimits:
    """Read the limits of stages.

    Raises:
        ArgumentError: not a limit of memory for each set of ranks.
    """
    tolerance = pipeline.tolerance if isinstance(pipeline, Pipeline) else None
    if not _is_list(memory_limit):
        return StageLimits(tolerance)
    if not isinstance(pipeline, Pipeline) or pipeline.is_searched:
        raise argument_error(
            "memory_limit",
            memory_limit,
            "a size, or, with a tap.Pipeline of a number of stages, one for each of them",
        )
    sets = pipeline.order.num_actors
    if len(memory_limit) != sets:
        expected = f"a size, or a list of {sets}, as many as the pipeline has sets of ranks"
        raise argument_error("memory_limit", memory_limit, expected)
    sizes = tuple(_size(f"memory_limit[{i}]", size) for i, size in enumerate(memory_limit))
    return StageLimits(tolerance, sizes)


def _whole_size(name: str, value: Any) -> int:
    """Parse a size of at least a byte, and not infinite."""
    expected = "a size such as '32 MiB', of 1 byte or more"
    size = _size(name, value, expected)
    if not 1 <= size < math.inf:
        raise argument_error(name, value, expected)
    return int(size)


def _carried_as(name: str, value: Any) -> str:
    """Return the dtype in which gradients travel."""
    return COMPRESSIONS[check_choice(name, value, COMPRESSIONS)]


def _chunks(name: str, value: Any) -> int:
    """Check a number of chunks: more than the largest start more collectives than they hide."""
    return check_choice(name, value, CHUNKS)


def _pipeline(name: str, value: Any) -> Pipeline | Literal["auto"]:
    if isinstance(value, str) and value == AUTO:
        return AUTO
    if isinstance(value, Pipeline) and value.is_searched:
        return AUTO
    if not isinstance(value, Pipeline):
        expected = "a tap.Pipeline, such as tap.Pipeline(microbatches=4), or 'auto'"
        raise argument_error(name, value, expected)
    if value.recompute and value.order.num_stages == 1:
        raise argument_error(
            name,
            value,
            "one that recomputes nothing, as it has one stage; recompute= says what to compute "
            "again",
        )
    return value


def _pipeline_search(value: Any) -> Pipeline | None:
    """Return a pipeline that is to be searched for by another method than `"auto"`'s."""
    is_searched = isinstance(value, Pipeline) and value.is_searched
    return value if is_searched and value.search != ENUMERATE else None


def _check_agreed(plan: Plan, pipeline: Pipeline) -> None:
    """Refuse a pipeline that is not the plan's.

    Raises:
        ArgumentError: says what differs.
    """
    order, stages = pipeline.order, plan.stages
    differing = []
    for what, planned, asked in (
        ("stages", 1 if stages is None else stages.num_stages, order.num_stages),
        ("microbatches", plan.microbatches, order.num_microbatches),
    ):
        if planned != asked:
            differing.append(f"{asked} {what}, not {planned}")
    if stages is not None and not differing:
        if pipeline.picks_schedule and stages.schedule.actors != order.actors:
            differing.append("stages on other sets of ranks")
        if not pipeline.picks_schedule and stages.schedule != order:
            differing.append("another schedule")
        if stages.recompute != pipeline.recompute:
            differing.append(f"recompute={pipeline.recompute}")
    if plan.batch_statistics != pipeline.batch_statistics:
        differing.append(f"batch_statistics={pipeline.batch_statistics!r}")
    if differing:
        raise ArgumentError(
            f"The pipeline is not the plan's: it has {' and '.join(differing)}. Leave it out, "
            f"since a plan holds its pipeline, or make a plan with this one."
        )


def _cluster_described(cluster: Cluster | Mapping[str, Any] | str | None) -> str:
    if isinstance(cluster, Cluster):
        return _identified(f"cluster {cluster.name!r}", cluster)
    return _identified("a mapping", cluster) if isinstance(cluster, Mapping) else repr(cluster)


def _identified(what: str, value: Any) -> str:
    """Identify a value that is too long to be shown by its type and a checksum."""
    return f"{what} (checksum {zlib.crc32(repr(value).encode()):08x})"


def _trials(name: str, value: Any) -> Trials:
    expected = "a number of plans, 1 or more, or a tap.Trials"
    return value if isinstance(value, Trials) else Trials(integer(name, value, 1, expected))


def _verbose(name: str, value: Any) -> bool:
    """Whether users are told of plans; as Keras's argument of this name."""
    return (
        flag(name, value)
        if isinstance(value, bool | np.bool_)
        else bool(check_choice(name, value, (0, 1)))
    )


def _recompute(name: str, value: Any) -> bool | tuple[str, ...]:
    """Read `recompute` to a value that can be compared."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    expected = "True, False, or a list of regular expressions"
    patterns = (value,) if isinstance(value, str) else check_list(name, value, expected)
    for pattern in patterns:
        check_pattern(f"{name}={written(pattern)}", pattern)
    return patterns


def _attention(name: str, value: Any, constraints: Sequence[Constraint]) -> AttentionMode | None:
    """Read `attention`; where positions are split, attention works on blocks unless told else."""
    if value is None:
        splits = any(isinstance(c, ContextParallel) for c in constraints)
        return "blockwise" if splits else None
    return check_choice(name, value, ATTENTION_MODES)


def _offload(name: str, value: Any) -> Offload:
    """Read `offload` to a value that can be compared."""
    if isinstance(value, bool | np.bool_):
        return Offload(bool(value), bool(value))
    if not isinstance(value, Offload):
        raise argument_error(
            name, value, "True, False, or a tap.Offload, which names weights and blocks"
        )
    return value
