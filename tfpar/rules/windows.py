"""Windows that slide along the spatial dims of an image: which splits of such a dim line up.

An op with windows reads an image and gives a result with one entry per window (a convolution, a
pooling), or the other way round (their gradients). A dim may be split where the windows of a block
of the result start in the block of the image at the same place: where the image is `stride` times
as long as the result. A rank then reads few rows of its neighbours (`left`, `right`), or none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfpar.ir.graph import Op, Tensor

_FIRST = ("NCHW", "NCDHW", "NCW", "CHANNELS_FIRST")
_KNOWN = (*_FIRST, "NHWC", "NDHWC", "NWC", "CHANNELS_LAST")
_FACTORS = "dhw"

PADDINGS = "tfpar_paddings"
"""Attribute of an op of a decomposition that has no `explicit_paddings`: what they would be."""


def text_attr(op: Op, name: str, default: str = "") -> str:
    """Return a text attribute of `op`."""
    value = op.attrs.get(name, default)
    return value.decode() if isinstance(value, bytes) else value


def data_format(op: Op) -> str:
    """Return the op's `data_format` attribute as text."""
    return text_attr(op, "data_format", "NHWC")


def channels_first(op: Op) -> bool:
    return data_format(op) in _FIRST


def image_dims(
    op: Op, rank: int, batch: str = "b", channels: str = "c", spatial: Sequence[str] = ()
) -> str | None:
    """Notation of an image of `rank`; None in an exotic data format.

    Args:
        spatial: of each spatial dim; they stay whole if it is not given.
    """
    if data_format(op) not in _KNOWN:
        return None
    inner = [*spatial] or ["."] * (rank - 2)
    dims = [batch, channels, *inner] if channels_first(op) else [batch, *inner, channels]
    return " ".join(dims)


def spatial_dims(op: Op, rank: int) -> range:
    return range(2, rank) if channels_first(op) else range(1, rank - 1)


def spatial_factors(rank: int) -> list[str]:
    """Name the spatial dims of an image of `rank`: h and w, w alone, or d, h and w."""
    return list(_FACTORS[len(_FACTORS) - (rank - 2) :])


@dataclasses.dataclass(frozen=True)
class SlidingWindow:
    """Geometry of windows along one spatial dim.

    Attributes:
        factor: the name of the dim in notation.
        dim: the dim, in image and result.
        length: entries of the image; count: of the result, which are the windows.
        stride: from one window to the next.
        reach: entries from a window's first to its last, holes of a dilation included.
        before, after: padding of the image.
    """

    factor: str
    dim: int
    length: int
    count: int
    stride: int
    reach: int
    before: int
    after: int

    @property
    def aligned(self) -> bool:
        """Whether equal blocks of the result read equal blocks of the image, and a halo."""
        return self.length == self.stride * self.count and self.before < self.reach

    @property
    def left(self) -> int:
        """Entries before its block of the image that a block of the result reads."""
        return self.before

    @property
    def right(self) -> int:
        """Entries behind its block of the image that a block of the result reads."""
        return max(self.reach - self.stride - self.before, 0)

    @property
    def has_halo(self) -> bool:
        return self.aligned and self.left + self.right > 0

    @property
    def shortest(self) -> int:
        """The fewest entries of the result in a block: its neighbours then read what is its own,
        and each another part."""
        return math.ceil((self.left + self.right) / self.stride)

    def token(self, in_image: bool) -> str:
        """Notation of the dim, where it may split."""
        whole = self.stride == 1 or not in_image
        return self.factor if whole else f"({self.factor} .{self.stride})"


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of an op along each spatial dim of its image.

    Attributes:
        splits: those whose dim may split.
    """

    along: tuple[SlidingWindow, ...]
    splits: tuple[SlidingWindow, ...]

    def tokens(self, in_image: bool) -> list[str]:
        """Notation of the spatial dims, of the image or of the result."""
        return [w.token(in_image) if w in self.splits else "." for w in self.along]


def windows_of(
    op: Op,
    image: Tensor,
    result: Tensor,
    sizes: Sequence[int],
    strides: Sequence[int],
    halos: bool = True,
) -> Windows:
    """Return the windows of `op`.

    Args:
        sizes: of a window along the spatial dims.
        strides: along all dims of the image.
        halos: the op may run on blocks with halos; else dims that need them stay whole.
    """
    rank = len(image.shape)
    names, dilations = spatial_factors(rank), op.attrs.get("dilations") or [1] * rank
    found = []
    for name, dim, size in zip(names, spatial_dims(op, rank), sizes, strict=True):
        length, count, stride = image.shape[dim], result.shape[dim], int(strides[dim])
        reach = (int(size) - 1) * int(dilations[dim]) + 1
        before, after = _padding(op, dim, (count - 1) * stride + reach - length)
        found.append(SlidingWindow(name, dim, length, count, stride, reach, before, after))
    splits = tuple(w for w in found if w.aligned and (halos or not w.has_halo))
    return Windows(tuple(found), splits)


def _padding(op: Op, dim: int, missing: int) -> tuple[int, int]:
    """(before, after) along `dim`, where the windows reach over `missing` entries too many."""
    kind = text_attr(op, "padding", "VALID")
    paddings = op.attrs.get(PADDINGS) or (kind == "EXPLICIT" and op.attrs["explicit_paddings"])
    if paddings:
        return int(paddings[2 * dim]), int(paddings[2 * dim + 1])
    total = max(missing, 0) if kind == "SAME" else 0
    return total // 2, total - total // 2
