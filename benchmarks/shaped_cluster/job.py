"""One run: `tfpar run` in the head's namespace starts the ranks on the nodes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.shaped_cluster.config import MARK, Config
from benchmarks.shaped_cluster.namespaces import HEAD, PREFIX, ClusterError, Node, inside
from benchmarks.workers import ROOT

# A host is a namespace, and as with a real ssh nothing of our environment goes there. It gets a
# host name too, one that resolves: Horovod's process sets listen where the host name leads.
_SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
exec env -i HOME=/ PATH=/usr/sbin:/usr/bin:/sbin:/bin %s \\
    ip netns exec "%s${1##*.}" unshare --uts \\
    sh -c 'echo "$1" > /proc/sys/kernel/hostname && exec sh -c "$2"' sh "$1" "$2"
"""
_SILENT_S = 300.0  # of a rank, until `tfpar run` ends the job
_LAST_WORDS = 3000


def run_ranks(
    nodes: Sequence[Node], config: Config, timeout_s: float
) -> list[list[dict[str, Any]]]:
    """What each rank has measured: a row for each bandwidth.

    Raises:
        ClusterError: the job has failed, or is not done in time.
    """
    command = ["benchmarks.shaped_cluster.worker", config.to_json()]
    return [_result(text) for text in run_module(nodes, config.ranks_per_node, command, timeout_s)]


def run_module(
    nodes: Sequence[Node],
    ranks_per_node: int,
    command: Sequence[str],
    timeout_s: float,
    first: str = "",
    backend: str = "horovod",
) -> list[str]:
    """What each rank of `python -m command` has printed.

    Args:
        first: words that run what follows them, on each node; see `cores.quotas`.

    Raises:
        ClusterError: the job has failed, or is not done in time.
    """
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        output = pathlib.Path(folder, "out")
        launch = [
            sys.executable,
            "-m",
            "tfpar",
            "run",
            "-H",
            ",".join(f"{node.address}:{ranks_per_node}" for node in nodes),
            "--backend",
            backend,
            "--timeout",
            str(_SILENT_S),
            "--output-dir",
            str(output),
            sys.executable,
            "-m",
            *command,
        ]
        with _started(inside(HEAD, launch), _environment(folder, first)) as process:
            try:
                said, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                raise ClusterError(f"The ranks are not done in {timeout_s:g} s.") from error
        if process.returncode != 0:
            raise ClusterError(
                f"tfpar run ended with exit code {process.returncode}:\n{said[-_LAST_WORDS:]}"
            )
        return [
            (output / f"rank.{rank}.out").read_text() for rank in range(len(nodes) * ranks_per_node)
        ]


def _result(text: str) -> list[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise ClusterError(f"A rank has ended without a result: {text[-_LAST_WORDS:]}")


def _environment(folder: str, first: str) -> dict[str, str]:
    """With a stand-in for ssh on the PATH; a rank computes with one thread, as cores are few."""
    ssh = pathlib.Path(folder, "ssh")
    ssh.write_text(_SSH % (first, PREFIX))
    ssh.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_NUM_INTRAOP_THREADS": "1",
    }


@contextlib.contextmanager
def _started(
    command: Sequence[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process whose group ends with the context; the ranks end when their launcher does."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
