"""Collectives outside of steps: tensors and messages among the ranks of a job."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.runtime.backends.transport import Transport
from tfpar.runtime.backends.wire import Wire
from tfpar.runtime.function_def import FunctionWriter, RegisteredFunction

_SHORT = 64  # words


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
        frames = [f.numpy() for f in self.all_gather(tf.constant(_frame(words)))]
        longest = max(int(f[0]) for f in frames)
        rests = [np.zeros(0, np.int64)] * len(frames)
        if longest > _SHORT:
            rests = [r.numpy() for r in self.all_gather(tf.constant(_rest(words, longest)))]
        return [_message(frame, rest) for frame, rest in zip(frames, rests, strict=True)]

    def message(self, message: Any) -> Any:
        """What the first rank says; the others' argument does not matter."""
        words = _words(message)
        frame = self.broadcast(tf.constant(_frame(words))).numpy()
        rest, length = np.zeros(0, np.int64), int(frame[0])
        if length > _SHORT:
            rest = self.broadcast(tf.constant(_rest(words, length))).numpy()
        return _message(frame, rest)

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


def _frame(words: np.ndarray) -> np.ndarray:
    """The length of a message, and its begin: short ones need one exchange."""
    frame = np.zeros(1 + _SHORT, np.int64)
    frame[0] = len(words)
    begin = words[:_SHORT]
    frame[1 : 1 + len(begin)] = begin
    return frame


def _rest(words: np.ndarray, length: int) -> np.ndarray:
    """What the frame has no room for, in few sizes, as each needs a function.

    Args:
        length: of the longest message, in words.
    """
    rest = np.zeros(max(_SHORT, 1 << (length - _SHORT - 1).bit_length()), np.int64)
    end = words[_SHORT : _SHORT + len(rest)]
    rest[: len(end)] = end
    return rest


def _message(frame: np.ndarray, rest: np.ndarray) -> Any:
    return json.loads(np.concatenate([frame[1:], rest])[: frame[0]].tobytes())
