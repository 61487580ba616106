"""The specs as one run of a segment sees them: its own, else those of its surroundings."""

from __future__ import annotations

from typing import Any, Protocol

from tfpar.ir.graph import Tensor
from tfpar.planning.intra_op.incremental.fragment_memo import ABSENT, Seen
from tfpar.spec import Spec


class Surroundings(Protocol):
    """Specs around a segment in the plan that is priced."""

    def seen(self, tensor: Tensor, at: int) -> Seen:
        """Return the spec of `tensor` as segment `at` finds it."""

    def varies(self, tensor: Tensor, at: int) -> bool:
        """Whether that may differ between plans."""


class Ledger(dict[Tensor, "Spec | None"]):
    """The specs that segment `at` finds and settles; a propagation takes it for its `specs`.

    Attributes:
        read: what it found in its surroundings that plans differ in, in the order in which it
            was read.
    """

    def __init__(self, around: Surroundings, at: int) -> None:
        super().__init__()
        self.around = around
        self.at = at
        self.read: dict[Tensor, Seen] = {}
        self._found: dict[Tensor, Seen] = {}  # what it read, and what is the same for all plans

    def _outside(self, tensor: Tensor) -> Seen:
        if tensor in self._found:
            return self._found[tensor]
        value = self._found[tensor] = self.around.seen(tensor, self.at)
        if self.around.varies(tensor, self.at):
            self.read[tensor] = value
        return value

    def __missing__(self, tensor: Tensor) -> Spec | None:
        value = self._outside(tensor)
        if value is ABSENT:
            raise KeyError(tensor)
        return value

    def get(self, tensor: Tensor, default: Any = None) -> Any:
        if dict.__contains__(self, tensor):
            return dict.__getitem__(self, tensor)
        value = self._outside(tensor)
        return default if value is ABSENT else value

    def setdefault(self, tensor: Tensor, default: Any = None) -> Any:
        value = self.get(tensor, ABSENT)
        if value is ABSENT:
            self[tensor] = value = default
        return value
