"""The vocabulary: meshes, placements, specs and errors. Free of TensorFlow."""

from tfpar.spec.errors import (
    ArgumentError,
    CaptureError,
    MemoryLimitError,
    OtherModelError,
    PlanError,
    RuleError,
    RuntimeMismatchError,
    SpecError,
    TfparError,
    TimeLimitError,
)
from tfpar.spec.layout import assemble, dim_is_even, local_indices, local_shape, take_local
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
    replicated,
)

__all__ = [
    "MOST_RANKS",
    "ArgumentError",
    "CaptureError",
    "MemoryLimitError",
    "Mesh",
    "OtherModelError",
    "Partial",
    "Placement",
    "PlanError",
    "Replicate",
    "RuleError",
    "RuntimeMismatchError",
    "Shard",
    "Spec",
    "SpecError",
    "TfparError",
    "TimeLimitError",
    "assemble",
    "dim_is_even",
    "format_spec",
    "local_indices",
    "local_shape",
    "parse_placement",
    "parse_spec",
    "replicated",
    "split",
    "take_local",
]
