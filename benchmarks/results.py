"""Results of benchmarks as JSON: what was run, when, on which commit, and its rows.

`benchmarks/results` holds those that the documentation quotes; `python -m scripts.benchmark_tables`
writes its tables from them.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.workers import ROOT, versions

FOLDER = ROOT / "benchmarks" / "results"

_FILES = {"--json", "--record", "--predicted"}
"""Options that name a file of who runs a benchmark, which say nothing about the figures."""

_READ = {"--steps"}
"""Options that name a file that is read: that there is one is told, and not its name."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One run of a benchmark.

    Attributes:
        command: what was run.
        date: of the run, ISO.
        commit: the short hash of what was measured; with `+` where files had changed since.
        cpus: how many cores the machine has.
        versions: of what is measured, by package.
        rows: a mapping each; sizes in bytes unless named otherwise, times in seconds (`_s`).
        note: what a reader of the figures has to know.
        machine: how slow the machine was (`benchmarks.machine`); None in results of before that.
    """

    command: str
    date: str
    commit: str
    cpus: int | None
    versions: dict[str, str]
    rows: Sequence[dict[str, Any]]
    note: str = ""
    machine: float | None = None

    @classmethod
    def load(cls, name: str) -> Result:
        """One that the documentation quotes."""
        return cls(**json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it: a line for each row, so that runs compare."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.machine is None:
            del fields["machine"]
        rows = ",\n  ".join(json.dumps(row) for row in fields.pop("rows"))
        head = json.dumps(fields, indent=1).removesuffix("\n}")
        pathlib.Path(path).write_text(f'{head},\n "rows": [\n  {rows}\n ]\n}}\n', encoding="utf-8")


def save(
    path: str | os.PathLike[str] | None,
    rows: Sequence[dict[str, Any]],
    machine: float | None = None,
) -> None:
    """Write the rows of the benchmark that is running; nothing without a path.

    Args:
        machine: how slow the machine is; None: measured here.
    """
    if path is None:
        return
    module = pathlib.Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("")
    name = ".".join(module.parts).removesuffix(".__main__")
    options = [
        "FILE" if sys.argv[i] in _READ else a
        for i, a in enumerate(sys.argv[1:])
        if not {a, sys.argv[i]} & _FILES
    ]
    today = datetime.date.today().isoformat()
    command = " ".join(["python -m", name, *options])
    machine = machine or measure_machine()
    result = Result(command, today, commit(), os.cpu_count(), versions(), rows, machine=machine)
    result.save(path)


@functools.cache
def measure_machine() -> float:
    """Measure how slow this machine is (`benchmarks.machine`), once a run, in its own process."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-m", "benchmarks.machine", "--factor"]
    environ = {**os.environ, **quiet}
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def commit() -> str:
    """The commit that is checked out; empty outside of a clone."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
