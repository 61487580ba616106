"""Trials: the best few plans of a training step run on its first batch, and the fastest is kept.

What each takes corrects the prediction by which the next one is chosen (`planning.trial_ranking`).
Each takes some steps on the weights and slots that there are, which are then put back, random
state and metrics among them; the data of `fit` is not touched. Where ranks are processes, all run
the same trials, and the slowest of them says what a step takes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfpar.cluster.scaling import Correction
from tfpar.compile.local.rank_local_axis import NotRepeatableError
from tfpar.ir.effects import find_lasting_effect
from tfpar.ir.roles import changes_weights
from tfpar.observability.report.candidates import trial_text, trials_text
from tfpar.planning.candidates import name_of_plan
from tfpar.planning.deadline import Deadline
from tfpar.planning.trial_candidates import attach_trials
from tfpar.planning.trial_ranking import TrialRanking
from tfpar.plans import Candidate, Plan
from tfpar.progress import Reporter, reporting
from tfpar.spec import TfparError
from tfpar.tf.capture.step import CapturedStep, argument_specs, batch_size_of, global_specs
from tfpar.tf.distributed.exchange import PeerLostError
from tfpar.tf.runtime.executable import Executable
from tfpar.tf.steps.compiled import CompiledFunction
from tfpar.tf.variables.parallel_variable import ParallelVariable
from tfpar.tf.variables.states import Sharded
from tfpar.tf.variables.values import plain_variable

if TYPE_CHECKING:
    from tfpar.tf.distributed.world import World

logger = logging.getLogger("tfpar")


def try_plans(step: CompiledFunction, arguments: Sequence[Any], parts: int = 1) -> None:
    """Have a training step that has no plan yet run by the plan that is measured to be fastest.

    Nothing is tried if the session asks for no trials, if another model of it has laid the mesh, or
    if the step does what cannot be undone, which a warning says.

    Args:
        arguments: of the step: its first batch.
        parts: as of `CompiledFunction.executable`.
    """
    session = step.session
    asked = session.options.trials
    if asked is None or step.executables or step.program.plan or session.base:
        return
    specs = argument_specs(arguments)
    whole = specs if parts == 1 else global_specs(specs, parts)
    captured = step.prepared(whole)
    if not changes_weights(captured.graph):
        return
    effect = find_lasting_effect(captured.graph)
    if effect is not None:
        logger.warning(
            "%s %r of the training step has an effect, which each step of a trial would have: the "
            "plan that is predicted to be fastest is taken without trials.",
            effect.type,
            effect.name,
        )
        return
    plans = step.planner.candidates(captured, batch_size_of(whole), asked.plans)
    trials = _Trials(step, arguments, whole, parts, asked.steps, Deadline(asked.seconds))
    ranking = functools.cache(lambda: step.planner.ranking(captured, batch_size_of(whole), plans))
    with reporting("trying plans", session.tells) as told:
        best = trials.run(plans, ranking, asked.plans, told)
    step.planner.use(best, captured, batch_size_of(whole))


class _Trials:
    """Trials of one step.

    Args:
        arguments: what the step is fed in each.
        specs, parts: as of `CompiledFunction.compile`.
        deadline: after which no further one begins.
    """

    def __init__(
        self,
        step: CompiledFunction,
        arguments: Sequence[Any],
        specs: Sequence[Any],
        parts: int,
        steps: int,
        deadline: Deadline,
    ) -> None:
        self._step, self._arguments = step, arguments
        self._specs, self._parts = specs, parts
        self._steps, self._deadline = steps, deadline
        self._world: World | None = step.session.ranks.world
        self._kept: VariableSnapshot | None = None

    def run(
        self, plans: Sequence[Plan], ranking: Callable[[], TrialRanking], most: int, told: Reporter
    ) -> Plan:
        """Try one plan after another, and return the fastest with what was found out.

        The first of `plans` is tried first, and taken if none could be run. What each takes
        corrects the prediction by which the next is chosen, on the first rank.

        Args:
            ranking: of `plans`.
            most: that are tried.
        """
        trials: dict[int, Candidate] = {}

        def choose() -> int | None:
            if not trials:
                return 0
            measured = _measured_of(trials)
            ranking().learn(measured)
            if len(trials) >= most or self._deadline.over():
                return None
            left = [at for at in range(len(plans)) if at not in trials]
            return ranking().choose(left, min(measured.values(), default=math.inf))

        while (at := self._first("choosing a trial", choose)) is not None:
            plan, name = plans[at], name_of_plan(plans[at])
            with told.at(name, self._deadline.left):
                predicted = math.inf if plan.cost is None else plan.cost.seconds
                trials[at] = self._tried(Candidate(name, predicted), plan)
        if not _measured_of(trials):
            return plans[0]

        def corrected() -> tuple[dict[str, float], list[float | None]] | None:
            correction, seconds = ranking().correction, map(ranking().seconds, range(len(plans)))
            if correction is None:
                return None
            known = [s if math.isfinite(s) else None for s in seconds]
            return dataclasses.asdict(correction), known

        told_of = self._first("correcting the cluster", corrected)
        if told_of is None:
            return attach_trials(plans, trials)
        factors, seconds = told_of
        correction = Correction(**factors)
        self._step.session.tell(trials_text(len(trials), len(plans), correction))
        return attach_trials(plans, trials, correction, seconds)

    def _tried(self, trial: Candidate, plan: Plan) -> Candidate:
        """`trial` with what was measured, or why nothing was."""
        try:
            trial = dataclasses.replace(trial, measured_s=self._measured(trial.name, plan))
        except PeerLostError:
            raise
        except (TfparError, NotRepeatableError, tf.errors.OpError, MemoryError) as error:
            reason = str(error).splitlines()[0]
            logger.warning("A plan cannot be run and is left out (%s): %s", trial.name, reason)
            return dataclasses.replace(trial, reason=f"failed: {reason}")
        self._step.session.tell(trial_text(trial))
        return trial

    def _measured(self, name: str, plan: Plan) -> float:
        """Measure a step by `plan`, in seconds: the median, on the slowest rank."""
        captured = self._step.prepared(self._specs)
        found: list[float] = []
        with self._step.planner.trying(plan, captured):
            try:
                self._together(f"trying {name}", lambda: found.append(self._own(plan, captured)))
            finally:
                if self._kept is not None:
                    self._kept.put_back()
        (own,) = found
        if self._world is None:
            return own
        with self._world.at(f"comparing trials of {name}"):
            return float(max(self._world.exchange.messages(own)))

    def _own(self, plan: Plan, captured: CapturedStep) -> float:
        """The median of this rank's seconds for a step."""
        plan = plan.fitted(captured.graph, gradients=captured.gradients)
        _, executable = self._step.link(captured, plan, self._specs, self._parts)
        if self._kept is None:
            self._kept = VariableSnapshot(executable.captured.variables)
        self._take(executable)  # which TensorFlow prepares
        seconds: list[float] = []
        while len(seconds) < self._steps and not (seconds and self._is_over()):
            seconds.append(self._take(executable))
        return statistics.median(seconds)

    def _take(self, executable: Executable) -> float:
        """The seconds of one step."""
        began = time.perf_counter()
        tf.nest.map_structure(_read, executable(self._arguments))
        tf.test.experimental.sync_devices()
        return time.perf_counter() - began

    def _is_over(self) -> bool:
        """Whether the time of all trials is over, by the first rank's clock."""
        return bool(self._first("timing trials", self._deadline.over))

    def _first(self, what: str, make: Callable[[], Any]) -> Any:
        """Make a JSON value; of several processes the first one makes it, and all have it."""
        return make() if self._world is None else self._world.first(what, make)

    def _together(self, what: str, act: Callable[[], None]) -> None:
        if self._world is None:
            act()
        else:
            self._world.each(what, act)


