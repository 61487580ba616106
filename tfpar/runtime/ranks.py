"""Where the ranks of a mesh live: all in this process, or one in each process of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfpar.runtime.devices import rank_devices
from tfpar.spec import TfparError

if TYPE_CHECKING:
    from tfpar.distributed.world import World


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of a mesh.

    Attributes:
        devices: of each rank, as this process names it; those of other processes differ in
            their job.
        world: the processes; None if all ranks are in this one.
    """

    devices: Sequence[str]
    world: World | None = None

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

    @property
    def local(self) -> Sequence[int]:
        """The ranks that live in this process."""
        return range(len(self.devices)) if self.world is None else (self.world.rank,)
