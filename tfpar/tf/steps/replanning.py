"""Replanning of a model in training: it takes another plan between two steps.

It goes on with the same numbers.

Nothing is copied: weights, slots, metrics and seeds are the same variables. The next step is
compiled by the new plan, and reshards each of them, one after another: at most one is whole in
memory at a time.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.plans import Plan
from tfpar.spec import PlanError, TfparError
from tfpar.tf.capture.step import batch_size_of
from tfpar.tf.runtime.executable import Executable
from tfpar.tf.session import Session
from tfpar.tf.steps.compiled import CompiledFunction

logger = logging.getLogger("tfpar")


class ReplanResult(NamedTuple):
    """Result of replanning; seconds of a step are predicted on the machines as they are now.

    Attributes:
        before_s: of the plan that was in force.
        after_s: of the plan that was found.
        taken: whether it is in force now.
    """

    before_s: float
    after_s: float
    taken: bool


def check_can_replan(session: Session) -> None:
    """Raise TfparError if no plan is searched for the models of a session."""
    options = session.options
    if options.plan is not None or options.planner is None:
        what = "a plan was given (plan=)" if options.plan is not None else "planner=None"
        raise TfparError(
            f"Monitor(replan=...) plans anew, but {what}, and no plan is searched. Leave out "
            f"replan, or let auto_parallel search a plan."
        )


def replan(
    step: CompiledFunction, executable: Executable, cluster: Cluster, step_s: float, gain: float
) -> ReplanResult | None:
    """Replan a training step for the machines as they are; take the plan if it gains enough.

    The first rank searches, and all ranks take what it finds; all call this together, after the
    same step.

    Args:
        executable: the step as compiled for the batch that is to be planned for.
        cluster: of all ranks.
        step_s: what a step takes by the plan in force.
        gain: what part of that, and of what is predicted for the plan in force, the new one has to
            save.

    Returns:
        None where no plan was found, of which a line in the log says why.
    """
    session, specs = step.session, executable.specs
    world = session.ranks.world
    captured = step.prepared(specs)

    def find() -> tuple[float, float, str] | None:
        try:
            before, after = step.planner.anew(captured, batch_size_of(specs), cluster)
        except PlanError as error:
            logger.warning("The model keeps its plan, as none was found anew: %s", error)
            return None
        if before.cost is None or after.cost is None:
            return None
        return before.cost.seconds, after.cost.seconds, after.to_json()

    told = find() if world is None else world.first("planning anew", find)
    if told is None:
        return None
    before_s, after_s, text = told
    taken = after_s < (1 - gain) * min(before_s, step_s)
    if taken:
        session.undecide()
        session.cluster = cluster
        step.program.owners.clear()
        step.planner.use(Plan.from_json(text), captured, batch_size_of(specs))
        step.program.moves = True
    return ReplanResult(before_s, after_s, taken)