def _measured_of(trials: Mapping[int, Candidate]) -> dict[int, float]:
    """Return the seconds of those that ran, by the numbers of their plans."""
    found = {at: trial.measured_s for at, trial in trials.items()}
    return {at: seconds for at, seconds in found.items() if seconds is not None}


def _read(value: Any) -> None:
    if isinstance(value, tf.Tensor):
        value.numpy()


# --- snapshots ------------------------------------------------------------------------------


class VariableSnapshot:
    """Snapshot, in host memory, of the shards that this process stores of variables.

    Where ranks are processes, each keeps and puts back its own shards, and waits for no other.

    Args:
        variables: of a program that is linked; one that it lays on no ranks it does not change.
    """

    def __init__(self, variables: Sequence[ParallelVariable]) -> None:
        self._kept: list[tuple[ParallelVariable, Sharded, dict[int, np.ndarray]]] = []
        for variable in variables:
            state = variable.state
            if isinstance(state, Sharded):
                values = {rank: shard.numpy() for rank, shard in state.stored.items()}
                self._kept.append((variable, state, values))

    def put_back(self) -> None:
        """Lay the variables as they were, with the values that they had."""
        with tf.init_scope():
            for variable, state, values in self._kept:
                variable.let_go()
                stored = {}
                for rank, value in values.items():
                    with tf.device(state.ranks.devices[rank]):
                        stored[rank] = plain_variable(tf.convert_to_tensor(value))
                variable.take(dataclasses.replace(state, stored=stored))
