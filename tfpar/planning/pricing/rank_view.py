"""`RankView`: the ranks that stand for all of a layout where a plan is priced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfpar.spec import UnevenMesh


class RankView(NamedTuple):
    """Ranks of a layout that stand for all of them in a price.

    Attributes:
        ranks: of its mesh, at whose pace all run; none: each actor runs at its own.
        mesh: as they see it, if they have unequal shares of the batch.
    """

    ranks: Sequence[int] = ()
    mesh: UnevenMesh | None = None
