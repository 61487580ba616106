"""Op rules: how each op type's dimensions may split. Free of TensorFlow.

Importing this package registers every rule; one module per op family.
"""

from tfpar.rules import (
    block_sums,
    convolution,
    diagonals,
    image,
    indexing,
    layout,
    linalg,
    lists,
    matrix,
    normalization,
    optimizer_ops,
    pieces,
    pointwise,
    pooling,
    pseudo,
    random,
    reduction,
    scatter,
    segments,
    slicing,
    softmax,
    sorting,
    state,
    strided,
    values,
)
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import (
    RuleFunction,
    find_rule,
    has_rule,
    register_rule,
    registered_types,
    rule,
    rule_function,
)
from tfpar.rules.rule import PLAIN, SAME, OpRule, find_relabelled_inputs, make_rule, replicate_rule

FAMILIES = (
    block_sums,
    convolution,
    diagonals,
    image,
    indexing,
    layout,
    linalg,
    lists,
    matrix,
    normalization,
    optimizer_ops,
    pieces,
    pointwise,
    pooling,
    pseudo,
    random,
    reduction,
    scatter,
    segments,
    slicing,
    softmax,
    sorting,
    state,
    strided,
    values,
)

__all__ = [
    "FAMILIES",
    "PLAIN",
    "SAME",
    "LocalOp",
    "OpRule",
    "RuleFunction",
    "find_relabelled_inputs",
    "find_rule",
    "has_rule",
    "make_rule",
    "register_rule",
    "registered_types",
    "replicate_rule",
    "rule",
    "rule_function",
]
