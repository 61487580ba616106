"""Numbers of microbatches that pipelines of some number of stages may have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfpar.pipeline import Pipeline
from tfpar.pipeline.generators import MOST_PASSES

FILLED = 4
"""Microbatches for each stage that are tried first: the bubble is a quarter of the work then."""

MOST = 16
"""Microbatches for each stage beyond which nothing is gained: the bubble is a sixteenth then."""


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """Pipelines that are worth pricing for some number of stages.

    Attributes:
        cuts: the numbers of microbatches that there can be, ascending, the last of as many as
            samples.
        trains: whether the step has a backward pass. One that has none may run in one microbatch:
            stages then share its weights, and take no longer than one device with room for all.
    """

    cuts: Sequence[int]
    trains: bool = True

    @property
    def is_uncut(self) -> bool:
        """Whether stages lack the microbatches that they need."""
        return self.trains and len(self.cuts) == 1

    def tries(self, number: int, size: int) -> list[Pipeline | None]:
        """List pipelines with so many stages, each of which stores less than those before.

        Args:
            number: of stages; where it is above 1, batches are not uncut.
            size: ranks of a stage.
        """
        ways: list[Pipeline | None]
        if number == 1:
            ways = [None, Pipeline(microbatches=self.cuts[-1])]
            return list(dict.fromkeys(ways if self.trains else ways[:1]))
        few = self._possible(number)
        filled = [self._even(few, f * number, size) for f in (FILLED, FILLED * 2, MOST)]
        ways = [Pipeline(number, m) for m in dict.fromkeys(filled)]
        if self.trains:
            ways.append(Pipeline(number, filled[-1], recompute=True))
        return ways

    def worth_pricing(self, number: int) -> list[int]:
        """List the microbatches for so many stages that are worth pricing: enough to fill them, if
        they train."""
        if number == 1:
            return list(self.cuts[1:])
        few = [m for m in self._possible(number) if m <= MOST * number]
        return [m for m in few if not self.trains or (m > 1 and number <= 2 * m)]

    def _possible(self, number: int) -> list[int]:
        """The numbers of microbatches that so many stages can run in a schedule."""
        return [m for m in self.cuts if m * number <= MOST_PASSES]

    def _even(self, cuts: Sequence[int], most: int, size: int) -> int:
        """Choose a number of microbatches, `most` or up to half as many, whose samples most ranks
        of a stage can share evenly; of one, stages would work one after the other."""
        samples = self.cuts[-1]
        several = [m for m in cuts if m > 1] or cuts
        near = [m for m in several if most < 2 * m <= 2 * most]
        near = near or [max((m for m in several if m <= most), default=several[0])]
        return max(near, key=lambda m: (math.gcd(size, samples // m), m))
