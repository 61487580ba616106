"""Fingerprints of the batches that this rank was fed, kept until the ranks compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpar.tf.interop.fingerprints import row_fingerprints

_STRING_BYTES = 64
_MOST_SAMPLES = 1024  # of a tensor that are told apart


class LoggedTensor(NamedTuple):
    """Fingerprints of a tensor that was fed.

    Attributes:
        form: dtype and shape: `float32[32, 8]`.
        first: the index of the first sample that was looked at.
        samples: the fingerprint of each; one of all if they are too many.
    """

    form: str
    first: int
    samples: np.ndarray


class LoggedStep(NamedTuple):
    """Name and number of a step, and what it was fed."""

    name: str
    fed: tuple[LoggedTensor, ...]
    digest: str


class InputLog:
    """Log of the steps since ranks last compared what they were fed, by the part of a batch that
    each gave this rank: `""` for all of it.

    Attributes:
        blocks: samples are looked at in so many blocks, one in each step by turns; 1: all of them.
    """

    def __init__(self) -> None:
        self.blocks = 1
        self._steps: dict[str, list[LoggedStep]] = {}
        self._bytes = 0

    def note(self, name: str, number: int, tensors: Sequence[tf.Tensor], part: str = "") -> None:
        """Look at what a step, the job's `number`th, is fed."""
        fed = tuple(self._looked_at(tensor, number) for tensor in tensors)
        digest = hashlib.blake2b(digest_size=8)
        for looked in fed:
            digest.update(looked.form.encode())
            digest.update(looked.samples.tobytes())
        self._steps.setdefault(part, []).append(LoggedStep(name, fed, digest.hexdigest()))
        self._bytes += sum(map(_num_bytes, tensors))

    def _looked_at(self, tensor: tf.Tensor, number: int) -> LoggedTensor:
        form = f"{tensor.dtype.name}{tensor.shape.as_list()}"
        first, some = 0, tensor
        if self.blocks > 1 and tensor.shape.rank:
            length, turn = tensor.shape[0], number % self.blocks
            first = turn * length // self.blocks
            some = tensor[first : (turn + 1) * length // self.blocks]
        if tensor.dtype in (tf.resource, tf.variant):
            return LoggedTensor(form, 0, np.zeros(0, np.uint64))
        samples = row_fingerprints(some)
        if samples.size > _MOST_SAMPLES:
            samples = row_fingerprints(tf.constant(samples[None].view(np.int64)))
        return LoggedTensor(form, first, samples)

    @property
    def digest(self) -> dict[str, str]:
        """Digest of all steps, by part."""
        return {
            part: hashlib.blake2b("".join(self.digests(part)).encode(), digest_size=8).hexdigest()
            for part in self._steps
        }

    @property
    def step_bytes(self) -> float:
        """Mean number of bytes that a step is fed."""
        return self._bytes / max(1, sum(map(len, self._steps.values())))

    def digests(self, part: str) -> list[str]:
        """Return the digest of each step that gave this rank this part."""
        return [step.digest for step in self._steps.get(part, ())]

    def step(self, part: str, at: int) -> dict[str, Any]:
        """The `at`th of these steps, as JSON knows it; nothing if there is none."""
        steps = self._steps.get(part, [])
        if at >= len(steps):
            return {}
        fed = [[looked.form, looked.first, looked.samples.tolist()] for looked in steps[at].fed]
        return {"name": steps[at].name, "fed": fed}

    def restart(self, blocks: int) -> None:
        """Forget the steps: all of them were compared."""
        self.blocks, self._steps, self._bytes = blocks, {}, 0


def _num_bytes(tensor: tf.Tensor) -> int:
    """Return the bytes of a tensor; strings count as short ones."""
    return int(tensor.shape.num_elements()) * (tensor.dtype.size or _STRING_BYTES)


def first_differing(digests: Sequence[str], others: Sequence[str]) -> int:
    """The first step whose digests differ."""
    pairs = zip(digests, others, strict=True)
    return next(at for at, (one, other) in enumerate(pairs) if one != other)


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Describe how two ranks' steps differ: the first input, and how many of its samples."""
    fed, others = one["fed"], other["fed"]
    pairs = zip(fed, others, strict=True)
    at, (mine, theirs) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
    (form, first, samples), (other_form, _, other_samples) = mine, theirs
    which = f"input {at + 1} of {len(fed)}" if len(fed) > 1 else "its input"
    if form != other_form:
        return f"{which} is {form} on the one and {other_form} on the other"
    rows = [
        first + row for row, (a, b) in enumerate(zip(samples, other_samples, strict=True)) if a != b
    ]
    if len(samples) < 2:
        return f"{which} ({form}) differs"
    return f"{which} ({form}) differs in {len(rows)} of {len(samples)} samples, first in {rows[0]}"
