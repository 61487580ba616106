"""Data of a resumed `fit`: brought to where it was, as if it had never been interrupted.

What earlier epochs and steps read is read again and passed over, so that whatever shuffles,
draws as it did before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfpar.spec.arguments import argument_error, integer


@dataclasses.dataclass(frozen=True)
class Position:
    """Position of training: epoch, batch and step.

    Attributes:
        epoch: that is under way, from 0.
        batch: batches of it that are done.
        batches: of a whole epoch; 0 as long as no epoch has ended.
        step: training steps done since the start.
    """

    epoch: int = 0
    batch: int = 0
    batches: int = 0
    step: int = 0

    @classmethod
    def read(cls, info: Mapping[str, Any]) -> Position:
        """The position among what a checkpoint says.

        Raises:
            ArgumentError: an entry is missing, none that there can be, or contradicts another.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        found = cls(**{name: integer(f"info.{name}", info.get(name), 0) for name in names})
        if found.batch > found.step:
            raise argument_error("info.batch", found.batch, f"at most the step, {found.step}")
        return found


class Replay:
    """Passes over the batches before a position, once.

    Args:
        position: to go on from.
        begin: called when the first batch of the epoch has come.

    Attributes:
        left: batches still to be passed over in the epoch that was under way.
    """

    def __init__(self, position: Position, begin: Callable[[], None]) -> None:
        self._position = position
        self._begin: Callable[[], None] | None = begin
        self.left = position.batch
        self._given: Any = None
        self._source: Any = None

    def source(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Return the iterator to read in place of the `iterator` that Keras made for the epoch."""
        if self._source is None:
            self._given = iterator
            self._source = self._after_epochs(iterator)
        return self._source if iterator is self._given else iterator

    def passes_over(self) -> bool:
        """Whether the batch just read is done already."""
        if self._begin is not None:
            self._begin()
            self._begin = None
        if self.left:
            self.left -= 1
            return True
        return False

    def _after_epochs(self, iterator: Iterator[Any]) -> Iterator[Any]:
        dataset = getattr(iterator, "_dataset", None)
        if not self._position.epoch or dataset is None:
            return iterator
        batches = self._position.batches
        source = _Endless(iterator, dataset)
        # Otherwise steps_per_epoch was given, and an epoch goes on where the last one ended.
        each_anew = 0 <= int(dataset.cardinality()) <= batches
        for _ in range(self._position.epoch):
            for _ in range(batches):
                source.again()
            if each_anew:  # Keras makes one at the end of an epoch, and another one to begin with
                source.begin()
                source.begin()
        return source


class _Endless:
    """An iterator of a dataset that begins anew where an epoch would find no batch at all."""

    def __init__(self, iterator: Iterator[Any], dataset: tf.data.Dataset) -> None:
        self._iterator = iterator
        self._dataset = dataset
        self._started = False

    def __iter__(self) -> _Endless:
        return self

    def __next__(self) -> Any:
        """The next batch of the epoch that is under way."""
        value = next(self._iterator) if self._started else self.again()
        self._started = True
        return value

    def again(self) -> Any:
        """The next batch, of another round if need be."""
        try:
            return next(self._iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            self.begin()
            return next(self._iterator)

    def begin(self) -> None:
        """Start another round."""
        self._iterator = iter(self._dataset)
