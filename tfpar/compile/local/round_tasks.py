"""Assignment of the ops of a round to tasks, and the order of their calls.

The ops that run for each microbatch on the way up through a stage are its F, those on the way down
its B (`compile.local.microbatch_rounds`). Where the schedule has the halves of B: what only sums
are made of, as the gradients of weights are, is W; the rest is I. Other stages wait for that alone.

A schedule orders the tasks of one round that has them all. Where microbatches join there are more
rounds: each runs those of its tasks that have something to do, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfpar.compile.local.local_graph import NOWHERE, LocalProgram
from tfpar.compile.local.microbatch_rounds import MicrobatchRounds, goes_down
from tfpar.ir.graph import Op, Tensor
from tfpar.pipeline import Schedule
from tfpar.pipeline.tasks import Kind, Task
from tfpar.spec import ScheduleError


class TaskKey(NamedTuple):
    """A task, of any microbatch."""

    kind: Kind
    stage: int


class RoundTasks:
    """The tasks of a round.

    Args:
        is_summed: whether an op takes of a tensor only what all microbatches come to.

    Attributes:
        members: the ops of each task that has any, in their order.
        key_of: the task of each op.
    """

    def __init__(
        self,
        rounds: MicrobatchRounds,
        number: int,
        program: LocalProgram,
        schedule: Schedule,
        is_summed: Callable[[Op, Tensor], bool],
    ) -> None:
        self._schedule = schedule
        self._readers = program.graph.consumers()
        self._kept = {*program.graph.outputs}
        self._effects = {*program.graph.effects}
        self._is_summed = is_summed
        self.key_of: dict[Op, TaskKey] = {}
        for op in rounds.of(number):
            kind: Kind = "B" if goes_down(rounds.sweep_of[op]) else "F"
            self.key_of[op] = TaskKey(kind, program.places.get(op, NOWHERE).stage)
        self.members = self._members()
        for key, ops in self.members.items():
            if key.kind == "B" and Task("I", key.stage, 0) in schedule.orders[self._actor(key)]:
                self._halve(key.stage, ops)
        self.members = self._members()

    def _members(self) -> dict[TaskKey, list[Op]]:
        members: dict[TaskKey, list[Op]] = {}
        for op, key in self.key_of.items():
            members.setdefault(key, []).append(op)
        return members

    def _actor(self, key: TaskKey) -> int:
        return self._schedule.actors[key.stage]

    def _halve(self, stage: int, ops: Sequence[Op]) -> None:
        """Share out the backward pass of a stage among I and W."""
        waited: set[Op] = set()
        for op in reversed(ops):
            if op in self._effects or any(self._is_waited(t, ops, waited) for t in op.outputs):
                waited.add(op)
        for op in ops:
            self.key_of[op] = TaskKey("I" if op in waited else "W", stage)

    def _is_waited(self, tensor: Tensor, ops: Sequence[Op], waited: set[Op]) -> bool:
        """Whether more than sums is made of a tensor of `ops`."""
        if tensor in self._kept:
            return True
        key = self.key_of[tensor.op]
        return any(
            reader in waited
            if self.key_of.get(reader) == key
            else not self._is_summed(reader, tensor)
            for reader in self._readers.get(tensor, ())
        )

    def in_order(self, reads: Mapping[TaskKey, Sequence[Tensor]]) -> Iterator[Task]:
        """Yield the tasks of all microbatches, each behind those whose tensors it reads.

        Args:
            reads: the tensors that each task is given.

        Raises:
            ScheduleError: tasks wait for each other.
        """
        orders = [
            [task for task in order if TaskKey(task.kind, task.stage) in self.members]
            for order in self._schedule.orders
        ]
        needs = {
            key: {self.key_of[t.op] for t in tensors if t.op in self.key_of} - {key}
            for key, tensors in reads.items()
        }
        done: set[Task] = set()
        at = [0] * len(orders)
        while any(i < len(order) for i, order in zip(at, orders, strict=True)):
            before = len(done)
            for actor, order in enumerate(orders):
                while at[actor] < len(order) and all(
                    Task(kind, stage, order[at[actor]].micro) in done
                    for kind, stage in needs[_key(order[at[actor]])]
                ):
                    done.add(order[at[actor]])
                    yield order[at[actor]]
                    at[actor] += 1
            if len(done) == before:
                waiting = [order[i] for i, order in zip(at, orders, strict=True) if i < len(order)]
                raise ScheduleError(
                    f"The schedule can never end: {', '.join(map(str, waiting))} wait for each "
                    f"other. Move one of them."
                )


def _key(task: Task) -> TaskKey:
    return TaskKey(task.kind, task.stage)
