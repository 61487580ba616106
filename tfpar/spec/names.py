"""Names that more than one package knows: of dtypes, and of collectives."""

from __future__ import annotations

ITEMSIZES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "float8_e5m2": 1,
    "float8_e4m3fn": 1,
}
"""Bytes per element of each dtype that holds plain numbers."""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
"""Collectives: operations of all ranks of a group together."""

PERMUTE = "permute"
"""Each rank of a group sends what it has to one other: transfers, which take as long as those of
stages."""

GROUP_OPERATIONS = (*COLLECTIVES, PERMUTE)
"""All that the ranks of a group do together."""
