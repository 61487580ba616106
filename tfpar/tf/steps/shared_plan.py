"""The plan that the steps of one model share."""

from __future__ import annotations

import dataclasses

from tfpar.plans import Plan
from tfpar.tf.session import Session


@dataclasses.dataclass(eq=False)
class SharedPlan:
    """The steps of one model (or one function) and the plan that they share.

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

    def use(self, plan: Plan | None) -> None:
        """Take another plan, or none."""
        self.plan, self.told = plan, False
        self.version += 1
