"""Offload of slots and activations to the memory of hosts between their uses, so that a device
stores less (TAP §IV-H)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfpar.constraints.constraint_types import check_pattern
from tfpar.spec.arguments import check_list, written


@dataclasses.dataclass(frozen=True)
class Offload:
    """Offload to the memory of a rank's host, while a tensor is not used.

        tap.Offload(optimizer=True)                           the slots of all weights
        tap.Offload(optimizer=["embedding/.*"], activations=["block_0"])

    Args:
        optimizer: the slots of which weights: of all (True), none, or those whose paths, or their
            ends, match regular expressions. A slot comes to the device when its weight is updated,
            and goes back.
        activations: what which blocks keep for the backward pass: all that repeat (the layers of a
            transformer), none, or those whose names (the paths of their weights) or scopes, or
            their ends, match. It goes to the host when it is made, and comes back when the backward
            pass is near.

    Raises:
        ArgumentError: neither True, False nor a list of strings.
        SpecError: a string is no regular expression.
    """

    optimizer: bool | tuple[str, ...] = False
    activations: bool | tuple[str, ...] = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _names(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)


@dataclasses.dataclass(frozen=True)
class OffloadPlan:
    """Offloaded slots and activations of a plan, by name.

    Attributes:
        slots: the weights whose optimizer slots are in host memory.
        activations: the blocks of which that does what they keep for the backward pass.
    """

    slots: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.slots or self.activations)

    def renamed(self, now: Mapping[str, str]) -> OffloadPlan:
        """Return the same with new names for weights, given by their old ones."""
        slots = tuple(now.get(name, name) for name in self.slots)
        return dataclasses.replace(self, slots=slots)


def _names(name: str, value: Any) -> bool | tuple[str, ...]:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    expected = "True, False, or a list of regular expressions"
    patterns = (
        (value,) if isinstance(value, str) else check_list(f"Offload's {name}", value, expected)
    )
    for pattern in patterns:
        check_pattern(f"tap.Offload({name}={written(pattern)})", pattern)
    return patterns
