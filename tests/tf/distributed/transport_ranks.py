"""What each rank does in the contract tests of transports.

`python -m tests.tf.distributed.transport_ranks FOLDER`, started on every rank. Each check that
holds or fails becomes a line of JSON in FOLDER.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.tf.distributed.collective_checks import (
    a_function_runs_again_on_other_values,
    all_gather_joins_every_dtype_along_any_dim,
    all_reduce_carries_several_tensors_of_any_shape,
    all_reduce_takes_every_dtype_and_reduction,
    all_to_all_moves_blocks_between_any_two_dims,
    arguments_may_differ_between_ranks,
    broadcast_brings_every_dtype_from_the_first_rank,
    calls_of_a_step_leave_no_threads_behind,
    collectives_may_become_ready_in_any_order,
    empty_tensors_pass,
    extreme_values_arrive_as_they_are,
    groups_do_not_disturb_each_other,
    large_tensors_arrive_whole,
    reduce_scatter_gives_each_rank_its_block_along_any_dim,
    several_operands_travel_as_one,
    what_cannot_be_reduced_is_refused,
)
from tests.tf.distributed.program_checks import (
    every_schedule_ends_and_computes_the_step,
    programs_that_do_not_fit_are_refused,
    transfers_and_collectives_run_as_often_as_programs_say,
    two_stages_are_the_step_that_they_make_up,
)
from tests.tf.distributed.transfer_checks import (
    channels_serve_one_function_after_another,
    transfers_carry_every_dtype_and_shape,
    transfers_may_be_written_and_become_ready_in_any_order,
    transfers_wait_for_what_they_are_told_to,
)
from tests.tf.distributed.transport_kit import Rank, same, value
from tfpar.tf.distributed.world import this_world

# --- checks of the exchange and of the process ---------------------------------------------------


def ranks_exchange_messages(rank: Rank) -> None:
    exchange = rank.world.exchange
    for length in (0, 3, 50, 1, 2000):
        said = [{"rank": r, "text": "ä" * (length * r)} for r in rank.everyone]
        assert exchange.messages(said[rank.rank]) == said
        assert exchange.message(said[rank.rank] if rank.rank == 0 else None) == said[0]


def ranks_exchange_tensors(rank: Rank) -> None:
    for dtype in ("float32", "bool", "uint64"):
        parts = [value(r, (2, 2), dtype) for r in rank.everyone]
        gathered = rank.world.exchange.all_gather(tf.constant(parts[rank.rank]))
        for got, part in zip(gathered, parts, strict=True):
            same(got, part, dtype)
        same(rank.world.exchange.broadcast(tf.constant(parts[rank.rank])), parts[0], dtype)


def tensorflow_works_on_beside_the_transport(rank: Rank) -> None:
    variable = tf.Variable([1.0, 2.0])
    dataset = tf.data.Dataset.range(6).map(lambda n: n + 1, num_parallel_calls=2).batch(4)

    @tf.function
    def add(x: tf.Tensor) -> tf.Tensor:
        variable.assign_add(x)
        return variable * 2.0

    with tf.device("CPU:0"):
        same(add(tf.constant([1.0, 1.0])), np.array([4, 6], np.float32), "tf.function")
    same(variable.read_value(), np.array([2, 3], np.float32), "variable")
    assert [batch.numpy().tolist() for batch in dataset] == [[1, 2, 3, 4], [5, 6]]


CHECKS: dict[str, Callable[[Rank], None]] = {
    check.__name__: check
    for check in (
        large_tensors_arrive_whole,
        all_reduce_takes_every_dtype_and_reduction,
        all_reduce_carries_several_tensors_of_any_shape,
        all_gather_joins_every_dtype_along_any_dim,
        reduce_scatter_gives_each_rank_its_block_along_any_dim,
        all_to_all_moves_blocks_between_any_two_dims,
        several_operands_travel_as_one,
        broadcast_brings_every_dtype_from_the_first_rank,
        extreme_values_arrive_as_they_are,
        empty_tensors_pass,
        what_cannot_be_reduced_is_refused,
        groups_do_not_disturb_each_other,
        collectives_may_become_ready_in_any_order,
        arguments_may_differ_between_ranks,
        a_function_runs_again_on_other_values,
        calls_of_a_step_leave_no_threads_behind,
        transfers_carry_every_dtype_and_shape,
        transfers_may_be_written_and_become_ready_in_any_order,
        channels_serve_one_function_after_another,
        transfers_wait_for_what_they_are_told_to,
        two_stages_are_the_step_that_they_make_up,
        every_schedule_ends_and_computes_the_step,
        transfers_and_collectives_run_as_often_as_programs_say,
        programs_that_do_not_fit_are_refused,
        ranks_exchange_messages,
        ranks_exchange_tensors,
        tensorflow_works_on_beside_the_transport,
    )
}
OF_4_RANKS = (groups_do_not_disturb_each_other.__name__,)


def main(folder: str) -> None:
    world = this_world()
    assert world is not None, "start this with `tfpar run`"
    rank = Rank(world)
    with open(Path(folder) / f"{world.transport.name}{rank.rank}.jsonl", "w") as report:
        for name, check in CHECKS.items():
            if name in OF_4_RANKS and rank.size != 4:
                continue
            error = ""
            try:
                with world.at(name):
                    check(rank)
            except Exception:  # noqa: BLE001 - what it is goes into the report
                error = traceback.format_exc()
            report.write(json.dumps({"check": name, "error": error}) + "\n")
            report.flush()


if __name__ == "__main__":
    main(sys.argv[1])
