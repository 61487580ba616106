"""The arguments of a call, taken apart: tensors, and the values that a step is traced for."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar.spec import TfparError

_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, type, tf.DType)


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """One call's arguments: `(args, kwargs)`, taken apart.

    Attributes:
        structure: the arguments, with a marker in place of each tensor and each source of data.
        tensors: what steps are fed, in order.
        sources: datasets and iterators, in order.
        key: equal where a trace of one call serves the other, shapes aside.
    """

    structure: Any
    tensors: tuple[Any, ...]
    sources: tuple[Any, ...]
    key: Any

    @classmethod
    def of(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallArguments:
        """Take the arguments of a call apart.

        Raises: TfparError: a value that is no tensor and cannot be compared with others.
        """
        arguments = (tuple(args), dict(kwargs))
        leaves = tf.nest.flatten(arguments)
        tensors: list[Any] = []
        sources: list[Any] = []
        kept: list[Any] = []
        keys: list[Any] = []
        for leaf in leaves:
            if is_tensor(leaf):
                tensors.append(leaf)
                kept.append(_TENSOR)
                keys.append(_TENSOR)
            elif isinstance(leaf, (tf.data.Dataset, tf.data.Iterator)):
                sources.append(leaf)
                kept.append(_SOURCE)
                keys.append((type(leaf), repr(leaf.element_spec)))
            else:
                kept.append(leaf)
                keys.append(static_key(leaf, f"An argument of {name!r}"))
        structure = tf.nest.pack_sequence_as(arguments, kept)
        shape = repr(tf.nest.map_structure(lambda _: 0, arguments))
        return cls(structure, tuple(tensors), tuple(sources), (shape, *keys))

    def with_tensors(self, tensors: Sequence[Any], sources: Sequence[Any] = ()) -> Any:
        """`(args, kwargs)` with these tensors and sources in the places of the call's own."""
        tensor, source = iter(tensors), iter(sources)

        def filled(leaf: Any) -> Any:
            if leaf is _TENSOR:
                return next(tensor)
            return next(source) if leaf is _SOURCE else leaf

        return tf.nest.map_structure(filled, self.structure)


class _Marker(enum.Enum):
    TENSOR = enum.auto()
    SOURCE = enum.auto()


_TENSOR, _SOURCE = _Marker.TENSOR, _Marker.SOURCE


def is_tensor(value: Any) -> bool:
    """Whether a step is fed `value`, instead of being traced for it."""
    if isinstance(value, (tf.Variable, tf.data.Dataset, tf.data.Iterator)):
        return False
    fed = (tf.Tensor, np.ndarray, np.generic, tf.TypeSpec, tf.__internal__.CompositeTensor)
    return isinstance(value, fed)


def static_key(value: Any, what: str) -> Any:
    """Return a key that is equal for values that one trace serves, as `tf.function` compares them.

    Args:
        what: of the value, for the message.

    Raises:
        TfparError: the value has no hash.
    """
    if isinstance(value, float):
        return float, repr(value)  # 0.0 and -0.0 are equal and differ; nan is not equal to itself
    if value is None or isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tf.Variable, keras.Variable)):
        return _Same(value)
    try:
        key = weakref.ref(value)
    except TypeError:
        key = value
    try:
        hash(key)
    except TypeError:
        raise TfparError(
            f"{what} is a {type(value).__name__}, which is neither a tensor nor hashable. Convert "
            f"it to a tensor, or to a tuple, a list or a dict of tensors and Python values."
        ) from None
    return type(value), key


class _Same:
    """The key of one object, which it does not keep alive."""

    def __init__(self, value: Any) -> None:
        self._reference = weakref.ref(value)
        self._hash = id(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        value = self._reference()
        return isinstance(other, _Same) and value is not None and value is other._reference()


def fit_signature(name: str, bound: inspect.BoundArguments, signature: tuple[Any, ...]) -> None:
    """Convert the first arguments to the specs of `signature`, in place.

    Raises:
        TfparError: an argument does not fit its spec.
    """
    parameters = list(bound.arguments)
    if len(signature) > len(parameters):
        raise TfparError(
            f"The input_signature of {name!r} has {len(signature)} specs, and the function "
            f"{len(parameters)} parameters. Give one for each, at most."
        )
    for parameter, specs in zip(parameters, signature, strict=False):

        def fitted(spec: Any, value: Any, parameter: str = parameter) -> Any:
            if not isinstance(spec, tf.TensorSpec):
                return value
            if not isinstance(value, tf.TensorSpec):
                try:
                    value = tf.convert_to_tensor(value, spec.dtype)
                except (TypeError, ValueError) as error:
                    raise TfparError(
                        f"The argument {parameter!r} of {name!r} cannot be converted to {spec}, "
                        f"which its input_signature asks for: {error}"
                    ) from None
            if value.dtype != spec.dtype or not spec.shape.is_compatible_with(value.shape):
                raise TfparError(
                    f"The argument {parameter!r} of {name!r} is {value.dtype.name} of shape "
                    f"{value.shape}; its input_signature asks for {spec}."
                )
            return value

        try:
            given = tf.__internal__.nest.map_structure_up_to(
                specs, fitted, specs, bound.arguments[parameter]
            )
        except (TypeError, ValueError) as error:
            raise TfparError(
                f"The argument {parameter!r} of {name!r} does not have the structure of its "
                f"input_signature: {error}"
            ) from None
        bound.arguments[parameter] = given
