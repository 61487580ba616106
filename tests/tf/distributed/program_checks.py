"""Checks of programs that differ between groups of ranks, which every rank runs."""

from __future__ import annotations

import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tests.cases import is_nightly
from tests.cut_steps import attending, cut, three_layers, traced
from tests.staged import Stored, batch, initial, plainly, two_stages
from tests.tf.distributed.transport_kit import Rank, same
from tfpar.cluster import Cluster, Device, Level
from tfpar.compile.local import COLLECTIVE_TYPES, TASK, TRANSFER_TYPES, ProgramSet, channels_of
from tfpar.cost import ScatterGatherCost
from tfpar.pipeline import FAMILIES, generate
from tfpar.spec import Mesh, Replicate, RuntimeMismatchError, Shard
from tfpar.tf.runtime.executable import link
from tfpar.tf.runtime.ranks import Ranks


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


BY_DAY = ("1f1b", "zb-v")
"""Families of schedules: one stage on each rank, and two, of which backward passes go in halves."""


def every_schedule_ends_and_computes_the_step(rank: Rank) -> None:
    """A stage, or two, on each rank; more microbatches than tensors are asked for ahead."""
    step = traced(attending, 16)
    ranks = Ranks.of(rank.size, rank.world)
    for name in FAMILIES if is_nightly() else BY_DAY:
        programs = cut(step, generate(name, rank.size, 8)).programs
        run = link(programs, ranks, fed_in_parts=False)
        fed = [tf.constant(a) for a in step.args]
        for _ in range(2):
            for got, wanted in zip(run(fed, []), step.expected, strict=True):
                np.testing.assert_allclose(got.numpy(), wanted, 1e-4, 1e-5, err_msg=name)


def transfers_and_collectives_run_as_often_as_programs_say(rank: Rank) -> None:
    """Counted while a step runs, its layers split over half of the ranks in each of two stages;
    what these hold alike goes whole or, where they are several, in slices."""
    mesh = Mesh.of({"data": 1, "model": rank.size // 2})
    split = [(Replicate(), Shard(1)), (Replicate(), Shard(0)), (Replicate(), Replicate())]
    step, schedule = traced(three_layers, 16), generate("1f1b", 2, 4)
    whole = cut(step, schedule, mesh, weights=tuple(split))
    slicing = ScatterGatherCost((mesh,) * schedule.num_actors, slow_between(mesh.size))
    sliced = cut(step, schedule, mesh, weights=tuple(split), slicing=slicing)
    sent = [[sum(t.num_bytes for t in own) for own in one.sent()] for one in (whole, sliced)]
    assert sent[1] < sent[0] if mesh.size > 1 else sent[1] == sent[0], sent
    for staged in (whole, sliced) if mesh.size > 1 else (whole,):
        run = link(staged.programs, Ranks.of(rank.size, rank.world), fed_in_parts=False)
        fed = [tf.constant(a) for a in step.args]
        for got, wanted in zip(run(fed, []), step.expected, strict=True):
            np.testing.assert_allclose(got.numpy(), wanted, 1e-4, 1e-5)
        ran = nodes_that_run(functools.partial(run, fed, []))
        ran_as_often_as_programs_say(rank, staged.programs, ran)


def slow_between(size: int) -> Cluster:
    """Machines of a stage of so many ranks each, which slow links join."""
    levels = [Level(2, 1e5, 0.0), Level(size, 1e12, 0.0)]
    return Cluster.regular("slow", Device({"float32": 1e9}, 1e9, 1e9), levels)


def ran_as_often_as_programs_say(
    rank: Rank, programs: ProgramSet, ran: list[tuple[str, str]]
) -> None:
    group = programs.group_of(rank.rank)
    program, at = programs.programs[group], group.index(rank.rank)
    ends = [op for op in program.graph.ops if op.type in TRANSFER_TYPES]
    own = Counter(channels_of(op, group)[at].name for op in ends)
    received = {channels_of(op, group)[at].name for op in ends if op.type == "Recv"}
    if rank.transport.name == "horovod":  # whose ops run where no tracer sees them
        found = Counter(n.removesuffix("/blank") for n, _ in ran if n.endswith("/blank"))
        assert found == Counter(received), (found, received)
        return
    sent = Counter(n for n, kind in ran if kind.startswith("CollectiveBcast"))
    assert sent == own, (sent - own, own - sent)
    calls = Counter(op.attrs["body"] for op in program.graph.ops if op.type == TASK)
    written = Counter(op.name for op in program.graph.ops if op.type in COLLECTIVE_TYPES)
    for name, count in calls.items():
        for op in program.graph.functions[name].ops:
            written[op.name] += count * (op.type in COLLECTIVE_TYPES)
    reduced = Counter(n.partition("/tensorflow")[0] for n, kind in ran if kind in OTHER_COLLECTIVES)
    assert reduced == +written, (reduced, written)


OTHER_COLLECTIVES = ("CollectiveReduceV2", "CollectiveGatherV2", "CollectiveAllToAllV2")


def nodes_that_run(action: Callable[[], object]) -> list[tuple[str, str]]:
    """Name and op type of each node that runs meanwhile, as often as it does."""
    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder, options)
        action()
        time.sleep(0.1)  # the threads that ran the last of them note its end
        tf.profiler.experimental.stop()
        (file,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    names = [
        plane.event_metadata[event.metadata_id].name
        for plane in space.planes
        for line in plane.lines
        for event in line.events
    ]
    return [(name, kind) for name, _, kind in (n.partition(":") for n in names) if kind]


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
