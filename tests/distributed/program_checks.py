"""Checks of programs that differ between groups of ranks, which every rank runs."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.cut_steps import attending, cut, traced
from tests.distributed.transport_kit import Rank, same
from tests.staged import Stored, batch, initial, plainly, two_stages
from tfpar.pipeline.generators import FAMILIES, generate
from tfpar.rewrite.programs import ProgramSet
from tfpar.runtime.executable import link
from tfpar.runtime.ranks import Ranks
from tfpar.spec import RuntimeMismatchError


def own_program(rank: Rank) -> ProgramSet:
    """Of the two stages, that of this rank's group alone."""
    programs = two_stages(rank.size)
    group = programs.group_of(rank.rank)
    return ProgramSet({group: programs.programs[group]})


def two_stages_are_the_step_that_they_make_up(rank: Rank) -> None:
    programs = own_program(rank)
    (group,) = programs.programs
    ranks, stage = Ranks.of(rank.size, rank.world), int(0 not in group)
    run = link(programs, ranks, fed_in_parts=False)
    weights, at = initial(), group.index(rank.rank)
    stored = Stored(weights[stage], [rank.transport.device] * len(group), [at])
    for step in range(3):
        weights, expected = plainly(weights, step)
        results = run([tf.constant(batch(step)[stage])], [stored.handles])
        for got, wanted in zip(results, expected[1:] if stage else expected[:1], strict=True):
            same(got, wanted, (stage, step))
        stored.check(weights[stage])


def every_schedule_ends_and_computes_the_step(rank: Rank) -> None:
    """A stage, or two, on each rank; more microbatches than tensors are asked for ahead."""
    step = traced(attending, 16)
    ranks = Ranks.of(rank.size, rank.world)
    for name in FAMILIES:
        programs = cut(step, generate(name, rank.size, 8)).programs
        run = link(programs, ranks, fed_in_parts=False)
        fed = [tf.constant(a) for a in step.args]
        for _ in range(2):
            for got, wanted in zip(run(fed, []), step.expected, strict=True):
                np.testing.assert_allclose(got.numpy(), wanted, 1e-4, 1e-5, err_msg=name)


def programs_that_do_not_fit_are_refused(rank: Rank) -> None:
    """By all ranks, which then go on."""
    ranks, last = Ranks.of(rank.size, rank.world), rank.size - 1
    programs = own_program(rank)
    if rank.rank == last:
        (program,) = programs.programs.values()
        next(op for op in program.graph.ops if op.type == "Recv").attrs["key"] = "other"
    try:
        link(programs, ranks, fed_in_parts=False)
    except RuntimeMismatchError as error:
        # A group of one has nobody to differ from, but transfers do not match.
        wanted = "which does not" if rank.size == 2 else f"Ranks {last - 1} and {last} are about"
        assert wanted in str(error), error
    else:
        raise AssertionError("linked")
