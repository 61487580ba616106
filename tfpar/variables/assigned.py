"""What a variable was given from outside of steps, as ranks compare it that are processes."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfpar.interop.fingerprints import Traits, traits


class Assigned(NamedTuple):
    """Attributes:
    times: how often a value was assigned.
    value: of the last one, where it was cut into shards and lies nowhere any more.
    """

    times: int = 0
    value: Traits | None = None

    def again(self) -> Assigned:
        """After one more value, of which nothing is kept."""
        return Assigned(self.times + 1)

    def cut(self, value: tf.Tensor) -> Assigned:
        """After `value` was cut into shards."""
        return Assigned(self.times, traits(value.numpy()))
