"""The plan for a step: the one given, the one that its program has, or one found now."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfpar.cluster.description import Cluster
from tfpar.constraints import Constraint, collect_layer_specs, collect_tensor_layouts
from tfpar.ir.roles import Roles, trains
from tfpar.observability.report.announcement import SearchSummary
from tfpar.observability.report.rentals import cheaper_text
from tfpar.pipeline.pipeline import groups_of
from tfpar.planning.incumbent import SearchInterrupted
from tfpar.planning.inter_op.stage_planner import assign_stages
from tfpar.planning.intra_op.gain import DEFAULT_STEPS
from tfpar.planning.lower_bound import attach_bound, cost_on_one_device
from tfpar.planning.memory.offload import select_offloads
from tfpar.planning.memory.recompute import Blocks
from tfpar.planning.memory.stages import check_given, with_prices
from tfpar.planning.pipeline_search import GIVEN, search_step, select_scope
from tfpar.planning.problem import Problem
from tfpar.planning.problems import state_problem
from tfpar.planning.rental import attach_rental, compare_rentals
from tfpar.planning.request import PlanRequest
from tfpar.planning.solve import reuse_interrupted
from tfpar.planning.step_search import StepSearch
from tfpar.planning.trial_candidates import select_trial_candidates
from tfpar.planning.trial_ranking import TrialRanking
from tfpar.plans import Candidate, OffloadPlan, Plan, plan_from_constraints
from tfpar.progress import QUIET, Reporter, reporting
from tfpar.spec import Mesh, OtherModelError, PlanError, Spec, TimeLimitError
from tfpar.tf.capture.step import CapturedStep
from tfpar.tf.runtime.detect import detect_cluster
from tfpar.tf.session import Session
from tfpar.tf.steps.shared_plan import SharedPlan


class StepPlanner:
    """Plans one step of a program, for any batch shape.

    Args:
        name: of the step, in messages between processes.
        several: see `CompiledFunction`.

    Attributes:
        jit_compile: XLA compiles what is between collectives.
        search: how the plan was found and what it is compared with, if users are told of it and
            it was searched here.
    """

    def __init__(
        self, program: SharedPlan, name: str, several: bool, jit_compile: bool = False
    ) -> None:
        self.program = program
        self.search: SearchSummary | None = None
        self._name = name
        self.jit_compile = jit_compile
        self._inherited = None if several else program.plan

    @property
    def session(self) -> Session:
        return self.program.session

    def plan(self, captured: CapturedStep, batch_size: int | None, part: bool) -> Plan:
        """The plan for a captured and simplified step.

        Args:
            part: the step is part of the planned one (an evaluation or a prediction).
        """
        session = self.session
        given = session.options.plan
        if given is not None:
            return given.fitted(captured.graph, gradients=captured.gradients, part=part)
        searches, staged = session.options.planner is not None, session.in_stages
        if not searches and not staged:
            return self._from_constraints(captured, part)
        found = self._known(captured, part)
        if found is not None:
            return found

        def make() -> list[Plan]:
            if searches:
                return self._solve(captured, batch_size, part)
            return [self._in_given_stages(captured, batch_size, part)]

        (plan,) = self._agreed(make)
        self.use(plan, captured, batch_size, part)
        return plan

    def candidates(self, captured: CapturedStep, batch_size: int | None, count: int) -> list[Plan]:
        """The plans for a training step that `count` trials choose from; see
        `planning.trial_candidates`."""
        return self._agreed(lambda: self._solve(captured, batch_size, part=False, count=count))

    def ranking(
        self, captured: CapturedStep, batch_size: int | None, plans: Sequence[Plan]
    ) -> TrialRanking:
        """Return the ranking of `candidates`, which trials correct."""
        session = self.session
        cluster = session.cluster or detect_cluster(session.mesh)
        search, request = self._stated(captured, batch_size, False, QUIET, cluster)

        def price(plan: Plan) -> Callable[[Cluster], float]:
            fitted = plan.fitted(captured.graph, gradients=captured.gradients)

            @functools.cache
            def repricer() -> Callable[[Cluster], Plan]:
                return search.repricer(fitted, request, session.mesh)

            def seconds_on(cluster: Cluster) -> float:
                cost = None if plan.cost is None else repricer()(cluster).cost
                return math.inf if cost is None else cost.seconds

            return seconds_on

        return TrialRanking([*map(price, plans)], request.cluster)

    def anew(
        self, captured: CapturedStep, batch_size: int | None, cluster: Cluster
    ) -> tuple[Plan, Plan]:
        """The plan in force of a training step, as it is priced on other machines, and the plan
        that is found for these; nothing is changed.

        Raises:
            PlanError: there is none.
        """
        session, program = self.session, self.program
        assert program.plan is not None, "a step that was planned"
        in_force = program.plan.fitted(captured.graph, gradients=captured.gradients)
        owners, program.owners = program.owners, {}
        try:
            with session.undecided():
                session.undecide()
                session.cluster = cluster
                with reporting("planning anew", wanted=session.options.verbose) as report:
                    (found,) = self._search(captured, batch_size, False, report, 1)
                search, request = self._stated(captured, batch_size, False, QUIET, cluster)
        finally:
            program.owners = owners
        return search.reprice(in_force, request, session.mesh), found

    def use(
        self, plan: Plan, captured: CapturedStep, batch_size: int | None, part: bool = False
    ) -> None:
        """Have a step, and those that share its plan, run by `plan`, which was found for it."""
        session, program = self.session, self.program
        program.keep_for(self, plan)
        if plan.stages is not None:
            program.owners.update(plan.stages.owners)
        if part:
            program.told = False
            if session.options.objective == "latency" and session.base is None:
                session.base = plan
                if session.decides_pipeline:
                    session.decide_pipeline(plan)
        else:
            program.use(plan)
            program.batch_size = batch_size
            session.base = session.base or plan
            if session.decides_pipeline and _trains(captured):
                session.decide_pipeline(plan)

    def forget(self) -> None:
        """Forget the plan, so that the next request plans again."""
        self.program.forget(self)

    @contextlib.contextmanager
    def trying(self, plan: Plan, captured: CapturedStep) -> Iterator[None]:
        """Run by `plan` within, and afterwards as if nothing had been planned."""
        owners = dict(self.program.owners)
        with self.session.undecided():
            self.use(plan, captured, None)
            try:
                yield
            finally:
                self.forget()
                self.program.owners = owners
                self.program.use(None)

    def _from_constraints(
        self, captured: CapturedStep, part: bool, mesh: Mesh | None = None
    ) -> Plan:
        """Make the plan that the constraints give for the step, on the mesh of the first stage or
        that of another."""
        plan = plan_from_constraints(
            captured.graph,
            mesh or self.session.stage_mesh,
            collect_constraints(captured, self.session),
            gradients=captured.gradients,
            part=part,
        )
        return dataclasses.replace(
            plan,
            recompute=self._recomputed(captured, part),
            attention=self.session.options.attention or "whole",
            offloaded=self._offloaded(captured, part),
        )

    def _in_given_stages(self, captured: CapturedStep, batch_size: int | None, part: bool) -> Plan:
        """The same in stages, which are found even where nothing else is searched, and priced."""
        session, plan = self.session, self._from_constraints(captured, part)
        options, constraints = session.options, collect_constraints(captured, session)
        pipeline = session.pipeline
        assert pipeline is not None
        sizes = pipeline.sizes(session.mesh.size)
        cluster = session.cluster or detect_cluster(session.mesh)
        cluster = cluster.with_memory(options.memory_limit)
        plan = assign_stages(
            plan,
            captured,
            pipeline,
            cluster,
            constraints,
            sizes=sizes,
            owners=self._owners(captured),
            part=part,
            ranks=find_actor_ranks(captured, session) or (),
            jit_compile=self.jit_compile,
            other_layout=lambda actor: self._from_constraints(
                captured, part, session.mesh.sized(sizes[actor])
            ),
            limits=options.limits,
        )
        if part:
            return plan
        request = PlanRequest(
            session.stage_mesh,
            cluster,
            constraints,
            compression=options.compression,
            attention=options.attention,
            pipeline=pipeline,
            jit_compile=self.jit_compile,
            num_ranks=session.mesh.size,
        )
        plan = with_prices(plan, state_problem(captured, request, batch_size), cluster)
        limited = options.memory_limit is not None or options.limits.memory_bytes
        if session.cluster is not None or limited:
            check_given(plan)  # what a machine has that was only detected is a guess
        return plan

    def _owners(self, captured: CapturedStep) -> Mapping[str, int]:
        """Find the stages that own variables of a step already, by name.

        Those that other functions have placed count only for steps that do not train: the stages
        of a step that trains are to be balanced.
        """
        if _trains(captured):
            return self.program.owners
        known = self.program.owners
        return {**known, **find_variable_stages(captured, self.session, known)}

    def _known(self, captured: CapturedStep, part: bool) -> Plan | None:
        """The plan found before, for another batch or for training; None if it does not fit.

        It serves what was compiled before: the model may have other weights by now, or if it was
        compiled again, other ops.
        """
        program = self.program
        found = program.in_force(self)
        if found is None:
            return None
        part = part or found is not self._inherited
        try:
            return found.fitted(captured.graph, gradients=captured.gradients, part=part)
        except OtherModelError as error:
            self.session.tell(
                f"the model has changed since it was planned ({error.difference}), and is planned "
                f"anew; what is split stays so where it can"
            )
        self.forget()
        program.use(None)
        return None

    def _recomputed(self, captured: CapturedStep, part: bool) -> tuple[str, ...]:
        """List the blocks that the user asks to recompute in the backward pass."""
        asked = self.session.options.recompute
        if not asked or part:
            return ()
        return Blocks.of(captured.graph, captured.gradients).recomputed(asked)

    def _offloaded(self, captured: CapturedStep, part: bool) -> OffloadPlan:
        """Select the slots and activations that the user asks to offload to host memory."""
        asked = self.session.options.offload
        if asked is None or part:
            return OffloadPlan()
        return select_offloads(asked, captured.graph, captured.gradients)

    def _agreed(self, make: Callable[[], list[Plan]]) -> list[Plan]:
        """The plans that `make` makes; of several processes the first one's."""
        world = self.session.ranks.world
        if world is None:
            return make()
        texts = world.first(f"planning {self._name}", lambda: [p.to_json() for p in make()])
        return [*map(Plan.from_json, texts)]

    def _solve(
        self, captured: CapturedStep, batch_size: int | None, part: bool, count: int = 1
    ) -> list[Plan]:
        """The best plans that are found now, or that of a search of pipelines cut short before."""
        session = self.session
        if session.decides_pipeline and session.stopped is not None and _trains(captured):
            plan = reuse_interrupted(session.stopped)
            if plan is not None:
                with contextlib.suppress(OtherModelError):
                    return [plan.fitted(captured.graph, gradients=captured.gradients)]
        with reporting("searching a plan", wanted=session.tells) as report:
            compares = session.options.objective == "samples_per_dollar" and not part
            return self._search(captured, batch_size, part, report, count, compares)

    def _search(
        self,
        captured: CapturedStep,
        batch_size: int | None,
        part: bool,
        report: Reporter,
        count: int,
        compares_devices: bool = False,
    ) -> list[Plan]:
        session, options = self.session, self.session.options
        cluster = session.cluster or detect_cluster(session.mesh)
        one, request = self._stated(captured, batch_size, part, report, cluster)
        scope = GIVEN
        # Whoever was not patient enough for one search is spared the others.
        if session.decides_pipeline and request.base is None and not session.interrupted:
            leads = options.objective == "latency" and options.pipeline is not None
            if _trains(captured) or leads:
                scope = select_scope(
                    options.pipeline,
                    options.pipeline_search,
                    bool(request.constraints) or options.chunks is not None,
                )

        def search(request: PlanRequest) -> tuple[Plan, Problem]:
            try:
                plan, problem = search_step(one, request, scope)
                if not compares_devices or request.base is not None:
                    return attach_rental(plan, cluster, batch_size), problem
                whole = plan, problem
                plan, best = compare_rentals(one, request, session.mesh, scope, whole)
                own = plan.findings.rentals[0]
                if best != own:
                    report.note(cheaper_text(own, best))
                return plan, problem
            except SearchInterrupted as stopped:
                session.stopped = stopped if scope.is_open else None
                raise

        started = time.monotonic()
        try:
            plan, problem = search(request)
        except PlanError as error:
            if request.base is None or isinstance(error, TimeLimitError):
                raise  # what lies already stays where it can
            plan, problem = search(dataclasses.replace(request, base=None))
        if options.verbose:
            taken = time.monotonic() - started
            device = session.cluster or detect_cluster(Mesh.of([1]))
            alone = cost_on_one_device(problem, device)
            self.search = SearchSummary(taken, alone)
            if (
                plan.cost is not None
                and plan.cost.seconds > alone.seconds
                and not plan.findings.baselines
            ):
                known = Candidate("one device", alone.seconds, alone.memory_bytes)
                plan = plan.with_findings(baselines=(known,))
        plan = attach_bound(plan, problem, cluster)
        return [plan] if count == 1 else select_trial_candidates(plan, one, request, count)

    def _stated(
        self,
        captured: CapturedStep,
        batch_size: int | None,
        part: bool,
        report: Reporter,
        cluster: Cluster,
    ) -> tuple[StepSearch, PlanRequest]:
        """Return the search over plans of a step, and the request for a plan on `cluster`."""
        session, options, planner = self.session, self.session.options, self.session.options.planner
        assert planner is not None
        laid, steps = {}, None if part else self.program.training_steps
        if session.base is not None:
            laid = find_placed_variables(captured, session.base.mesh)
            if options.objective == "latency":  # not all of them are placed yet
                fixed = {name: v.spec for name, v in session.base.variables.items()}
                laid = {**{name: spec for name, spec in fixed.items() if spec is not None}, **laid}
        cluster = cluster.with_memory(options.memory_limit)
        request = PlanRequest(
            session.stage_mesh,
            cluster,
            collect_constraints(captured, session),
            session.base,
            options.compression,
            options.recompute,
            options.offload,
            session.pipeline,
            dataclasses.replace(options.budget, steps=DEFAULT_STEPS if steps is None else steps),
            self._owners(captured) if session.in_stages else {},
            find_actor_ranks(captured, session),
            report,
            jit_compile=self.jit_compile,
            num_ranks=session.mesh.size,
            limits=options.limits,
            attention=options.attention,
        )
        leads = options.objective == "latency" and session.base is None
        one = StepSearch(
            captured,
            batch_size,
            planner,
            options.plan_cache,
            laid,
            part=part and not leads,
            interrupted=session.interrupted,
        )
        return one, request


