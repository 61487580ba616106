"""What ranks agree on before they link; here they are threads that exchange messages."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.staged import Stage, first_stage, second_stage, two_stages
from tests.time_limits import time_limit
from tfpar.compile.local import Channel, ProgramSet, recv, send
from tfpar.ir import FunctionRef, GraphBuilder
from tfpar.spec import Mesh, RuntimeMismatchError, TfparError
from tfpar.tf.runtime.agreement import agree_on_programs


class Talk:
    """Messages among `size` threads, as JSON carries them."""

    def __init__(self, size: int) -> None:
        self.said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=time_limit(20))

    def messages(self, rank: int, message: Any) -> list[Any]:
        self.said[rank] = message
        self._barrier.wait()
        told = json.loads(json.dumps(self.said))
        self._barrier.wait()
        return told


class World:
    """What agreement needs of `distributed.world.World`."""

    def __init__(self, rank: int, talk: Talk) -> None:
        self.rank, self.exchange, self._talk = rank, self, talk

    def messages(self, message: Any) -> list[Any]:
        return self._talk.messages(self.rank, message)

    def at(self, activity: str) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


def agree(programs: Sequence[ProgramSet]) -> list[Any]:
    """What comes of it on each rank: connections, or an error."""
    talk, found = Talk(len(programs)), [None] * len(programs)

    def run(rank: int) -> None:
        try:
            found[rank] = agree_on_programs(World(rank, talk), programs[rank])  # type: ignore
        except TfparError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def refused(programs: Sequence[ProgramSet], message: str) -> None:
    """All ranks raise the same."""
    for error in agree(programs):
        with pytest.raises(RuntimeMismatchError, match=message):
            raise error


def own_only(size: int = 4) -> list[ProgramSet]:
    """Each rank knows the program of its own group alone."""
    whole = two_stages(size)
    return [ProgramSet({g: whole.programs[g]}) for g in whole.programs for _ in g]


def data_parallel(size: int, extra: bool = False, width: int = 2) -> ProgramSet:
    """All ranks alike; perhaps with one more op, or a weight of another width."""
    stage = Stage("alike", size, 4, (4, width))
    gradient = stage.product(stage.fed, stage.product(stage.fed, stage.kernel), "a")
    stage.update(stage.both("Mul", gradient, gradient) if extra else gradient)
    return ProgramSet.of(stage.program())


def looping(traced: int, op_type: str = "Neg") -> ProgramSet:
    """A step with a loop, in a process that has traced so many functions before."""
    stage = Stage("alike", 2, 4, (4, 2))
    body, x = f"while_body_{traced}", stage.product(stage.fed, stage.kernel)
    inside = GraphBuilder(name="while")
    value = inside.placeholder(x, f"while/{body}_placeholder")
    inside.graph.inputs.append(value)
    inside.graph.outputs.append(inside.unary(op_type, value))
    stage.build.graph.functions[body] = inside.graph
    attrs = {"body": FunctionRef(body), "_gradient_op_type": f"While-{traced}"}
    stage.build.emit("While", (x,), [(x.shape, x.dtype)], attrs, name="while")
    return ProgramSet.of(stage.program())


def test_loops_that_ranks_have_named_in_two_ways():
    """As a rank does that has saved a model for all, and traced more than the others."""
    assert not any(isinstance(c, TfparError) for c in agree([looping(71), looping(35)]))


def test_loops_that_differ_inside():
    refused([looping(71), looping(71, "Exp")], r"rank 0 has 'Neg' \(Neg\), rank 1 'Exp' \(Exp\)")


def test_one_program_on_all_ranks():
    for connections in agree([data_parallel(4) for _ in range(4)]):
        assert connections.groups == [(0, 1, 2, 3)] and connections.channels == []


def test_programs_by_group_and_what_they_send():
    first, *others = agree(own_only())
    assert others == [first] * 3
    assert first.groups == [(0, 1), (2, 3)]
    keys = ("first/h", "first/positive", "first/whole")
    forward = [Channel(s, t, key) for key in keys for s, t in ((0, 2), (1, 3))]
    assert first.channels[: len(forward)] == forward
    assert {c[:2] for c in first.channels[len(forward) :]} == {(2, 0), (3, 1)}


def test_ranks_of_one_group_differ():
    alike = [data_parallel(2), data_parallel(2, extra=True)]
    refused(alike, "Ranks 0 and 1 .* different programs: at op 6, in 'alike', .*'alike/Mul'")


def test_ranks_whose_weights_are_of_two_shapes():
    refused(
        [data_parallel(2), data_parallel(2, width=3)],
        r"in 'alike', rank 0 has 'alike/handle' \(Placeholder; outputs resource\[4, 2\]\), rank 1 "
        r"'alike/handle' \(Placeholder; outputs resource\[4, 3\]\)\. Every rank has to",
    )


def test_ranks_whose_ops_have_two_attributes():
    other = data_parallel(2)
    next(op for op in other.programs[0, 1].graph.ops if op.type == "AllReduce").attrs["op"] = "max"
    refused(
        [data_parallel(2), other], r"rank 0 has '.*' \(AllReduce; op=nothing\), rank 1 .*='max'"
    )


def test_ranks_whose_meshes_are_of_two_forms():
    other = data_parallel(4)
    other.programs[0, 1, 2, 3].mesh = Mesh.of([2, 2])
    refused([*[data_parallel(4)] * 3, other], "rank 0 has the mesh .*4.*, rank 3 .*2")


def test_ranks_of_the_second_group_differ():
    programs = own_only()
    programs[3] = ProgramSet({(2, 3): second_stage((2, 3), (1, 0))})
    refused(programs, "Ranks 2 and 3 .* different programs: at op .*'second/Recv'")


def test_transfers_that_do_not_match():
    programs = own_only(2)
    graph = programs[0].programs[0,].graph
    next(op for op in graph.ops if op.type == "Send").attrs["key"] = "first/other"
    refused(
        programs, r"Rank 0 sends 'first/other', bfloat16\[12, 6\] \(op 'first/Send'\), to rank 1"
    )


def test_ranks_that_are_grouped_in_two_ways():
    programs = own_only()
    programs[1] = ProgramSet({(1,): first_stage((1,), (3,))})
    refused(programs, r"Rank 0 runs its program with the ranks \[0, 1\], and rank 1 says \[1\]")


def test_a_group_with_ranks_that_the_job_has_not():
    programs = [data_parallel(3), data_parallel(3, extra=True)]
    refused(programs, r"Rank 0 .* the ranks \[0, 1, 2\], and rank 2 is not in the job")


def test_a_stage_that_no_rank_holds():
    """Of two stages of three ranks each, a job has the ranks of the first."""
    refused(own_only(6)[:3], "'first/h' goes from rank 0 to rank 3, but the job has 3 ranks: the s")


def test_some_ranks_of_a_stage_are_missing():
    refused(own_only(6)[:4], r"Rank 3 .* the ranks \[3, 4, 5\], and rank 4 is not in the job")


def test_transfers_within_one_program_are_compared_too():
    stage = Stage("ring", 2, 4, (4, 2))
    send(stage.build, stage.fed, "x", [1, 0])
    recv(stage.build, stage.fed.shape, "float32", "y", [1, 0])
    refused([ProgramSet.of(stage.program())] * 2, "Rank 0 sends 'x'.* to rank 1, which does not")
