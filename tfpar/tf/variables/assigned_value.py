"""Values that a variable was assigned outside of steps, as processes compare them."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfpar.tf.interop.fingerprints import Traits, traits


class AssignedValue(NamedTuple):
    """Attributes:
    times: how often a value was assigned.
    value: of the last one, where it was cut into shards and is whole nowhere any more.
    """

    times: int = 0
    value: Traits | None = None

    def again(self) -> AssignedValue:
        """Return the record after one more value, of which nothing is kept."""
        return AssignedValue(self.times + 1)

    def cut(self, value: tf.Tensor) -> AssignedValue:
        """Return the record after `value` was cut into shards."""
        return AssignedValue(self.times, traits(value.numpy()))
