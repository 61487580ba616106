"""A rank that waits for another, which has sent once and is killed, or sends no more.

`python -m tests.tf.distributed.lost_ranks FOLDER killed|silent`, started on two ranks. The one that
waits writes into FOLDER what it learned and after how many seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import tensorflow as tf

from tfpar.compile.local import Channel
from tfpar.tf.distributed.world import this_world
from tfpar.tf.runtime.backends.wire import Wire, WireOperand
from tfpar.tf.runtime.function_def import FunctionWriter

FOREVER_S = 1000.0


def main(folder: str, fault: str) -> None:
    world = this_world()
    assert world is not None, "start this with `tfpar run`"
    channel = Channel(1, 0, "activation")
    world.transport.connect([], [channel])
    writer = FunctionWriter("transfer")
    wire = Wire(writer, world.transport)
    if world.rank == 1:
        writer.effect(
            wire.send(WireOperand(writer.argument("x", "float32"), (3,)), "float32", channel)
        )
        writer.register()([tf.zeros([3])])
        time.sleep(1.0)  # until the other waits
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(FOREVER_S)
    writer.output(wire.recv((3,), "float32", channel), "float32")
    receive = writer.register()
    receive([])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which the launcher ends who is left
    started, error = time.monotonic(), None
    try:
        with world.at("the second step"):
            receive([])
    except Exception as raised:  # noqa: BLE001 - what it is goes into the report
        error = raised
    told = [type(error).__name__, str(error), time.monotonic() - started]
    (Path(folder) / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
