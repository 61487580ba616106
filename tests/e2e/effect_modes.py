"""Ways to run a step in which effects must keep their order."""

from __future__ import annotations

from typing import Any

import tfpar as tap
from tfpar.compile.local import MUST_COMPILE, TASK
from tfpar.ir import is_recomputed, traits
from tfpar.tf.runtime import Executable

STEPS = 20
"""Steps of each program: a race does not show in each of them."""

TWO_STAGES = tap.Pipeline(stages=2, microbatches=2)
MODES: dict[str, dict[str, Any]] = {
    "plain": {"mesh": 1},
    "ranks": {"mesh": [2]},
    "microbatches": {"mesh": 1, "pipeline": tap.Pipeline(microbatches=2)},
    "chunks": {"mesh": [2], "chunks": 2},
    "stages": {"mesh": [2], "pipeline": TWO_STAGES},
    "stages recompute": {
        "mesh": [2],
        "pipeline": tap.Pipeline(stages=2, microbatches=2, recompute=True),
    },
    "recompute": {"mesh": 1, "recompute": True},
    "offload": {"mesh": 1, "offload": True},
    "xla": {"mesh": [2], "xla": True},
    "xla stages": {"mesh": [2], "pipeline": TWO_STAGES, "xla": True},
}
"""Options of a block or a program; `xla` is the step's own."""

SHOWN = {
    "microbatches": lambda op: op.type == TASK,
    "chunks": lambda op: op.name.endswith("/chunk1"),
    "stages": lambda op: "task" in op.attrs,
    "stages recompute": lambda op: "task" in op.attrs,
    "recompute": is_recomputed,
    "offload": lambda op: traits.ON_HOST in op.attrs,
    "xla": lambda op: MUST_COMPILE in op.attrs,
    "xla stages": lambda op: MUST_COMPILE in op.attrs,
}
"""By mode, what shows that a step runs so."""


def assert_runs_so(executable: Executable, mode: str) -> None:
    """Fail where the program of a step does not show its mode."""
    ops = [op for graph in executable.local.graphs() for op in graph.ops]
    assert mode not in SHOWN or any(map(SHOWN[mode], ops)), f"{mode} changes nothing"
