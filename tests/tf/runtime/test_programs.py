"""Several programs in one process: each on ranks of its own, transfers between them."""

import numpy as np
import pytest
import tensorflow as tf

from tests.staged import Stage, Stored, batch, groups, initial, plainly, two_stages
from tfpar.compile.local import LocalProgram, ProgramSet, recv, send
from tfpar.ir import GraphBuilder
from tfpar.spec import Mesh, RuntimeMismatchError, TfparError
from tfpar.tf.runtime.backends.in_process import InProcessProgram

CPUS = ["/job:localhost/replica:0/task:0/device:CPU:0"] * 6


@pytest.mark.parametrize("size", [2, 4, 6])
def test_two_stages_are_the_step_that_they_make_up(size):
    run = InProcessProgram(two_stages(size), CPUS)
    weights = initial()
    stored = [Stored(w, CPUS, run.holders[i]) for i, w in enumerate(weights)]
    for step in range(3):
        weights, expected = plainly(weights, step)
        results = run([tf.constant(fed) for fed in batch(step)], [s.handles for s in stored])
        for got, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(got.numpy(), wanted)
        for variable, wanted in zip(stored, weights, strict=True):
            variable.check(wanted)


def test_transfers_are_edges():
    run = InProcessProgram(two_stages(4), CPUS)
    types = {node.op for node in run.function.definition.node_def}
    assert not types & {"Send", "Recv"}
    assert not any("transfer" in node.name for node in run.function.definition.node_def)


def test_programs_may_wait_for_each_other_back_and_forth_but_not_in_a_circle():
    """Written in an order in which neither could be linked before the other."""

    def passing(own: int, other: int, circle: bool) -> LocalProgram:
        stage = Stage(f"stage{own}", 1, 2, (2, 2))
        build = stage.build
        received = recv(build, stage.fed.shape, "float32", f"from{other}", [other])
        send(build, received if circle else stage.fed, f"from{own}", [other])
        build.graph.outputs.append(received)
        return stage.program()

    def programs(circle: bool) -> ProgramSet:
        return ProgramSet({(r,): passing(r, 1 - r, circle) for r in range(2)})

    run = InProcessProgram(programs(circle=False), CPUS)
    fed = [np.full((12, 2), r, "float32") for r in range(2)]
    stored = [Stored(np.zeros((2, 2), "float32"), CPUS, [0]) for _ in fed]
    results = run([tf.constant(f) for f in fed], [s.handles for s in stored])
    for got, wanted in zip(results, fed[::-1], strict=True):
        np.testing.assert_array_equal(got.numpy(), wanted)
    with pytest.raises(TfparError, match="wait for each other: 'stage0/Recv' for 'stage1/Send' fo"):
        InProcessProgram(programs(circle=True), CPUS)


def test_a_transfer_with_one_end_is_refused():
    first, second = groups(2)
    build = GraphBuilder(name="last")
    build.graph.outputs.append(recv(build, (3,), "float32", "nothing", first))
    program = LocalProgram(build.graph, Mesh.of([1]), [], [], [()], {})
    alone = GraphBuilder(name="first")
    programs = {first: LocalProgram(alone.graph, Mesh.of([1]), [], [], [], {}), second: program}
    with pytest.raises(
        RuntimeMismatchError, match="Rank 1 receives 'nothing'.* from rank 0, which"
    ):
        InProcessProgram(ProgramSet(programs), CPUS)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([(0, 1), (2,)], r"\[2\] run a program for 2 ranks \(data=2\)"),
        ([(0, 1), (1, 2)], r"Rank 1 runs two programs, one with the ranks \[0, 1\] and one"),
        ([(1, 0), (2, 3)], r"ascend from 0 or more, not \[1, 0\]"),
        ([(0, 0), (2, 3)], r"ascend from 0 or more, not \[0, 0\]"),
    ],
)
def test_groups_that_make_no_sense_are_refused(ranks, message):
    program = two_stages(4).programs[0, 1]
    with pytest.raises(TfparError, match=message):
        ProgramSet(dict.fromkeys(ranks, program))


def test_a_rank_without_a_program_is_named():
    with pytest.raises(TfparError, match=r"Rank 4 runs no program; .* ranks \[0, 1\], \[2, 3\]"):
        two_stages(4).group_of(4)
