"""Collectives outside of steps: tensors and messages among the ranks of a job."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.runtime.backends.transport import Transport
from tfpar.runtime.backends.wire import Wire
from tfpar.runtime.function_def import FunctionWriter, RegisteredFunction


class Exchange:
    """Runs collectives at once; every rank makes the same calls in the same order.

    Args:
        transport: carries them.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._everyone = tuple(range(transport.size))
        self._functions: dict[tuple, RegisteredFunction] = {}

    def all_gather(
        self, tensor: tf.Tensor, group: tuple[int, ...] | None = None
    ) -> list[tf.Tensor]:
        """The tensor of each rank of the group (all, if None), which have one shape."""
        group = group or self._everyone
        if len(group) == 1:
            return [tensor]
        return tf.unstack(self._run("all_gather", tensor[tf.newaxis], group, 0), num=len(group))

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """The first rank's tensor; every rank gives one of that shape."""
        return self._run("broadcast", tensor, self._everyone)

    def messages(self, message: Any) -> list[Any]:
        """What each rank says, as JSON knows it."""
        words = _words(message)
        lengths = [int(n) for n in self.all_gather(tf.constant(len(words), tf.int64))]
        padded = np.zeros(_room(max(lengths)), np.int64)
        padded[: len(words)] = words
        gathered = self.all_gather(tf.constant(padded))
        return [_message(g.numpy()[:n]) for g, n in zip(gathered, lengths, strict=True)]

    def message(self, message: Any) -> Any:
        """What the first rank says; the others' argument does not matter."""
        words = _words(message)
        length = int(self.broadcast(tf.constant(len(words), tf.int64)))
        padded = np.zeros(_room(length), np.int64)
        if len(words) == length:
            padded[:length] = words
        return _message(self.broadcast(tf.constant(padded)).numpy()[:length])

    def _run(self, kind: str, tensor: tf.Tensor, group: tuple[int, ...], *dims: int) -> tf.Tensor:
        dtype = tensor.dtype.name
        key = (kind, dtype, tuple(tensor.shape), group, dims)
        if key not in self._functions:
            self._transport.connect([group])
            writer = FunctionWriter(f"tfpar_{kind}")
            edge = writer.argument("value", dtype)
            wire = Wire(writer, self._transport)
            name = f"tfpar/{kind}_{dtype}_{len(self._functions)}"
            writer.output(getattr(wire, kind)(name, edge, dtype, *dims, group), dtype)
            self._functions[key] = writer.register()
        (result,) = self._functions[key]([tensor])
        return result


def _words(message: Any) -> np.ndarray:
    """A message as int64s, which every transport carries."""
    text = json.dumps(message).encode()
    return np.frombuffer(text + b" " * (-len(text) % 8), np.int64)


def _room(length: int) -> int:
    """Words that a message of so many travels in: few sizes, as each needs a function."""
    return max(64, 1 << (length - 1).bit_length())


def _message(words: np.ndarray) -> Any:
    return json.loads(words.tobytes())
