"""Benchmark workers: one process per contender, told over a pipe when to run.

All contenders of a model stay up together and take turns, so that a machine that
slows down slows all of them.
"""

from __future__ import annotations

import json
import os
import pathlib
import selectors
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Worker:
    """A contender in a process of its own; `ask` sends a request and waits for the answer."""

    def __init__(self, module: str, config: dict[str, Any], timeout: float = 600.0) -> None:
        env = {
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "-1"),
        }
        self.config = config
        self._timeout = timeout
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--worker", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=ROOT,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer; RuntimeError if it died or stays silent for the time limit."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while selector.select(self._timeout):
                line = self._process.stdout.readline()
                if not line:
                    break
                if line.startswith("@"):
                    return json.loads(line[1:])
        self.close()
        raise RuntimeError(f"benchmark worker {self.config} gave no answer")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(handle) -> None:
    """Answer requests from standard input with `handle(request)` until it closes."""
    for line in sys.stdin:
        print("@" + json.dumps(handle(json.loads(line))), flush=True)


def versions() -> dict[str, str]:
    """Versions of what is measured."""
    import importlib.metadata as metadata
    import platform

    found = {"python": platform.python_version()}
    for name in ("tensorflow", "tensorflow_cpu", "keras", "numpy", "tfpar"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def endless(batch: tuple[Any, ...]) -> Any:
    """A `tf.data.Dataset` of the same batch for ever.

    Without autotuning: the end of a `fit` would wait for its thread, seconds now and then.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensors(batch).cache().repeat().with_options(options)
