"""Which cases a job runs, one after another, by day and at night.

By day it runs those by which processes differ from ranks in one process: each collective, the sends
of stages, what ranks draw, read, write and agree on. Tests in one process check the numbers of all
other features by day; at night processes run these, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.cases import is_nightly
from tests.tf.distributed.training import (
    data,
    distributions,
    drifts,
    files,
    layouts,
    monitored,
    pipelines,
    refusals,
    steps,
    tried,
)
from tests.tf.distributed.training.place import Case

SAME_AS_ONE: dict[str, list[Case]] = {
    "two": [
        *layouts.ON_TWO,
        *data.SEEDED,
        *files.CASES,
        *steps.CASES,
        *distributions.CASES,
    ],
    "four": [*layouts.ON_FOUR, *pipelines.ON_FOUR],
    "four_with_tensorflow": [*pipelines.WITH_TENSORFLOW, layouts.context_and_data_parallel],
    "tried": tried.CASES,
    "monitored": monitored.CASES,
}
"""What gives the same on so many ranks as on one device."""

SETS: dict[str, list[Case]] = {
    **SAME_AS_ONE,
    "two": [*SAME_AS_ONE["two"], *data.UNSEEDED, *drifts.CASES, *refusals.CASES],
    "four": [*SAME_AS_ONE["four"], *drifts.ON_FOUR],
}
BY_DAY: dict[str, list[Case]] = {
    "two": [
        layouts.data_parallel_in_unequal_shares,  # reduced by their sizes, and gathered
        layouts.fully_sharded_in_microbatches,  # reduce-scatter and all-gather
        layouts.context_parallel_in_microbatches,  # each rank sends to the next
        layouts.experts_by_all_to_all,
        layouts.compressed_as_fp16,
        data.datasets_shuffled_under_a_seed,
        data.evaluation_and_prediction,
        data.what_each_op_takes_in_rows_is_read_in_parts,
        files.models_written,
        files.callbacks,
        files.loggers,
        files.backups,
        steps.functions_of_tensors,
        distributions.layers_split_by_a_layout_map,
        data.nothing_seeded,
        data.random_ops_with_a_state,
        *drifts.BY_DAY,
        *refusals.CASES,
    ],
    "four": [
        layouts.two_dimensional_tensor_parallel,  # groups of two, across each other
        layouts.context_and_data_parallel,
        pipelines.virtual_stages,  # sends both ways, and two stages a set of ranks
        pipelines.unlike_stages_of_ranks_of_unequal_speed,  # parts of unlike shapes to several
        drifts.another_slot,
    ],
    "four_with_tensorflow": [
        pipelines.stages_and_data_parallelism,
        pipelines.data_read_in_parts_by_stages,
        pipelines.models_saved_in_stages,
        layouts.context_and_data_parallel,
    ],
    "tried": [tried.a_trial_fails_on_one_rank, tried.the_slowest_rank_decides],
    "monitored": monitored.CASES,
}


def of_job(name: str) -> Iterator[Case]:
    """The cases that a job of this name runs now, in the order of `SETS`."""
    return (case for case in SETS[name] if is_nightly() or case in BY_DAY[name])
