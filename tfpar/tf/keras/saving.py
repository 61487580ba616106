"""Checkpoints of a parallel model: written at once, or behind the steps that come next.

Where ranks are processes, all call the same functions in the same order, except for `leave`. Of
those written behind training there is at most one in a process: the next one waits for it, and so
does whoever reads checkpoints.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfpar.spec import Mesh, Spec, replicated_spec
from tfpar.tf.checkpoint import (
    BackgroundWriter,
    Box,
    Draft,
    TensorWrite,
    choose_writers,
    list_boxes,
    temporary_folder,
)
from tfpar.tf.distributed.world import World, on_each, on_first
from tfpar.tf.keras.checkpoint_match import ModelRecord
from tfpar.tf.keras.model import ParallelModel
from tfpar.tf.keras.replay import Position
from tfpar.tf.variables.parallel_variable import ParallelVariable


class _InFlight(NamedTuple):
    """A checkpoint that is being written behind training, and by whom."""

    behind: BackgroundWriter
    world: World | None


_in_flight: list[_InFlight] = []  # one or none


def save(state: ParallelModel, folder: str, position: Position, keep: int = 2) -> str:
    """Write a checkpoint of all variables.

    Returns its path. If a rank fails, nothing is left behind, and all ranks raise.

    Raises:
        TfparError: a file cannot be written, here or on another rank; of this checkpoint, or
            of the one before.
    """
    finish()
    return _completed(_draft(state, folder, position, keep), state.world)


def save_behind(state: ParallelModel, folder: str, position: Position, keep: int = 2) -> None:
    """Take a copy of all variables in host memory, and write it as a checkpoint from now on.

    Raises:
        TfparError: the one before cannot be written, here or on another rank.
    """
    finish()
    world, draft = state.world, _draft(state, folder, position, keep)
    _in_flight.append(_InFlight(BackgroundWriter(draft, world is None or world.rank == 0), world))
    _leave_at_exit()


def finish() -> str:
    """Wait until what is written behind training is a checkpoint; returns its path, if any.

    Raises:
        TfparError: a file cannot be written, here or on another rank, or not in time. Nothing is
            left behind.
    """
    return _completed(*_in_flight.pop()) if _in_flight else ""


def leave() -> None:
    """Let this process write to the end what it writes, where training has come to another end.

    The other ranks may do something else, or may have ended.
    """
    for behind, _ in _in_flight:
        behind.leave()


@functools.cache
def _leave_at_exit() -> None:
    """Register `leave`, once the job is joined, so that it runs before the others are left.

    What is registered last runs first.
    """
    atexit.register(leave)


def _completed(writing: Draft | BackgroundWriter, world: World | None) -> str:
    """The path of the checkpoint, once all ranks have written their parts of it."""
    try:
        on_each(world, "writing a checkpoint", writing.write)
        return on_first(world, "committing a checkpoint", writing.commit)
    except BaseException:
        if world is None or world.rank == 0:  # by then no other rank writes any more
            writing.discard()
        raise


def _draft(state: ParallelModel, folder: str, position: Position, keep: int) -> Draft:
    """List what this process writes of a checkpoint; values are read when they are written."""
    world, everyone = state.world, state.session.mesh
    token = on_first(world, "starting a checkpoint", lambda: secrets.token_hex(4))
    variables = state.named_variables()
    laid = {name: _Laid.of(v, everyone) for name, v in variables.items()}
    chosen = _writers(variables, laid)
    ranks = range(everyone.size) if world is None else [world.rank]
    parts = {
        rank: [
            TensorWrite(
                name,
                tuple(v.shape),
                v.dtype,
                laid[name].boxes(v.shape, rank) if rank in chosen[name] else [],
                functools.partial(_shard_of, v, laid[name].place(rank)),
            )
            for name, v in variables.items()
        ]
        for rank in ranks
    }
    temporary = temporary_folder(folder, position.step, token)
    info = {**dataclasses.asdict(position), **ModelRecord.of(state, variables).to_info()}
    return Draft(temporary, parts, everyone.size, info, keep)


class _Laid(NamedTuple):
    """Layout of a variable on all or some ranks of the job: `members` are the ranks of `mesh`."""

    mesh: Mesh
    spec: Spec
    members: tuple[int, ...]

    @classmethod
    def of(cls, variable: tf.Variable, everyone: Mesh) -> _Laid:
        """Return the layout of a variable; one that has none counts as replicated."""
        if isinstance(variable, ParallelVariable) and variable.layout and variable.ranks:
            return cls(*variable.layout, variable.ranks.members)
        return cls(everyone, replicated_spec(everyone.num_axes), tuple(range(everyone.size)))

    def place(self, rank: int) -> int:
        """The rank of the mesh that `rank` of the job is; -1 for none."""
        return self.members.index(rank) if rank in self.members else -1

    def boxes(self, shape: Sequence[int], rank: int) -> list[Box]:
        """Return the boxes that `rank` of the job stores."""
        return list_boxes(tuple(shape), self.spec, self.mesh, self.place(rank))


def _writers(
    variables: Mapping[str, tf.Variable], laid: Mapping[str, _Laid]
) -> dict[str, frozenset[int]]:
    """The ranks of the job that write their shard of each variable."""
    together: dict[tuple[Mesh, tuple[int, ...]], list[str]] = {}
    for name, (mesh, _, members) in laid.items():
        together.setdefault((mesh, members), []).append(name)
    chosen: dict[str, frozenset[int]] = {}
    for (mesh, members), names in together.items():
        sizes = [variables[n].dtype.size * variables[n].shape.num_elements() for n in names]
        found = choose_writers(sizes, [laid[n].spec for n in names], mesh)
        for name, writing in zip(names, found, strict=True):
            chosen[name] = frozenset(members[rank] for rank in writing)
    return chosen


def _shard_of(variable: tf.Variable, rank: int) -> tf.Tensor:
    """Read the shard of `rank` of the mesh; the whole value of a variable that is not sharded."""
    if isinstance(variable, ParallelVariable) and variable.is_sharded:
        return variable.shards[rank].read_value()
    return variable.read_value()
