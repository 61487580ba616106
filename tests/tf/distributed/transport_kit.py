"""What the checks of `transport_ranks` are made of: ranks, and the values that they exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfpar.ir import DType
from tfpar.tf.distributed.world import World
from tfpar.tf.runtime.backends.wire import Wire
from tfpar.tf.runtime.function_def import (
    FunctionWriter,
    RegisteredFunction,
    serialize_attrs,
)

DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
COMPLEX, UNSIGNED_WORDS = ("complex64", "complex128"), ("uint32", "uint64")
REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.sum,
    "prod": np.prod,
    "max": np.max,
    "min": np.min,
    "any": np.any,
    "all": np.all,
}
GROUPS_OF_4 = [(0, 1), (2, 3), (0, 2), (1, 3)]

Group = tuple[int, ...]
# Writes nodes behind the edges of arguments; returns edges and dtypes of results.
Body = Callable[[Wire, list[str]], list[tuple[str, str]]]


class Rank:
    """One rank among `size`; all of a check's functions get their inputs from here."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.transport = world.transport
        self.rank, self.size = world.rank, world.size
        self.everyone = tuple(range(world.size))
        self.transport.connect([self.everyone])

    def function(self, dtypes: Sequence[str], body: Body) -> RegisteredFunction:
        """A function of arguments of these dtypes, as it is registered with TensorFlow.

        A result without a dtype is a node that runs although nothing is returned of it.
        """
        writer = FunctionWriter("transport_test", bounded=True)  # as every check is
        edges = [writer.argument(f"in{i}", dtype) for i, dtype in enumerate(dtypes)]
        for edge, dtype in body(Wire(writer, self.transport), edges):
            if dtype:
                writer.output(edge, dtype)
            else:
                writer.effect(edge)
        return writer.register()


def value(rank: int, shape: Sequence[int], dtype: str, salt: int = 0) -> np.ndarray:
    """What `rank` sends: small whole numbers, which every dtype adds and multiplies exactly."""
    seed = [rank, salt, *shape, sum(map(ord, dtype))]
    drawn = np.random.default_rng(seed).integers(0, 3, size=shape)
    if dtype in COMPLEX:
        drawn = drawn + 1j * drawn[..., ::-1]
    return drawn.astype(tf.as_dtype(dtype).as_numpy_dtype)


def reduced(parts: Sequence[np.ndarray], reduction: str) -> np.ndarray:
    dtype = parts[0].dtype
    if dtype == np.bool_:
        reduction = {"max": "any", "min": "all"}.get(reduction, reduction)
    wide = np.stack(parts).astype(np.float32 if dtype.name == "bfloat16" else dtype)
    return REDUCTIONS[reduction](wide, axis=0).astype(dtype)


def total(parts: Sequence[np.ndarray]) -> np.ndarray:
    return reduced(parts, "sum")


def same(got: tf.Tensor, expected: np.ndarray, what: object) -> None:
    """Raise AssertionError unless all bits are the same."""
    found = got.numpy()
    assert found.dtype == expected.dtype, (what, found.dtype, expected.dtype)
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    assert found.tobytes() == expected.tobytes(), (what, found, expected)


def reductions_of(dtype: str) -> list[str]:
    if dtype == "bool":
        return ["any", "all"]
    return ["sum"] if dtype in COMPLEX else ["sum", "prod", *_ordered(dtype)]


def _ordered(dtype: str) -> list[str]:
    return [] if dtype in UNSIGNED_WORDS else ["max", "min"]


def own(rank: Rank, values: Sequence[Sequence[np.ndarray]]) -> list[tf.Tensor]:
    """This rank's of the values that all ranks have."""
    return [tf.constant(parts[rank.rank]) for parts in values]


def after(wire: Wire, name: str, edge: str, matrix: str, rank: Rank) -> str:
    """The tensor, once the square of the matrix is known."""
    writer, device = wire._writer, rank.transport.device
    attrs = {"T": DType("float32"), "transpose_a": False, "transpose_b": False}
    writer.node(f"{name}/square", "MatMul", [matrix, matrix], serialize_attrs(attrs), device)
    attrs = {"T": DType("float32")}
    control = [f"{name}/square"]
    writer.node(f"{name}/after", "Identity", [edge], serialize_attrs(attrs), device, control)
    return f"{name}/after:output:0"
