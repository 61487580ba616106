"""How far a step has got is seen from another thread, while it runs."""

from __future__ import annotations

import threading

import tensorflow as tf

from tests.time_limits import wait_until
from tfpar.ir import DType
from tfpar.jobs.launch import TaskProgress
from tfpar.tf.runtime.backends.process import Progress
from tfpar.tf.runtime.function_def import FunctionWriter, serialize_attrs


def test_each_task_is_announced_when_its_turn_comes_and_when_it_has_what_it_reads():
    progress, writer = Progress(), FunctionWriter("step")
    progress.open(writer)
    queues = {}

    def blocks(name: str, control: list[str]) -> str:
        """A node that goes on once something is put into its queue."""
        queues[name] = tf.raw_ops.FIFOQueueV2(component_types=[tf.int32], shared_name=name)
        attrs = serialize_attrs({"component_types": [DType("int32")]})
        argument = writer.argument(f"queue{len(queues)}", "resource")
        writer.node(name, "QueueDequeueV2", [argument], attrs, "", control)
        return f"{name}:components:0"

    for task in ("1F0", "1B0"):
        edges = [blocks(f"recv/{task}", [])]
        result = blocks(task, [progress.before(task, task, edges, [])])
    progress.end()
    writer.output(result, "int32")
    step = writer.register()

    assert progress.reached() is None
    running = threading.Thread(target=step, args=([progress.handle, *queues.values()],))
    running.start()
    for task in ("1F0", "1B0"):
        assert wait_until(lambda task=task: progress.reached() == TaskProgress(task, "waits"), 10)
        tf.raw_ops.QueueEnqueueV2(handle=queues[f"recv/{task}"], components=[1])
        assert wait_until(lambda task=task: progress.reached() == TaskProgress(task, "runs"), 10)
        tf.raw_ops.QueueEnqueueV2(handle=queues[task], components=[1])
    running.join(10)
    assert progress.reached() == TaskProgress("1B0", "done")
