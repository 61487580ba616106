"""Ways to run a step in which effects must keep their order."""

from __future__ import annotations

from typing import Any

import tfpar as tap

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
