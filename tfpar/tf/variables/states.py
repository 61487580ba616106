"""States of a variable, by where its value is: three classes, each with all that it needs.

    Pending   nowhere yet: what makes it
    Whole     behind the variable's own handle, as that of an ordinary one
    Sharded   with the ranks: the shards that this process stores, with mesh and spec

A state never changes; a variable changes from one to another (`tf.variables.parallel_variable`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfpar.spec import Mesh, Shard, Spec
from tfpar.tf.variables.values import cut_shard, join_shards

if TYPE_CHECKING:
    from tfpar.tf.distributed.world import World
    from tfpar.tf.runtime.ranks import Ranks


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """A shape and an initializer, no memory.

    Attributes:
        initial: makes the value: a callable without arguments, or a `ShardSource` in a
            file.
    """

    initial: Callable[[], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Whole:
    """An ordinary variable on one device."""


@dataclasses.dataclass(frozen=True, eq=False)
class Sharded:
    """Shards with the ranks, the whole value nowhere.

    Attributes:
        mesh, spec: its layout.
        stored: the shards in the memory of this process, by the rank that stores them.
        holders: for each rank, the rank whose memory holds its shard.
        ranks: where the ranks live.
    """

    mesh: Mesh
    spec: Spec
    stored: Mapping[int, tf.Variable]
    holders: tuple[int, ...]
    ranks: Ranks

    @property
    def shards(self) -> dict[int, tf.Variable]:
        """The variable that each rank of this process uses."""
        return {rank: self.stored[self.holders[rank]] for rank in self.ranks.local}

    @property
    def needs_others(self) -> bool:
        """Whether the whole value takes shards of other processes, for any of them."""
        split = any(isinstance(p, Shard) for p in self.spec)
        return self.ranks.world is not None and (split or not self.ranks.is_everyone)

    def assign(self, value: tf.Tensor) -> None:
        """Store of the whole `value` what each rank of this process has."""
        for rank, shard in self.stored.items():
            shard.assign(cut_shard(value, self.spec, self.mesh, rank))

    def assemble(self, name: str, shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
        """The whole value; where it needs others, all processes call this together.

        Args:
            name: of the variable, for messages.
            shape, dtype: of the whole value.
        """
        mesh, world = self.mesh, self.ranks.world
        own = {rank: shard.read_value() for rank, shard in self.shards.items()}
        if world is None:
            return join_shards([own[r] for r in range(mesh.size)], shape.as_list(), self.spec, mesh)
        axes = tuple(a for a, placement in enumerate(self.spec) if isinstance(placement, Shard))
        if not self.needs_others:
            (value,) = own.values()
            return value
        hint = (
            f"All ranks have to read {name} together, as its value lies with several or with "
            f"others: read it outside of what one rank alone runs, such as `if rank == 0`."
        )
        with world.at(f"gathering {name}", hint=hint):
            members = self.ranks.members
            groups = [tuple(members[r] for r in group) for group in mesh.groups(axes)]
            world.transport.connect([group for group in groups if len(group) > 1])
            whole = tf.zeros(shape, dtype)
            for rank, value in own.items():  # one, or none
                whole = self._joined(world, rank, value, shape) if axes else value
            if not self.ranks.is_everyone:
                whole = world.exchange.broadcast(whole, members[0])
            return whole

    def _joined(self, world: World, rank: int, own: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
        """The whole value, of the shards of the ranks that have some; `own` is that of `rank`."""
        mesh, spec, members = self.mesh, self.spec, self.ranks.members
        axes = tuple(a for a, placement in enumerate(spec) if isinstance(placement, Shard))
        group = next(g for g in mesh.groups(axes) if rank in g)
        gathered = world.exchange.all_gather(own, tuple(members[r] for r in group))
        # Ranks of other groups hold what their counterparts of this one do.
        at = {
            tuple(mesh.coordinates(r)[a] for a in axes): v
            for r, v in zip(group, gathered, strict=True)
        }
        pieces = [at[tuple(mesh.coordinates(r)[a] for a in axes)] for r in range(mesh.size)]
        return join_shards(pieces, shape.as_list(), spec, mesh)


State = Pending | Whole | Sharded
