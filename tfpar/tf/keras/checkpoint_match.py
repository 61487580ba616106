"""Matching of a model's variables to those of a checkpoint, and their differences if it fails."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import msgspec
import tensorflow as tf

from tfpar.ir.names import pair
from tfpar.spec import TfparError
from tfpar.tf.checkpoint import Reader
from tfpar.tf.keras.model import ParallelModel

logger = logging.getLogger("tfpar")

RECORD = "model"
"""The key under which a checkpoint's info has its `ModelRecord`."""

_SHOWN = 5  # names in a message


class ModelRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Record, in a checkpoint, of the model that it was made of.

    Attributes:
        optimizers: their classes.
        weights: names of the model's weights.
        slots: names of the optimizers' variables.
    """

    optimizers: tuple[str, ...]
    weights: tuple[str, ...]
    slots: tuple[str, ...]

    @classmethod
    def of(cls, state: ParallelModel, variables: Mapping[str, tf.Variable]) -> ModelRecord:
        """The record of a model with these variables, by name."""
        names = {id(variable): name for name, variable in variables.items()}
        weights = (names.get(id(w._value)) for w in state.model.weights)
        slots = (names.get(id(v._value)) for o in state.optimizers for v in o.variables)
        classes = tuple(map(_class_of, state.optimizers))
        return cls(classes, tuple(filter(None, weights)), tuple(filter(None, slots)))

    @classmethod
    def read(cls, reader: Reader) -> ModelRecord | None:
        """The record that a checkpoint has; None of older ones, and of others' checkpoints.

        Raises:
            TfparError: it is malformed.
        """
        if RECORD not in reader.info:
            return None
        try:
            return msgspec.convert(reader.info[RECORD], cls)
        except msgspec.ValidationError as error:
            raise reader.damaged(f"what it says of its model is malformed: {error}") from None

    def to_info(self) -> dict[str, Any]:
        """The record as an entry of a checkpoint's info."""
        return {RECORD: msgspec.to_builtins(self)}


def pair_variables(state: ParallelModel, reader: Reader) -> dict[str, str]:
    """The name in the checkpoint of each variable of the model that it has."""
    names = {n: state.variable_name(v) for n, v in state.named_variables().items()}
    counted = [n for n, name in names.items() if not name.trainable]
    pairs = pair(reader.names, {n: name.place for n, name in names.items()}, counted)
    return {now: before for before, now in pairs.items()}


def match_variables(state: ParallelModel, reader: Reader) -> dict[str, str]:
    """The name in the checkpoint of every variable of the model.

    What only the checkpoint has may be left where the model needs none of it: metrics, seeds, and
    the optimizer where the model has none.

    Raises:
        TfparError: it is another model's; names all that differs.
    """
    variables, written = state.named_variables(), pair_variables(state, reader)
    ours, theirs = ModelRecord.of(state, variables), ModelRecord.read(reader)
    tensors = {
        name: (_Tensor.of_variable(v), _Tensor.stored(reader, written.get(name)))
        for name, v in variables.items()
    }
    paired = set(written.values())
    left = [name for name in reader.names if name not in paired]
    if differences := [*_differences(ours, theirs, tensors, left)]:
        raise TfparError(
            f"The checkpoint {reader.path} is not of model {state.model.name!r} as it is now: "
            f"{'; '.join(differences)}. Build and compile the model as it was when it was saved "
            f"(layers, dtype policy, optimizer), or name another checkpoint. Nothing was restored."
        )
    if left and theirs is None and reader.step is not None:
        logger.warning(
            "The checkpoint %s has %s, which the model has not.", reader.path, _some(left)
        )
    return written


class _Tensor(NamedTuple):
    dtype: tf.DType
    shape: tuple[int, ...]

    @classmethod
    def of_variable(cls, variable: tf.Variable) -> _Tensor:
        return cls(variable.dtype, tuple(variable.shape))

    @classmethod
    def stored(cls, reader: Reader, name: str | None) -> _Tensor | None:
        return None if name is None else cls(reader.dtype(name), reader.shape(name))

    def __str__(self) -> str:
        return f"{self.dtype.name} {self.shape}"


def _differences(
    ours: ModelRecord,
    theirs: ModelRecord | None,
    tensors: Mapping[str, tuple[_Tensor, _Tensor | None]],
    left: Collection[str],
) -> Iterator[str]:
    """Yield the differences of the checkpoint's model, each in a few words.

    Args:
        tensors: by the model's names, what it has and what the checkpoint has.
        left: names that only the checkpoint has.
    """
    other_optimizer = bool(
        theirs is not None and ours.optimizers and ours.optimizers != theirs.optimizers
    )
    if theirs is not None and other_optimizer:
        yield (
            f"it was saved with the optimizer {_classes(theirs.optimizers)}, and the model has "
            f"{_classes(ours.optimizers)}"
        )
    slots = set(ours.slots) if other_optimizer else set()
    if missing := [n for n, (_, there) in tensors.items() if there is None and n not in slots]:
        yield f"it has no {_some(missing)}"
    if theirs is not None:
        matters = {*theirs.weights}
        if ours.optimizers and not other_optimizer:
            matters |= {*theirs.slots}
        if more := [name for name in left if name in matters]:
            yield f"the model has no {_some(more)}"
    others = [
        f"{name!r} is {there} there and {here} in the model"
        for name, (here, there) in tensors.items()
        if there is not None and here != there
    ]
    if others:
        yield _listed(others)


def _class_of(optimizer: keras.optimizers.Optimizer) -> str:
    name, inner = type(optimizer).__name__, getattr(optimizer, "inner_optimizer", None)
    return name if inner is None else f"{name}({_class_of(inner)})"


def _classes(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _some(names: Sequence[str]) -> str:
    return _listed([*map(repr, names)])


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
