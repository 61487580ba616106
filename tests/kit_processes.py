"""The acceptance kit with one rank a process.

    PYTHONPATH=. python ../shared/acceptance/run.py --api tests.kit_processes --any-device ...

The kit trains each case in a worker that imports what `--api` names. Imported there, this module
starts the worker again as the ranks of a job, and ends with it; in a rank it is tfpar.
"""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
from typing import Any

from tests.time_limits import time_limit

TIMEOUT_S = round(time_limit(300))


def start_ranks() -> int:
    """Run this worker as a job of as many ranks as its mesh has; gives the exit code."""
    mesh = sys.argv[sys.argv.index("--mesh") + 1]
    ranks = math.prod(map(int, mesh.split(",")))
    command = [
        sys.executable,
        "-m",
        "tfpar",
        "run",
        "-np",
        str(ranks),
        "--timeout",
        str(TIMEOUT_S // 2),
        sys.executable,
        "-m",
        "tests.kit_processes",
        *sys.argv,
    ]
    return subprocess.run(command, timeout=TIMEOUT_S).returncode


def run_rank() -> None:
    """The worker again; only the first rank's result is the kit's."""
    sys.argv = sys.argv[1:]
    rank = int(os.environ["TFPAR_RANK"])
    if rank:
        sys.argv[sys.argv.index("--out") + 1] += f".rank{rank}"
    runpy.run_path(sys.argv[0], run_name="__main__")


def __getattr__(name: str) -> Any:
    import tfpar

    return getattr(tfpar, name)


if __name__ == "__main__":
    run_rank()
elif "--worker" in sys.argv and "TFPAR_RANK" not in os.environ:
    code = start_ranks()
    sys.stdout.flush()
    os._exit(code)
