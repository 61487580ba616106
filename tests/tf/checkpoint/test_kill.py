"""Whenever a run is killed, the last checkpoint that it committed is there and whole."""

import os
import queue
import random
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from tests import preloaded
from tests.jobs.launch.programs import ROOT, variables
from tests.tf.checkpoint.killed_writer import SHAPE, SPECS
from tests.tf.checkpoint.ranks import save
from tests.time_limits import time_limit
from tfpar.spec import Mesh, parse_spec
from tfpar.tf.checkpoint import Reader, checkpoints, latest

pytestmark = pytest.mark.xdist_group("processes")

NUM_KILLS = 20
TIMEOUT_S = time_limit(120)  # so that a busy machine is not taken for a hang


class Writer:
    """The process of `killed_writer.py`, and what it says."""

    def __init__(self, folder: str) -> None:
        self.process = subprocess.Popen(
            preloaded.python("-m", "tests.tf.checkpoint.killed_writer", folder),
            cwd=ROOT,
            env=variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout
        self.input, self.output = self.process.stdin, self.process.stdout
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.output:
            self.lines.put(line)

    def start(self) -> int:
        self.input.write("go\n")
        self.input.flush()
        return self.wait_for("started")

    def wait_for(self, word: str) -> int:
        return self.until(word)[0]

    def until(self, word: str) -> tuple[int, int]:
        """The number that comes with `word`, and the last step committed before that."""
        committed = 0
        while True:
            said, number = self.lines.get(timeout=TIMEOUT_S).split()
            if said == word:
                return int(number), committed
            committed = int(number)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=TIMEOUT_S)
        self.input.close()


@pytest.fixture
def writer(tmp_path):
    writer = Writer(str(tmp_path))
    yield writer
    writer.close()


def temporaries(folder) -> set[str]:
    return {name for name in os.listdir(folder) if ".tmp-" in name}


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_last_checkpoint_whole(tmp_path, writer):
    moment = random.Random(0)
    left_behind = committed = 0
    for round in range(NUM_KILLS):
        stale = temporaries(tmp_path)
        child = writer.start()
        if round % 2:
            time.sleep(moment.uniform(0, 0.3))  # also before the first commit has swept up
        else:
            committed = writer.wait_for("committed")
            assert not temporaries(tmp_path) & stale
            time.sleep(moment.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        _, last = writer.until("dead")
        committed = max(committed, last)
        left_behind += bool(temporaries(tmp_path))

        for path in checkpoints(str(tmp_path)):
            reader = Reader(path)
            generation = reader.info["generation"]
            assert reader.step == generation // 2
            for name in SPECS:
                assert np.array_equal(reader.read_whole(name), np.full(SHAPE, generation))
        last_path = latest(str(tmp_path))
        assert last_path is not None
        assert Reader(last_path).info["generation"] >= committed > 0

    assert left_behind  # kills did fall into the writing of checkpoints
    save(tmp_path, {"x": (np.zeros(2), parse_spec("R"))}, Mesh.of([1]), step=10**6)
    assert not temporaries(tmp_path)
