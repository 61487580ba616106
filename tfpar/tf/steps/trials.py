"""Trials: the best few plans of a training step run on its first batch, and the fastest is kept.

Each takes some steps on the weights and slots that there are, which are then put back, random
state and metrics among them; the data of `fit` is not touched. Where ranks are processes, all run
the same trials, and the slowest of them says what a step takes.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfpar.compile.local.rank_local_axis import NotRepeatableError
from tfpar.ir.effects import find_lasting_effect
from tfpar.ir.roles import changes_weights
from tfpar.observability.report.candidates import trial_text
from tfpar.planning.candidates import name_of_plan
from tfpar.planning.deadline import Deadline
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
    with reporting("trying plans", session.tells) as told:
        trials.run(plans, told)
    step.planner.use(trials.best(plans), captured, batch_size_of(whole))


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
        self._trials: list[tuple[Candidate, Plan]] = []

    def run(self, plans: Sequence[Plan], report: Reporter) -> None:
        """Try one plan after another, as long as there is time."""
        for plan in plans:
            if self._trials and self._is_over():
                break
            name = name_of_plan(plan)
            with report.at(name, self._deadline.left):
                predicted = math.inf if plan.cost is None else plan.cost.seconds
                trial = self._tried(Candidate(name, predicted), plan)
            self._trials.append((trial, plan))

    def best(self, plans: Sequence[Plan]) -> Plan:
        """The fastest, with what was measured; the first of `plans` if none could be run."""
        ran = [pair for pair in self._trials if pair[0].measured_s is not None]
        if not ran:
            return plans[0]
        ran.sort(key=lambda pair: pair[0].measured_s or 0.0)
        failed = [trial for trial, _ in self._trials if trial.measured_s is None]
        trials = (*(trial for trial, _ in ran), *failed)
        return ran[0][1].with_findings(trials=trials)

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
        if self._world is None:
            return self._deadline.over()
        return bool(self._world.first("timing trials", self._deadline.over))

    def _together(self, what: str, act: Callable[[], None]) -> None:
        if self._world is None:
            act()
        else:
            self._world.each(what, act)


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
