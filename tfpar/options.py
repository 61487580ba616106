"""`Options` of a user besides mesh and constraints, and the same options as keywords."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from tfpar.cluster.description import Cluster
from tfpar.pipeline import Pipeline
from tfpar.planning.objective import ObjectiveName, Trials
from tfpar.planning.problem import Planner
from tfpar.plans import Offload, Plan
from tfpar.plans.attention import AttentionMode
from tfpar.settings import ConstraintsLike, MeshLike, Settings
from tfpar.spec.arguments import argument_error

PathLike = str | os.PathLike[str]
ClusterLike = Cluster | Mapping[str, Any] | PathLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `auto_parallel` and its kin, besides mesh and constraints.

        options = tap.Options(planner="rhino", memory_limit="16 GiB")
        plan = tap.plan(build_model, batch, [2, 8], options=options)
        with tap.auto_parallel([2, 8], options=options, verbose=0): ...

    Each is a keyword of `auto_parallel`, `parallelize` and `GraphProgram` too; those that matter to
    a plan are keywords of `tap.plan`. A keyword wins over the same of `options`.

    Args:
        plan: a `Plan` or the path of a saved one, instead of constraints and search.
        planner: `"tap"`, `"rhino"`, `"auto"`, which picks one of them by the step's graph and
            `search_seconds` (the plan says which), `"exhaustive"`, which tries all plans of a model
            of a few layers, or one of your own (`planning.problem.Planner`).
            None searches nothing: weights have the specs of constraints, the others those that
            their first reader prefers; without constraints, every batch is split over the whole
            mesh (data parallelism).
        level: of Rhino's planner: 3 decides the whole graph at once (the default), 2 leaves it at
            what takes less time where that is no solution yet.
        search_seconds: what the planner may take, about; it returns the best plan found by then.
            Where no fast plan fits into memory, more are searched, and each search may take that.
            Ctrl-C ends a search at once: see `tap.SearchInterrupted`. By default `planner="auto"`
            takes no longer than the training under way can gain by it, or about a second.
        objective: what the plan is to be best at. `"step_time"`: the seconds of a step.
            `"latency"`: those of the forward pass of a Keras model, as `predict` runs it, in stages
            if a `pipeline` is given or searched; if the model trains, its weights stay as they lie
            for that, as far as memory allows.
            `"samples_per_dollar"`: what a dollar of rent computes, on the devices of the mesh that
            are worth it; `price_per_hour` in the cluster file says what each is rented for.
        cluster: the machines to plan for: a `Cluster`, the name of a preset or a file (TOML or
            JSON, see `cluster.files`); by default `"local"`, what this machine is seen to be.
        plan_cache: a folder for plans, which are then searched once for each problem; by default
            that of the environment variable TFPAR_PLAN_CACHE, if set.
        memory_limit: what a plan may use of a device, in bytes or as `"16 GiB"`; by default what
            the cluster's have. The fastest plan that fits is taken. With a `pipeline` of a number
            of stages also a list, of a limit for each of them (for each set of ranks that runs
            several).
        bucket_bytes: upper bound on packed collectives, in bytes; by default what
            the plan's cost is least with.
        strict: ops without a rule are an error instead of being replicated.
        compression: `"fp16"` or `"bf16"`: gradients are summed over ranks as such, which halves
            what they move; weights, slots and what a rank computes keep their dtypes. The sums
            are less exact; fp16 overflows beyond 65504.
        recompute: which activations the backward pass computes again instead of storing them:
            True, those inside of every block that repeats (the layers of a transformer; what
            enters a block is stored); a sequence of regular expressions, those of the blocks whose
            names (the paths of their weights) or scopes, or their ends, match; `"selective"`, those
            of all blocks, but not what products with weights give, which take nearly all the time;
            False, none. By default the planner decides: none, unless the fastest plan does not fit
            without.
        attention: how attentions run: `"whole"`, all scores at once, as the model says;
            `"blockwise"`, on blocks of the scores, which are never stored whole: the backward pass
            computes them again, blocks that a mask hides are left out, and positions may be split
            over ranks, round which keys and values pass (ring attention). By default the planner
            decides: whole, unless the fastest plan does not fit so. Attentions that draw random
            numbers for each score (dropout of weights) always run whole.
        offload: what is kept in the memory of a rank's host while it is not used, so that a device
            stores less: a `tap.Offload`, which names weights, whose optimizer slots do, and blocks,
            of which that does what they keep for the backward pass; True, all of both; False,
            nothing. By default the planner decides: nothing, unless the fastest plan does not fit
            without. On CPUs, which compute in the memory of the host, nothing is gained.
        chunks: 1, 2 or 4 pieces in which a rank computes its part of a training batch, one after
            another: while one is summed over ranks, the next is computed. Results do not
            depend on it. By default what the plan says: what costs least.
        pipeline: a `Pipeline`: microbatches, whose gradients are added up before the weights are
            updated, so that the activations of one are stored at a time. Results do not depend
            on it, unless it has `batch_statistics="microbatch"`. `"auto"`: the planner decides at
            the first training step whether there is one, with how many stages and microbatches
            and whether stages recompute; `Plan.summary()` says what else it found.
            `Pipeline("auto", search="anneal")` finds it by simulated annealing. By default
            what the plan says; without a plan, as `"auto"` where ranks on several machines wait
            long for links, or nothing else fits into memory. With a `plan` it has to be the
            plan's.
        early_collectives: what nothing waits for but the update (the gradients of weights) is
            computed while what everything waits for (the gradients of activations) is summed
            over ranks. False leaves the order to TensorFlow. By default False for processes that
            share the cores of one machine, which a sum takes as well, else True.
        trials: a number of plans, or a `tap.Trials`: before the first training step of `fit`, the
            best few plans by prediction each take some steps on its batch, and the one that is
            measured to be fastest is kept. What each takes corrects the prediction for the others.
            Weights, slots, random state and data are as if they had not. By default the plan that
            is predicted to be fastest is taken.
        verbose: 1 shows a line for each plan: mesh, planner, what is split, and the predicted time
            and memory against one device; 0 shows none.

    Raises:
        ArgumentError: of another type or out of range, such as an unknown planner, compression or
            number of chunks; names it.
        PlanError: the plan file cannot be used.
    """

    plan: Plan | PathLike | None = None
    planner: Planner | str | None = "auto"
    level: int | None = None
    search_seconds: float | None = None
    objective: ObjectiveName = "step_time"
    cluster: ClusterLike | None = None
    plan_cache: PathLike | None = None
    memory_limit: float | str | Sequence[float | str] | None = None
    bucket_bytes: float | str | None = None
    strict: bool = False
    compression: str | None = None
    recompute: bool | str | Sequence[str] | None = None
    attention: AttentionMode | None = None
    offload: Offload | bool | None = None
    chunks: int | None = None
    pipeline: Pipeline | Literal["auto"] | None = None
    early_collectives: bool | None = None
    trials: Trials | int | None = None
    verbose: int = 1

    def __post_init__(self) -> None:
        Settings.of(None, (), self)  # what is wrong is said where it is written


