"""Propagation: from the specs of anchors to those of every tensor, and the reshards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.propagation.decide import OpStrategy
    from tfpar.propagation.engine import propagate
    from tfpar.propagation.factors import WHOLE
    from tfpar.propagation.partitioned_graph import (
        Anchors,
        Decision,
        OpPlan,
        PartitionedGraph,
        Reshard,
    )
    from tfpar.propagation.prepared_graph import PreparedGraph, prepare
    from tfpar.propagation.uneven_batch import (
        UnevenSplitError,
        check_shares,
        with_own_share,
        with_uneven_mesh,
    )

__all__ = [
    "WHOLE",
    "Anchors",
    "Decision",
    "OpPlan",
    "OpStrategy",
    "PartitionedGraph",
    "PreparedGraph",
    "Reshard",
    "UnevenSplitError",
    "check_shares",
    "prepare",
    "propagate",
    "with_own_share",
    "with_uneven_mesh",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.propagation.decide": ["OpStrategy"],
        "tfpar.propagation.engine": ["propagate"],
        "tfpar.propagation.factors": ["WHOLE"],
        "tfpar.propagation.partitioned_graph": [
            "Anchors",
            "Decision",
            "OpPlan",
            "PartitionedGraph",
            "Reshard",
        ],
        "tfpar.propagation.prepared_graph": ["PreparedGraph", "prepare"],
        "tfpar.propagation.uneven_batch": [
            "UnevenSplitError",
            "check_shares",
            "with_own_share",
            "with_uneven_mesh",
        ],
    },
)
