"""The plan in force of the steps of one model."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import MutableMapping

from tfpar.plans import Plan
from tfpar.tf.session import Session


@dataclasses.dataclass(eq=False)
class SharedPlan:
    """The steps of one model (or one function) and the plan that they share.

    A step that has found a plan for itself, where none was found for training, keeps that until
    there is one.

    Attributes:
        plan: found for its training step; None before that, or where none is searched.
        version: is another one once `plan` is.
        owners: the stages of a pipeline that own its variables, by name, as far as known.
        told: whether the plan in force has been announced to the user.
        batch_size: of the training step that the plan was found for; None if it was not.
        training_steps: of the training under way; None if that is not known.
        moves: whether variables are sharded by a plan before this one, until a training step
            is compiled.
    """

    session: Session
    plan: Plan | None = None
    version: int = 0
    told: bool = False
    batch_size: int | None = None
    training_steps: int | None = None
    moves: bool = False
    owners: dict[str, int] = dataclasses.field(default_factory=dict)
    _of_steps: MutableMapping[object, Plan] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )

    def in_force(self, step: object) -> Plan | None:
        """Return the plan by which a step runs; None if none was found yet."""
        return self.plan or self._of_steps.get(step)

    def keep_for(self, step: object, plan: Plan) -> None:
        """Keep the plan that was found for a step."""
        self._of_steps[step] = plan

    def forget(self, step: object) -> None:
        """Forget what was found for a step, so that it is planned anew."""
        self._of_steps.pop(step, None)

    def use(self, plan: Plan | None) -> None:
        """Take another plan for all steps, or none."""
        self.plan, self.told = plan, False
        self.version += 1
