"""Ranks of a mesh and their processes: all in this one, or one in each process of a job.

The mesh is that of all ranks, or of a part of them: of the ranks that run a stage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfpar.spec import TfparError
from tfpar.tf.runtime.devices import host_of, is_cpu, memory_of, rank_devices

if TYPE_CHECKING:
    from tfpar.tf.distributed.world import World


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of a mesh.

    Attributes:
        devices: of each rank, as this process names it; those of other processes differ in
            their job.
        world: the processes; None if all ranks are in this one.
        members: the rank in the job of each; by default these are all of them.
    """

    devices: Sequence[str]
    world: World | None = None
    members: tuple[int, ...] = ()
    _parts: dict[tuple[int, ...], Ranks] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", self.members or tuple(range(len(self.devices))))

    @classmethod
    def of(cls, size: int, world: World | None) -> Ranks:
        """`size` ranks; starts TensorFlow's runtime.

        Raises:
            TfparError: the job has another number of processes.
        """
        if world is None:
            return cls(rank_devices(size))
        if world.size != size:
            raise TfparError(
                f"The mesh has {size} ranks and the job {world.size} processes (started by "
                f"{world.job.launcher}). Start as many, or use tap.auto_parallel() without a "
                f"mesh, which takes all there are."
            )
        kind = world.device.rpartition("/")[2]
        devices = [f"/job:rank{r}/replica:0/task:0/{kind}" for r in range(size)]
        devices[world.rank] = world.device
        return cls(devices, world)

    def part(self, group: tuple[int, ...]) -> Ranks:
        """Return some of the ranks: the i-th is `group[i]`. Equal groups give the same object."""
        if group == self.members:
            return self
        if group not in self._parts:
            devices = [self.devices[rank] for rank in group]
            self._parts[group] = Ranks(devices, self.world, group)
        return self._parts[group]

    @functools.cached_property
    def by_memory(self) -> Ranks:
        """The same ranks; those in one memory compute on its first device.

        XLA compiles anew for each device, and once for ranks that share one.
        """
        first: dict[str, str] = {}
        devices = [first.setdefault(memory_of(device), device) for device in self.devices]
        return self if devices == [*self.devices] else Ranks(devices, self.world, self.members)

    @functools.cached_property
    def on_hosts(self) -> Ranks:
        """The same ranks, each on its host: where lies what is offloaded."""
        return Ranks([*map(host_of, self.devices)], self.world, self.members)

    @property
    def local(self) -> Sequence[int]:
        """The ranks that live in this process, none or one of several processes."""
        if self.world is None:
            return range(len(self.devices))
        return [i for i, member in enumerate(self.members) if member == self.world.rank]

    @property
    def one_memory(self) -> bool:
        """Whether all compute in one memory."""
        return self.world is None and len({*map(memory_of, self.devices)}) == 1

    @property
    def share_cores(self) -> bool:
        """Whether they are processes on the cores of one machine: a core that is at a collective
        computes nothing else."""
        job = None if self.world is None else self.world.job
        return job is not None and job.local_size == job.size and is_cpu(self.devices[0])

    @property
    def is_everyone(self) -> bool:
        """Whether these are all the ranks of the job."""
        return self.world is None or len(self.members) == self.world.size
