"""Progress of a rank within a pipeline step, readable from another thread while the step runs.

Before each task the step assigns a number to a variable, once the task before it has ended, and
another once all is there that the task reads:

    call of 1F0  ->  progress = 3 (1F1 waits)  ->  progress = 4 (1F1 runs)  ->  call of 1F1
                     what 1F1 reads            ->

These are ops like others, of about a microsecond: the step never enters Python, and the thread that
looks needs nothing of it. So what a rank was at is known when it hangs or is killed, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfpar.compile.local.local_graph import TASK, LocalProgram
from tfpar.ir.graph import DType, Op
from tfpar.jobs.launch.beacon import TaskProgress
from tfpar.tf.runtime.function_def import FunctionWriter, const_attrs, serialize_attrs
from tfpar.tf.variables.handles import plain_variable


class Progress:
    """Progress of one rank in one program."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._variable = plain_variable(tf.constant(0, tf.int64))
        self._stands_for: list[TaskProgress | None] = [None]
        self._last: tuple[str, str] | None = None  # call, and its task

    @classmethod
    def of(cls, program: LocalProgram) -> Progress | None:
        """Return the progress of a program that calls the tasks of a pipeline; None for others."""
        return cls() if any(map(task_of, program.graph.ops)) else None

    @property
    def handle(self) -> tf.Tensor:
        """The variable's; what a function is given as its argument `progress`."""
        return self._variable.handle

    def reached(self) -> TaskProgress | None:
        """The task that the program is at; None before the first. Any thread may ask."""
        at = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=tf.int64)
        return self._stands_for[int(at)]

    def open(self, writer: FunctionWriter) -> None:
        """Add the argument to the function of the program, to which all else is added then."""
        self._writer = writer
        self._argument = writer.argument(_ARGUMENT, "resource", (), "int64")

    def before(self, call: str, task: str, edges: Sequence[str], control: Sequence[str]) -> str:
        """Announce a task; gives the node that its call has to wait for.

        Args:
            call: the node that will run it.
            edges: that it reads.
            control: nodes that it waits for.
        """
        before = [self._last[0]] if self._last else []  # in a new round it need not wait for that
        nodes = [*dict.fromkeys([*control, *before])]
        waits = self._assign(f"{call}/waits", TaskProgress(task, "waits"), nodes)
        made = dict.fromkeys(
            node for node, _, output in (e.partition(":") for e in edges) if output
        )
        self._last = call, task
        return self._assign(f"{call}/runs", TaskProgress(task, "runs"), [waits, *made])

    def end(self) -> None:
        """Announce that the last task has ended, once it has."""
        if self._last is not None:
            call, task = self._last
            node = self._assign(f"{call}/done", TaskProgress(task, "done"), [call])
            self._writer.effect(node)

    def _assign(self, name: str, reached: TaskProgress, control: Sequence[str]) -> str:
        device = self._variable.device
        value = const_attrs(np.int64(len(self._stands_for)), "int64")
        self._stands_for.append(reached)
        self._writer.node(f"{name}/number", "Const", (), value, device)
        attrs = serialize_attrs({"dtype": DType("int64")})
        inputs = [self._argument, f"{name}/number:output:0"]
        self._writer.node(name, "AssignVariableOp", inputs, attrs, device, control)
        return name


def task_of(op: Op) -> str | None:
    """The task of a pipeline that `op` calls, as schedules write it; None if it calls none."""
    return op.attrs.get("task") if op.type == TASK else None


_ARGUMENT = "progress"
