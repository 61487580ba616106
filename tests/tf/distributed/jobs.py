"""Jobs of ranks that tests start, and what their ranks report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import preloaded
from tests.jobs.launch.programs import ROOT, variables
from tests.time_limits import time_limit


@dataclass(frozen=True)
class Ended:
    """How a job went: its exit code, and what all its ranks printed."""

    size: int
    code: int
    output: str


def run(
    size: int,
    module: str,
    *arguments: object,
    seconds: float,
    timeout_s: int = 60,
    backend: str | None = None,
    options: Sequence[object] = (),
    imports: Sequence[str] = (),
    anew: bool = False,
) -> Ended:
    """`tfpar run` of `python -m module arguments`; at most `seconds`, and no rank outlives it.

    Args:
        timeout_s: how long its ranks wait for each other.
        options: more of `tfpar run`'s.
        imports: modules that take long to import, and which ranks find imported.
        anew: in interpreters that start anew, as users have them.
    """
    limit = f"{time_limit(timeout_s):g}"
    launcher = [
        *("-m", "tfpar", "run", "-np", size, "--timeout", limit),
        *(("--backend", backend) if backend else ()),
        *options,
    ]
    program = ["-m", module, *arguments]
    if anew:
        command = [sys.executable, *launcher, sys.executable, *program]
    else:
        ranks = preloaded.ranks(*program, imports=imports)
        command = [*preloaded.python(*launcher, *ranks)]
    return _ended(size, [str(word) for word in command], seconds)


def alone(module: str, *arguments: object, seconds: float, imports: Sequence[str] = ()) -> Ended:
    """`python -m module arguments`, in one process."""
    return _ended(1, preloaded.python("-m", module, *arguments, imports=imports), seconds)


def printed(job: Ended) -> list[Any]:
    """The lines of JSON that its ranks have printed, each its own."""
    assert job.code == 0, job.output
    found = (line[line.find("{") :] for line in job.output.splitlines() if "{" in line)
    return [json.loads(text) for text in found if text.startswith('{"')]


def _ended(size: int, command: Sequence[str], seconds: float) -> Ended:
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=time_limit(seconds))
        finally:
            process.terminate()  # which ends the ranks
    return Ended(size, process.returncode, output)


class Checked:
    """A job whose ranks report checks, each in a file of its own of `folder`.

    Attributes:
        errors: for each check that a rank has ended, what went wrong on it, or nothing.
    """

    def __init__(self, job: Ended, folder: Path) -> None:
        self.job = job
        self.errors: dict[str, list[str]] = {}
        for file in folder.iterdir():
            for line in map(json.loads, file.read_text().splitlines()):
                self.errors.setdefault(line["check"], []).append(line["error"])

    def assert_held(self, check: str) -> None:
        """Every rank has ended the check, and found nothing wrong."""
        errors = self.errors.get(check, [])
        assert not "".join(errors), "".join(errors)
        assert len(errors) == self.job.size, f"not all ranks came so far:\n{self.job.output}"
