"""Warm starts: layouts of weights in the best plans of meshes that were searched.

There are few of them: what suits a mesh suits nearly all that split weights in as many axes,
however long these are, and be it for other numbers of ranks. So the search on a mesh of the same
kind begins where these ended.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from tfpar.planning.meshes import LogicalMesh
from tfpar.spec import Spec

MOST_KEPT = 8
"""Layouts of a kind of meshes: pricing one takes a large part of what a search near it does."""

Layout = Mapping[str, Spec]
"""Of each group of weights, by its name."""


class WarmStarts:
    """The last layouts, each once, by the axes that split the batch and those that split them."""

    def __init__(self) -> None:
        self._found: dict[Hashable, list[Layout]] = {}
        self._sizes: dict[Hashable, set[int]] = {}

    def of(self, logical: LogicalMesh) -> tuple[Layout, ...]:
        """Return the layouts found on meshes like this one, the last ones first."""
        return tuple(self._found.get(kind_of(logical), ()))

    def elsewhere(self, size: int) -> frozenset[Hashable]:
        """Return the kinds of meshes of which something was found for another number of ranks."""
        return frozenset(kind for kind, sizes in self._sizes.items() if sizes - {size})

    def add(self, logical: LogicalMesh, layout: Layout) -> None:
        """Keep what was found on `logical`."""
        kind = kind_of(logical)
        self._sizes.setdefault(kind, set()).add(logical.mesh.size)
        others = [known for known in self._found.get(kind, ()) if known != layout]
        self._found[kind] = [layout, *others][:MOST_KEPT]


def kind_of(logical: LogicalMesh) -> Hashable:
    """Return the key that meshes share whose best layouts resemble each other."""
    return logical.batch_axes, logical.model_axes


class LayoutsByFold(dict[int, WarmStarts]):
    """The last layouts, by the least number of duplicates that are folded."""
