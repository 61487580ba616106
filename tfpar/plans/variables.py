"""Variables of a plan: their specs, and the options that were priced."""

from __future__ import annotations

import dataclasses
import re

from tfpar.spec import Spec


@dataclasses.dataclass(frozen=True)
class SpecOption:
    """Option of a variable: a spec, and the best step time found with it.

    Attributes:
        seconds: infinite where no such plan is valid.
        layout: the mesh and the batch axes it was priced on, where these are not the plan's.
    """

    spec: Spec
    seconds: float
    layout: str = ""

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Of the mesh that `layout` begins with; empty without one."""
        return tuple(re.findall(r"(\w+)=\d+", self.layout))


@dataclasses.dataclass(frozen=True)
class PlannedVariable:
    """A variable of the planned graph.

    Attributes:
        spec: None leaves it to propagation.
        why: what fixed the spec (constraints as text, a planner); empty where nothing did.
        alternatives: what else a planner has priced, the choice itself included.
        slots: the spec of a weight's optimizer slots; None: its own.
        gathered: the spec in which layers read a weight that is gathered for them (ZeRO-3, FSDP);
            None: they read it as it is stored.
        keep_gathered: the backward pass reads what the forward pass gathered.
        scatters_gradient: its gradient is scattered, as its slots are, before those of microbatches
            are added up (ZeRO-2).
    """

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    spec: Spec | None = None
    why: str = ""
    alternatives: tuple[SpecOption, ...] = ()
    slots: Spec | None = None
    gathered: Spec | None = None
    keep_gathered: bool = False
    scatters_gradient: bool = False

    @property
    def laid(self) -> tuple[Spec | bool | None, ...]:
        """All of it that changes how a step runs."""
        sharded = self.gathered, self.keep_gathered, self.scatters_gradient
        return self.spec, self.slots, *sharded
