"""Peaks of four processes, by schedule and number of microbatches of the same size."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.pipeline.config import MARK, Memory
from benchmarks.workers import ROOT

TIMEOUT_S = 600.0


def measure(config: Memory) -> list[dict[str, Any]]:
    """A row for each contender: peaks of all ranks, beyond what they held before.

    All take turns in the same processes, so these give back what they do not use: without oneDNN's
    allocator, which keeps it, and with tensors in pages of their own.

    Raises:
        RuntimeError: a rank has failed.
    """
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "MALLOC_MMAP_THRESHOLD_": str(2**16),
    }
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "tfpar", "run", "-np", str(config.ranks)]
        worker = [sys.executable, "-m", "benchmarks.pipeline.memory_worker", config.to_json()]
        done = subprocess.run(
            [*launch, "--output-dir", folder, *worker],
            env=environment,
            cwd=ROOT,
            text=True,
            capture_output=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"The ranks have failed:\n{(done.stdout + done.stderr)[-3000:]}")
        ranks = [
            _result(pathlib.Path(folder, f"rank.{rank}.out").read_text(encoding="utf-8"))
            for rank in range(config.ranks)
        ]
    return [
        {**of_all[0], "peak_bytes": [row["peak_bytes"] for row in of_all]}
        for of_all in zip(*ranks, strict=True)
    ]


def _result(text: str) -> list[dict[str, Any]]:
    (line,) = (line for line in text.splitlines() if line.startswith(MARK))
    return json.loads(line.removeprefix(MARK))
