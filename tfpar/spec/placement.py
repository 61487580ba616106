"""Placements: the state of a tensor along one mesh axis.

A *spec* is a tuple with one placement per mesh axis. Axes apply left to right,
major to minor: each splits the local array that the axes before it left.
Placements are interned, so equality is identity and specs hash fast.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from tfpar.spec.arguments import check_choice, integer
from tfpar.spec.errors import SpecError

if TYPE_CHECKING:
    from typing_extensions import Self

REDUCTIONS = ("sum", "max", "min", "prod", "any", "all")


class Placement:
    """State of a tensor along one mesh axis; see `Shard`, `Replicate`, `Partial`."""

    __slots__: ClassVar[tuple[str, ...]] = ()
    _interned: ClassVar[dict[tuple[object, ...], Any]] = {}
    """By class and fields, the one object of that class."""

    @classmethod
    def _intern(cls, *fields: object) -> Self:
        key = (cls, *fields)
        self: Self | None = Placement._interned.get(key)
        if self is None:
            self = object.__new__(cls)
            for name, value in zip(cls.__slots__, fields, strict=True):
                object.__setattr__(self, name, value)
            Placement._interned[key] = self
        return self

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __reduce__(self) -> tuple[type[Placement], tuple[object, ...]]:
        return type(self), tuple(getattr(self, n) for n in self.__slots__)

    def __repr__(self) -> str:
        return str(self)


class Shard(Placement):
    """Placement in which the axis splits dimension `dim`.

    The dimension of local length n is seen as (n // stride, stride // unit, unit)
    and the middle part is cut into one block of `ceil` size per rank, the last
    ones shorter or empty (padded in storage). `stride=None` means n: contiguous
    blocks. A smaller stride is Rhino §4.1's strided partitioning: the split of a
    minor factor of a compound dimension. `unit` matters only where the
    middle part does not divide: blocks are whole multiples of it.
    """

    __slots__ = ("dim", "stride", "unit")
    dim: int
    stride: int | None
    unit: int

    def __new__(cls, dim: int, stride: int | None = None, unit: int = 1) -> Self:
        self: Self | None = None
        if type(dim) is type(unit) is int and (stride is None or type(stride) is int):
            self = Placement._interned.get((cls, dim, stride, unit))
        if self is None:
            stride = None if stride is None else integer("Shard: stride", stride, 1)
            self = cls._intern(integer("Shard: dim", dim), stride, integer("Shard: unit", unit, 1))
        return self

    def __str__(self) -> str:
        stride = "" if self.stride is None else f"/{self.stride}"
        unit = "" if self.unit == 1 else f"*{self.unit}"
        return f"S({self.dim}{stride}{unit})"

    def view(self, length: int) -> tuple[int, int, int]:
        """View a dimension of local length `length` as (outer, split, unit)."""
        stride = length if self.stride is None else self.stride
        if stride == 0:
            return 1, 0, self.unit
        if not self.fits(length):
            raise SpecError(f"{self} does not fit a dimension of length {length}.")
        return length // stride, stride // self.unit, self.unit

    def fits(self, length: int) -> bool:
        """Whether a dimension of local length `length` can be cut so."""
        stride = length if self.stride is None else self.stride
        return stride == 0 or (length % stride == 0 and stride % self.unit == 0)

    def block(self, length: int, parts: int) -> int:
        """Count the entries of the middle part that each of `parts` ranks stores."""
        return math.ceil(self.view(length)[1] / parts)

    def local_length(self, length: int, parts: int) -> int:
        """Find the stored local length, padding included."""
        outer, _, unit = self.view(length)
        return outer * self.block(length, parts) * unit

    def is_even(self, length: int, parts: int) -> bool:
        return self.view(length)[1] % parts == 0


class Replicate(Placement):
    """Placement in which every rank along the axis holds the same values."""

    __slots__ = ()

    def __new__(cls) -> Self:
        return cls._intern()

    def __str__(self) -> str:
        return "R"


class Partial(Placement):
    """Placement whose value is the reduction by `op` of what the ranks along the axis hold."""

    __slots__ = ("op",)
    op: str

    def __new__(cls, op: str = "sum") -> Self:
        return cls._intern(check_choice("Partial: op", op, REDUCTIONS))

    def __str__(self) -> str:
        return f"P({self.op})"


Spec = tuple[Placement, ...]

_SHARD = re.compile(r"S\((\d{1,18})(?:/(\d{1,18}))?(?:\*(\d{1,18}))?\)$", re.ASCII)
_PARTIAL = re.compile(r"P\((\w+)\)$")


def parse_placement(text: str) -> Placement:
    """Parse the placement that prints as `text`: `S(0)`, `S(1/64)`, `R`, `P(sum)`."""
    text = text.strip()
    if text == "R":
        return Replicate()
    if match := _SHARD.match(text):
        dim, stride, unit = match.groups()
        return Shard(int(dim), int(stride) if stride else None, int(unit or 1))
    if match := _PARTIAL.match(text):
        return Partial(match[1])
    raise SpecError(f"Cannot read placement {text!r}; expected S(dim), R or P(op).")


def format_spec(spec: Spec) -> str:
    """Write `S(0),R`: one placement per axis, comma separated."""
    return ",".join(map(str, spec))


def parse_spec(text: str) -> Spec:
    """Parse what `format_spec` writes."""
    return tuple(parse_placement(part) for part in text.split(","))


def replicated_spec(num_axes: int) -> Spec:
    """Make the spec that replicates over every axis."""
    return (Replicate(),) * num_axes
