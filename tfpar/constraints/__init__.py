"""Constraints: what a user fixes of a plan; propagation decides the rest.

    tap.shard("block_.*/fc1/kernel", dim=1, axis="model")

A pattern is a regular expression that must match the whole path of a variable, or all of its
end from some component on: `fc1/kernel` matches "fc1/kernel" and "gpt/block_0/fc1/kernel", but
not "fc1/kernel_scale" nor "myfc1/kernel". (`keras.distribution.LayoutMap` of Keras 3.15 wants
the whole path; what matches there matches here.) An exact path wins over patterns. Constraints
on different mesh axes of one variable combine, and axes that none of them names
replicate it. A variable that no constraint matches is left to propagation.
"""

from tfpar.constraints.activations import resolve_outputs
from tfpar.constraints.constraint_types import (
    Constraint,
    ContextParallel,
    PutInStage,
    batch,
    constraints_of,
    context_parallel,
    from_layout_map,
    fsdp,
    replicate,
    shard,
    shard_output,
    stage,
)
from tfpar.constraints.layer_specs import collect_layer_specs
from tfpar.constraints.sharded_weights import ShardedWeight, resolve_fsdp, split_weight
from tfpar.constraints.stages import resolve_stages
from tfpar.constraints.tensor_layouts import LAYOUT, collect_tensor_layouts
from tfpar.constraints.variables import (
    Resolution,
    batch_axes,
    check_axes,
    resolve,
    resolve_variables,
)

__all__ = [
    "LAYOUT",
    "Constraint",
    "ContextParallel",
    "PutInStage",
    "Resolution",
    "ShardedWeight",
    "batch",
    "batch_axes",
    "check_axes",
    "constraints_of",
    "context_parallel",
    "from_layout_map",
    "fsdp",
    "collect_layer_specs",
    "collect_tensor_layouts",
    "replicate",
    "resolve",
    "resolve_fsdp",
    "resolve_outputs",
    "resolve_stages",
    "resolve_variables",
    "shard",
    "shard_output",
    "split_weight",
    "stage",
]
