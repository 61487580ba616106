"""Propagation: from the specs of anchors to those of every tensor, and the reshards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.compile.local.batch_statistics import statistics_of
    from tfpar.compile.local.block_all_reduce import decompose_all_reduces
    from tfpar.compile.local.chunks import split_batch
    from tfpar.compile.local.local_graph import TASK, LocalProgram, StagePass, build_local_program
    from tfpar.compile.local.microbatches import build_microbatched_program
    from tfpar.compile.local.packing import pack_collectives
    from tfpar.compile.local.programs import Group, ProgramSet
    from tfpar.compile.local.reshard import COLLECTIVE_TYPES, all_reduce
    from tfpar.compile.local.scatter_gather import Slicing
    from tfpar.compile.local.stage_split import PipelineLowering, send_in_slices, split_stages
    from tfpar.compile.local.transfers import TRANSFER_TYPES, Channel, channels_of, recv, send
    from tfpar.compile.local.uneven_program import build_uneven_program
    from tfpar.compile.local.xla_regions import MUST_COMPILE

__all__ = [
    "COLLECTIVE_TYPES",
    "MUST_COMPILE",
    "TASK",
    "TRANSFER_TYPES",
    "Channel",
    "Group",
    "LocalProgram",
    "PipelineLowering",
    "ProgramSet",
    "Slicing",
    "StagePass",
    "all_reduce",
    "build_local_program",
    "build_microbatched_program",
    "build_uneven_program",
    "channels_of",
    "decompose_all_reduces",
    "find_torn_arrivals",
    "pack_collectives",
    "recv",
    "send",
    "send_in_slices",
    "split_batch",
    "WrittenStep",
    "split_stages",
    "statistics_of",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.compile.local.batch_statistics": ["statistics_of"],
        "tfpar.compile.local.block_all_reduce": ["decompose_all_reduces"],
        "tfpar.compile.local.chunks": ["split_batch"],
        "tfpar.compile.local.local_graph": [
            "LocalProgram",
            "StagePass",
            "TASK",
            "build_local_program",
        ],
        "tfpar.compile.local.microbatches": ["build_microbatched_program"],
        "tfpar.compile.local.packing": ["pack_collectives"],
        "tfpar.compile.local.programs": ["Group", "ProgramSet"],
        "tfpar.compile.local.reshard": ["COLLECTIVE_TYPES", "all_reduce"],
        "tfpar.compile.local.scatter_gather": ["Slicing"],
        "tfpar.compile.local.stage_split": [
            "PipelineLowering",
            "WrittenStep",
            "find_torn_arrivals",
            "send_in_slices",
            "split_stages",
        ],
        "tfpar.compile.local.transfers": [
            "Channel",
            "TRANSFER_TYPES",
            "channels_of",
            "recv",
            "send",
        ],
        "tfpar.compile.local.uneven_program": ["build_uneven_program"],
        "tfpar.compile.local.xla_regions": ["MUST_COMPILE"],
    },
)
