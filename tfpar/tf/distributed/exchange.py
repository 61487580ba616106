"""Collectives outside of steps: tensors and messages among the ranks of a job."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.spec import TfparError
from tfpar.tf.interop.variables import UninitializedVariable, note_use
from tfpar.tf.runtime.backends.transport import Transport
from tfpar.tf.runtime.backends.wire import Wire
from tfpar.tf.runtime.function_def import FunctionWriter, RegisteredFunction

_SHORT = 64  # words
_LEAVES = -1  # in place of a message's length


class PeerLostError(TfparError):
    """Another rank has ended, so that a collective cannot."""


class Exchange:
    """Collectives that run at once; every rank makes the same calls in the same order.

    In a graph they become ops that run in the order in which they were made. Every rank has to
    trace the same function, and to call it when the others do.

    Args:
        transport: carries them.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._everyone = tuple(range(transport.size))
        # By the ranks that call them: others know nothing of these, and do not count them.
        self._functions: dict[frozenset[int], dict[tuple[object, ...], RegisteredFunction]] = {}

    def all_gather(
        self, tensor: tf.Tensor, group: tuple[int, ...] | None = None
    ) -> list[tf.Tensor]:
        """The tensor of each rank of the group (all, if None), which have one shape."""
        group = group or self._everyone
        if len(group) == 1:
            return [tensor]
        gathered = self._run("all_gather", tensor[tf.newaxis], group, 0)
        parts: list[tf.Tensor] = tf.unstack(tf.ensure_shape(gathered, [len(group), *tensor.shape]))
        return parts

    def broadcast(self, tensor: tf.Tensor, source: int = 0) -> tf.Tensor:
        """The tensor of one rank; every rank gives one of that shape."""
        others = (rank for rank in self._everyone if rank != source)
        return self._run("broadcast", tensor, (source, *others))

    def leave(self) -> None:
        """Wait until all ranks leave; others that have something to say learn that this one does.

        Raises:
            tf.errors.OpError: another rank has gone already.
        """
        frame = np.zeros(1 + _SHORT, np.int64)
        frame[0] = _LEAVES
        self.all_gather(tf.constant(frame))

    def messages(self, message: Any) -> list[Any]:
        """All-gather JSON values: return the message of each rank, by rank.

        Raises:
            PeerLostError: a rank has come to its end and says nothing.
        """
        words = _words(message)
        frames = [f.numpy() for f in self.all_gather(tf.constant(_frame(words)))]
        left = [rank for rank, frame in enumerate(frames) if frame[0] == _LEAVES]
        if left:
            raise PeerLostError(
                f"Rank {self._transport.rank} cannot go on: rank {left[0]} has come to its end. "
                f"Every rank has to run the same program to the same end."
            )
        longest = max(int(f[0]) for f in frames)
        rests = [np.zeros(0, np.int64)] * len(frames)
        if longest > _SHORT:
            rests = [r.numpy() for r in self.all_gather(tf.constant(_rest(words, longest)))]
        return [_message(frame, rest) for frame, rest in zip(frames, rests, strict=True)]

    def message(self, message: Any) -> Any:
        """Broadcast a JSON value of the first rank; the argument of the other ranks is ignored."""
        words = _words(message)
        frame = self.broadcast(tf.constant(_frame(words))).numpy()
        rest, length = np.zeros(0, np.int64), int(frame[0])
        if length > _SHORT:
            rest = self.broadcast(tf.constant(_rest(words, length))).numpy()
        return _message(frame, rest)

    def _run(self, kind: str, tensor: tf.Tensor, group: tuple[int, ...], *dims: int) -> tf.Tensor:
        dtype = tensor.dtype.name
        key = (kind, dtype, tuple(tensor.shape), group, dims)
        functions = self._functions.setdefault(frozenset(group), {})
        if key not in functions:
            self._transport.connect([group])
            writer = FunctionWriter(f"tfpar_{kind}")
            edge = writer.argument("value", dtype)
            writer.argument("order", "resource", [], "int32")
            wire = Wire(writer, self._transport)
            name = f"tfpar/{kind}_{dtype}_{len(functions)}"
            result = getattr(wire, kind)(name, edge, dtype, *dims, group)
            writer.output(result, dtype)
            writer.effect(result.partition(":")[0])  # what comes after it waits for it
            functions[key] = writer.register()
        note_use(self._order)
        (result,) = functions[key]([tensor, self._order.handle])
        return result

    @functools.cached_property
    def _order(self) -> tf.Variable:
        """Variable that orders the collectives, which all get its handle.

        TensorFlow runs ops that may write to one variable in the order of the program, through
        loops, branches and calls. It has a value, for what saves the variables of functions.

        It has a value, for what saves the variables of functions.
        """
        with tf.init_scope(), tf.device("CPU:0"):
            variable = UninitializedVariable(shape=[], dtype=tf.int32, trainable=False)
            variable.assign(0)
            return variable


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
    """Return the words that do not fit into the frame, padded to one of few sizes.

    Each size needs a function of its own.

    Args:
        length: of the longest message, in words.
    """
    rest = np.zeros(max(_SHORT, 1 << (length - _SHORT - 1).bit_length()), np.int64)
    end = words[_SHORT : _SHORT + len(rest)]
    rest[: len(end)] = end
    return rest


def _message(frame: np.ndarray, rest: np.ndarray) -> Any:
    return json.loads(np.concatenate([frame[1:], rest])[: frame[0]].tobytes())
