"""`python -m tfpar.jobs.doctor.ranks`, started on each rank: every collective, then a tiny
training."""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf

from tfpar.jobs.doctor.training import check_training
from tfpar.spec.errors import TfparError
from tfpar.tf.distributed.world import World, this_world
from tfpar.tf.runtime.backends.wire import Wire
from tfpar.tf.runtime.detect import every_rank
from tfpar.tf.runtime.function_def import FunctionWriter, RegisteredFunction

_MEBI = 1 << 20
_LARGE = 16 * _MEBI // 4  # float32s
_ROUNDS = 3


def main() -> None:
    """Check collectives and a training on this rank; raises whatever goes wrong.

    The first rank prints what was done.
    """
    world = this_world()
    if world is None:
        raise TfparError("This is for ranks: tfpar run -np 2 python -m tfpar.jobs.doctor.ranks")
    world.transport.connect([tuple(range(world.size))])
    check_collectives(world)
    seconds = _all_reduce_seconds(world)
    check_training(every_rank())
    if world.rank == 0:
        print(
            f"{world.size} ranks exchange and train as one device does; 16 MiB all-reduced in "
            f"{1e3 * seconds:.0f} ms"
        )


def check_collectives(world: World) -> None:
    """Run each of them once, on small whole numbers, and compare.

    Raises:
        TfparError: a result is wrong; the message names the collective.
    """
    size, rank = world.size, world.rank
    parts = [np.arange(2 * size, dtype=np.float32) + 100 * r for r in range(size)]
    total, blocks = sum(parts), [np.split(part, size)[rank] for part in parts]
    expected = {
        "all-reduce": total,
        "all-gather": np.concatenate(parts),
        "reduce-scatter": np.split(total, size)[rank],
        "all-to-all": np.concatenate(blocks),
        "broadcast": parts[0],
    }
    results = _five_collectives(world)([tf.constant(parts[rank])])
    for (name, wanted), got in zip(expected.items(), results, strict=True):
        if not np.array_equal(got.numpy(), wanted):
            raise TfparError(f"Rank {rank}: {name} gives {got.numpy()} instead of {wanted}.")


def _five_collectives(world: World) -> RegisteredFunction:
    everyone, dtype = tuple(range(world.size)), "float32"
    writer = FunctionWriter("tfpar_doctor")
    wire = Wire(writer, world.transport)
    edge = writer.argument("own", dtype)
    for result in (
        *wire.all_reduce("doctor/all_reduce", [edge], dtype, "sum", everyone),
        wire.all_gather("doctor/all_gather", edge, dtype, 0, everyone),
        wire.reduce_scatter("doctor/reduce_scatter", edge, dtype, "sum", 0, everyone),
        wire.all_to_all("doctor/all_to_all", edge, dtype, 0, 0, everyone),
        wire.broadcast("doctor/broadcast", edge, dtype, everyone),
    ):
        writer.output(result, dtype)
    return writer.register()


def _all_reduce_seconds(world: World) -> float:
    """The best of a few all-reduces of 16 MiB."""
    everyone = tuple(range(world.size))
    writer = FunctionWriter("tfpar_doctor")
    edge = writer.argument("large", "float32")
    (result,) = Wire(writer, world.transport).all_reduce(
        "doctor/large", [edge], "float32", "sum", everyone
    )
    writer.output(result, "float32")
    function, large = writer.register(), tf.ones([_LARGE])
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        function([large])[0].numpy()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
