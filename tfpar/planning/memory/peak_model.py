"""Model of a step's peak memory, for searches that do not look at its graph op by op."""

from __future__ import annotations

import dataclasses

from tfpar.cost.cost import Cost


@dataclasses.dataclass(frozen=True)
class PeakMemoryModel:
    """Estimate of the peak bytes of a step from its sums of activations and gradients.

    The backward pass frees activations while it makes gradients. So at its peak a step stores the
    larger of the two sums, and a part of the smaller one: little where layers are equal, nearly all
    where the last of them has most weights.

    Attributes:
        of_more: the part of the larger sum that is stored at the peak of a step in one piece; below
            1 if it never is as a whole (tensors that share memory).
        of_less: that of the smaller sum.
        besides: bytes that are stored besides both sums: temporaries.
        copied: bytes of activations that are kept in other specs than their own, too.
        gathered: bytes of what is gathered of variables and kept.
    """

    of_more: float = 1.0
    of_less: float = 1.0
    besides: float = 0.0
    copied: float = 0.0
    gathered: float = 0.0

    @classmethod
    def of(cls, cost: Cost) -> PeakMemoryModel:
        """Calibrate the model on a step in one piece with this cost, whose peak is known."""
        less, more = sorted((cost.gradient_bytes, cost.activation_bytes))
        live = cost.memory_bytes - cost.weight_bytes - cost.state_bytes
        of_more = min(1.0, live / more) if more else 1.0
        of_less = min(1.0, max(0.0, live - more) / less) if less else 1.0
        beyond = max(0.0, live - more - less)
        gathered = min(cost.gathered_bytes, beyond)
        copied = min(cost.copied_bytes, beyond - gathered)
        return cls(of_more, of_less, beyond - gathered - copied, copied, gathered)

    def least(self, other: PeakMemoryModel) -> PeakMemoryModel:
        """Take the smaller value of each attribute."""
        return PeakMemoryModel(
            min(self.of_more, other.of_more),
            min(self.of_less, other.of_less),
            min(self.besides, other.besides),
            min(self.copied, other.copied),
            min(self.gathered, other.gathered),
        )

    def live_bytes(self, cost: Cost) -> float:
        """Return the peak bytes of a step in one piece with these sums, variables left out."""
        less, more = sorted((cost.gradient_bytes, cost.activation_bytes))
        kept = self.of_more * more + self.of_less * less + self.copied + self.gathered
        return kept + self.besides

    def in_microbatches(self, cost: Cost, microbatches: int, kept_part: float) -> float:
        """Return the peak bytes of a step in microbatches: the sums of gradients and what is
        gathered of variables are stored from the beginning on.

        Args:
            cost: of the step in one piece.
            kept_part: the part of the batch whose activations are stored at the same time.
        """
        kept = kept_part * (cost.activation_bytes + self.copied)
        return cost.gradient_bytes + self.gathered + kept + self.besides / microbatches
