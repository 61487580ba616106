"""What a rank does: `python -m tests.jobs.calibration.ranks FILE`."""

from __future__ import annotations

import sys

import tfpar as tap
from tfpar.cluster import describe
from tfpar.progress import LogDisplay
from tfpar.spec import TfparError
from tfpar.tf.distributed import this_world


def main(path: str) -> None:
    LogDisplay.quiet_s = LogDisplay.every_s = 0.0  # tell all, however quick it is
    cluster = tap.calibrate(path=path, budget_s=0.1)
    world = this_world()
    assert world is not None
    assert all(told == describe(cluster) for told in world.exchange.messages(describe(cluster)))
    try:
        tap.calibrate([3])
    except TfparError as error:
        assert "mesh has 3 ranks and the job 2" in str(error), error
    print("the same everywhere", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