def _trains(captured: CapturedStep) -> bool:
    """Whether a step is one whose pipeline others of the session share."""
    return trains(captured.graph, Roles.of(captured.graph, captured.gradient_tensors))


def find_placed_variables(captured: CapturedStep, mesh: Mesh) -> dict[str, Spec]:
    """Find the variables of a step that are sharded on `mesh` already, by name."""
    return {
        v.name: variable.layout[1]
        for v, variable in zip(captured.graph.variables, captured.variables, strict=True)
        if variable.layout is not None and variable.layout[0] == mesh
    }


def find_actor_ranks(captured: CapturedStep, session: Session) -> tuple[int, ...] | None:
    """Return the ranks of a session's step, actor by actor: those of its first plan.

    Without one, all in their order if variables of the step are placed on some; else None: as is
    best.
    """
    if session.base is not None:
        return session.placed_ranks
    given = None if session.pipeline is None else session.pipeline.rank_order
    if given is not None:
        return given
    return () if any(v.ranks is not None for v in captured.variables) else None


def find_variable_stages(
    captured: CapturedStep, session: Session, known: Mapping[str, int]
) -> dict[str, int]:
    """Find the stages of a session's pipeline that own variables of a step, by name.

    Of several stages of one actor it is that which is known of the variable, or the first.
    """
    assert session.pipeline is not None
    schedule = session.pipeline.order
    sets = groups_of(session.pipeline.sizes(session.mesh.size), session.placed_ranks)
    groups = {ranks: actor for actor, ranks in enumerate(sets)}
    found = {}
    for v, variable in zip(captured.graph.variables, captured.variables, strict=True):
        ranks = variable.ranks
        if ranks is not None and ranks.members in groups:
            there = schedule.stages_of(groups[ranks.members])
            found[v.name] = known[v.name] if known.get(v.name) in there else there[0]
    return found


def collect_constraints(captured: CapturedStep, session: Session) -> tuple[Constraint, ...]:
    """The session's constraints, and what layers say of their own weights and tensors."""
    names = (v.name for v in captured.graph.variables)
    pairs = zip(names, captured.variables, strict=True)
    of_layers = collect_layer_specs(pairs, session.stage_mesh)
    return (*session.options.constraints, *of_layers, *collect_tensor_layouts(captured.graph))