class PlanKeywords(TypedDict, total=False):
    """The `Options` that `tap.plan` takes as keywords."""

    planner: Planner | str | None
    level: int | None
    search_seconds: float | None
    objective: ObjectiveName
    plan_cache: PathLike | None
    memory_limit: float | str | Sequence[float | str] | None
    compression: str | None
    recompute: bool | str | Sequence[str] | None
    attention: AttentionMode | None
    offload: Offload | bool | None
    pipeline: Pipeline | Literal["auto"] | None


class Keywords(PlanKeywords, total=False):
    """The `Options` as keywords."""

    plan: Plan | PathLike | None
    cluster: ClusterLike | None
    bucket_bytes: float | str | None
    strict: bool
    chunks: int | None
    early_collectives: bool | None
    trials: Trials | int | None
    verbose: int


def settings_of(
    mesh: MeshLike | None,
    constraints: ConstraintsLike,
    options: Options | None,
    keywords: Mapping[str, Any],
    kind: type[PlanKeywords] = Keywords,
) -> Settings:
    """Read the options and keywords of a call that takes keywords of this `kind`.

    Raises:
        ArgumentError: names the argument and what was given.
        TypeError: there is no such keyword.
    """
    return Settings.of(mesh, constraints, with_keywords(options, keywords, kind))


def with_keywords(
    options: Options | None, keywords: Mapping[str, Any], kind: type[PlanKeywords] = Keywords
) -> Options:
    """Merge `keywords` into `options`, or into the defaults; errors as of `settings_of`."""
    if not (options is None or isinstance(options, Options)):
        raise argument_error("options", options, "a tap.Options")
    known = names_of(kind)
    for name in keywords:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4) or known
            raise TypeError(f"There is no option {name!r}. Is it {' or '.join(near)}?")
    return dataclasses.replace(options or Options(), **keywords)


def names_of(kind: type[PlanKeywords]) -> list[str]:
    """Return the names of such keywords, in the order of `Options`."""
    return [f.name for f in dataclasses.fields(Options) if f.name in kind.__annotations__]


F = TypeVar("F", bound=Callable[..., Any])


def takes(kind: type[PlanKeywords]) -> Callable[[F], F]:
    """Show such keywords in the signature of a function that takes them as `**keywords`."""
    names = names_of(kind)

    def shown(function: F) -> F:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        keywords = [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type
            )
            for f in dataclasses.fields(Options)
            if f.name in names
        ]
        function.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore
        return function

    return shown
