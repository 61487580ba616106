"""What each rank of a job does: `python -m tests.tf.distributed.training FOLDER JOB`.

A case leaves `FOLDER/CASE.RANK.npz` with its results, or `FOLDER/CASE.RANK.txt` with its error.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import numpy as np

from tests.tf.distributed.training.place import Place, run
from tests.tf.distributed.training.sets import of_job
from tfpar.tf.distributed.world import this_world


def main(folder: str, job: str) -> None:
    world = this_world()
    assert world is not None, "start this with `tfpar run`"
    for case in of_job(job):
        report = f"{folder}/{case.__name__}.{world.rank}"
        place = Place(Path(folder) / case.__name__, world.size, world.rank)
        try:
            results = run(case, place)
        except Exception:  # noqa: BLE001 - what it is goes into the report
            Path(f"{report}.txt").write_text(traceback.format_exc())
        else:
            np.savez(f"{report}.npz", **results)
        with world.at(f"the end of {case.__name__}"):
            world.exchange.messages(case.__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
