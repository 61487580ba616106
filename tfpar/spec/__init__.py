"""The vocabulary: meshes, placements, specs and errors. Free of TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports
from tfpar.spec.errors import (
    ArgumentError,
    CaptureError,
    CompilerError,
    GraphTextError,
    MemoryLimitError,
    OtherModelError,
    PlanError,
    RuleError,
    RuntimeMismatchError,
    ScheduleError,
    SpecError,
    TfparError,
    TimeLimitError,
)
from tfpar.spec.layout import (
    assemble,
    canonical,
    dim_is_even,
    drop_uneven_shards,
    fits,
    local_indices,
    local_length,
    local_shape,
    sliced_spec,
    take_local,
    unsplit_dims,
)
from tfpar.spec.mesh import MOST_RANKS, Mesh, split
from tfpar.spec.placement import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    format_spec,
    parse_placement,
    parse_spec,
    replicated_spec,
)
from tfpar.spec.uneven import UnevenMesh, apportion, seen_rank

if TYPE_CHECKING:
    from tfpar.spec.names import COLLECTIVES
    from tfpar.spec.quantities import Amount, Count, format_bytes, format_seconds

__all__ = [
    "COLLECTIVES",
    "MOST_RANKS",
    "Amount",
    "ArgumentError",
    "CaptureError",
    "CompilerError",
    "Count",
    "GraphTextError",
    "MemoryLimitError",
    "Mesh",
    "OtherModelError",
    "Partial",
    "Placement",
    "PlanError",
    "Replicate",
    "RuleError",
    "RuntimeMismatchError",
    "ScheduleError",
    "Shard",
    "Spec",
    "SpecError",
    "TfparError",
    "TimeLimitError",
    "UnevenMesh",
    "apportion",
    "assemble",
    "canonical",
    "dim_is_even",
    "drop_uneven_shards",
    "fits",
    "format_bytes",
    "format_seconds",
    "format_spec",
    "local_indices",
    "local_length",
    "local_shape",
    "parse_placement",
    "parse_spec",
    "replicated_spec",
    "seen_rank",
    "sliced_spec",
    "split",
    "take_local",
    "unsplit_dims",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.spec.names": ["COLLECTIVES"],
        "tfpar.spec.quantities": ["Amount", "Count", "format_bytes", "format_seconds"],
    },
)
