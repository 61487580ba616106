"""Kills ranks of a training job at random moments until it is done: is anything lost?

    python -m benchmarks.kills --kills 20 [--at-once] [--json FILE]

One `tfpar run` restarts the job after each kill, with as many ranks. Every attempt but the last
loses one rank by SIGKILL at a random moment, half of them in the middle of writing a checkpoint.
After each the last checkpoint is opened and read whole; in the end the losses of all steps are
compared with those of one process that was never interrupted. Checkpoints are written behind
training, or at once; one in flight may be lost, the one before may not.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.results import save
from tfpar.tf.checkpoint import Reader, latest

ROOT = Path(__file__).parents[1]
RANKS = ROOT / "tests" / "tf" / "distributed" / "faulty_ranks.py"
BACKEND = "horovod" if importlib.util.find_spec("horovod") else "tensorflow"
ATTEMPT_S = 120.0
EVERY = 2
_TAIL_LINES = 60


@dataclasses.dataclass(frozen=True)
class Result:
    """What the kills have done.

    Attributes:
        code: of `tfpar run`.
        starts: the step from which each attempt went on.
        saved: the last complete checkpoint's step after each kill.
        behind: steps that were trained and not saved, at each kill.
        kills: ranks lost.
        largest_difference: between losses of a step, relative, with those of a job that was never
            interrupted; of all attempts that came to the step.
        steps: in all.
        seconds: for the whole.
    """

    code: int
    starts: list[int]
    saved: list[int]
    behind: list[int]
    kills: int
    largest_difference: float
    steps: int
    seconds: float

    @property
    def lost(self) -> list[tuple[int, int]]:
        """(saved step, step gone on from) where an attempt went on from less than was saved."""
        return [(s, b) for s, b in zip(self.saved, self.starts[1:], strict=False) if b < s]


def run(
    kills: int,
    folder: Path,
    num_ranks: int = 2,
    background: bool = True,
    python: Sequence[str] = (sys.executable,),
) -> Result:
    """Train with so many kills.

    Args:
        background: checkpoints are written behind training.
        python: the command of ranks, but for their program.

    Raises:
        AssertionError: a checkpoint that is visible cannot be read.
    """
    task = {
        "folder": str(folder),
        "epochs": 2 * kills + 1,
        "every": EVERY,
        "background": background,
        "pause_s": 0.02,
    }
    begun = time.monotonic()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tfpar",
            "run",
            "-np",
            str(num_ranks),
            "--min-np",
            str(num_ranks),
            "-H",
            f"localhost:{num_ranks + kills}",
            "--restarts",
            str(kills),
            "--backend",
            BACKEND,
            "--timeout",
            f"{ATTEMPT_S:g}",
            *python,
            str(RANKS),
            json.dumps({**task, "fault": "random_kill", "of": -1, "attempts": kills}),
        ],
        cwd=ROOT,
        env=_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        starts, saved, behind = _watch(process, folder)
    finally:
        process.terminate()
        process.wait(ATTEMPT_S)
    with tempfile.TemporaryDirectory() as plain:
        alone = {**task, "folder": plain, "every": 0, "mesh": [1], "pause_s": 0}
        subprocess.run(
            [*python, str(RANKS), json.dumps(alone)],
            env=_environment(),
            check=True,
            timeout=600,
            stderr=subprocess.DEVNULL,
        )
        expected = dict(_losses(Path(plain)))
    found = list(_losses(folder))
    differences = [abs(loss - expected[step]) / expected[step] for step, loss in found]
    steps = {step for step, _ in found}
    assert steps == set(expected), f"exit code {process.returncode}, {len(steps)} steps"
    return Result(
        process.returncode,
        starts,
        saved,
        behind,
        len(saved),
        max(differences),
        len(steps),
        time.monotonic() - begun,
    )


def _watch(process: subprocess.Popen, folder: Path) -> tuple[list[int], list[int], list[int]]:
    """Where each attempt began; what could be read after each kill, and how far behind it was."""
    starts: list[int] = []
    saved: list[int] = []
    behind: list[int] = []
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    assert process.stdout is not None
    for line in process.stdout:
        tail.append(line)
        begun = re.match(r"\[0\] training from (\d+)", line)
        if begun:
            starts.append(int(begun[1]))
        if line.startswith("tfpar run: rank") and "was lost" in line:
            saved.append(_position(folder))
            trained = max((step for step, _ in _losses(folder)), default=0)
            behind.append(trained - saved[-1])
            print(f"kill {len(saved)}: {line.strip()[11:]}; saved: step {saved[-1]}", flush=True)
    if process.wait(ATTEMPT_S) != 0:
        sys.stderr.writelines(tail)
    return starts, saved, behind


def _position(folder: Path) -> int:
    """The step of the last checkpoint, all of whose tensors are read; 0 if there is none."""
    path = latest(str(folder / "ckpt"))
    if path is None:
        return 0
    reader = Reader(path)
    for name in reader.names:
        reader.read_whole(name)
    return reader.info["step"]


def _losses(folder: Path) -> Iterator[tuple[int, float]]:
    """Each step that was trained, with its loss; some steps more than once."""
    path = folder / "losses.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        step = json.loads(line)
        yield step["step"], step["loss"]


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--at-once", action="store_true", help="training waits for checkpoints")
    parser.add_argument("--json", metavar="FILE", help="write what the kills have done")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job too
    with tempfile.TemporaryDirectory() as folder:
        result = run(options.kills, Path(folder), options.ranks, not options.at_once)
    save(options.json, [dataclasses.asdict(result)])
    print(
        f"{result.kills} kills in {result.seconds:.0f} s; {result.steps} steps; losses differ by "
        f"{result.largest_difference:.1e}; went on from less than saved: {result.lost or 'never'}; "
        f"trained and not saved at a kill: at most {max(result.behind, default=0)} steps"
    )
    lost = bool(result.lost) or max(result.behind, default=0) > 2 * EVERY
    return int(result.code != 0 or lost or result.largest_difference > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
