"""A rank of a job that goes on while strangers come:
`python -m tests.tf.distributed.besieged_ranks`.

It exchanges messages until FOLDER has a file `over`, then makes groups and sums in them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.tf.distributed.namespaces import own_machine


def main(folder: Path) -> None:
    own_machine()
    from tfpar.tf.distributed.world import this_world

    world = this_world()
    assert world is not None
    exchange = world.exchange
    exchange.messages("all are here")
    (folder / f"rank{world.rank}").touch()
    rounds = 0
    while not all(exchange.messages((folder / "over").exists())):
        rounds += 1
    world.transport.connect([(rank,) for rank in range(world.size)])  # they meet once more
    said = exchange.messages([world.rank] * 1000)
    right = said == [[rank] * 1000 for rank in range(world.size)]
    print(json.dumps({"rank": world.rank, "rounds": rounds, "right": right}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
