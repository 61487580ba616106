"""The contract of transports, the same for every backend: ranks run `transport_ranks`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.transport_ranks import CHECKS, OF_4_RANKS
from tfpar.distributed.job import Job
from tfpar.runtime.backends.tensorflow import TensorFlowTransport
from tfpar.spec import TfparError

pytestmark = pytest.mark.xdist_group("processes")

_ROOT = Path(__file__).parents[2]
_SECONDS = 100  # for one job


class Ran:
    """How a job of ranks went.

    Attributes:
        size: the number of ranks.
        errors: for each check that a rank has ended, what went wrong on it, or nothing.
        output: of all ranks.
    """

    def __init__(self, backend: str, size: int, folder: Path) -> None:
        self.size = size
        environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
        command = [
            sys.executable, "-m", "tfpar", "run", "-np", str(size), "--backend", backend,
            "--timeout", "60", sys.executable, "-m", "tests.distributed.transport_ranks",
            str(folder),
        ]  # fmt: skip
        with subprocess.Popen(
            command, cwd=_ROOT, env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                self.output, _ = process.communicate(timeout=_SECONDS)
            finally:
                process.terminate()  # which ends the ranks
        self.code = process.returncode
        reports = [file.read_text().splitlines() for file in folder.iterdir()]
        self.errors: dict[str, list[str]] = {}
        for line in map(json.loads, sum(reports, [])):
            self.errors.setdefault(line["check"], []).append(line["error"])


@pytest.fixture(
    scope="module",
    params=[(b, n) for b in ("horovod", "tensorflow") for n in (2, 4)],
    ids=lambda job: f"{job[0]}-{job[1]}",
)
def ran(request, tmp_path_factory) -> Ran:
    backend, size = request.param
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed")
    return Ran(backend, size, tmp_path_factory.mktemp(backend))


@pytest.mark.parametrize("check", CHECKS)
def test_on_every_rank(ran: Ran, check: str) -> None:
    if check in OF_4_RANKS and ran.size != 4:
        pytest.skip("needs 4 ranks")
    errors = ran.errors.get(check, [])
    assert not "".join(errors), "".join(errors)
    assert len(errors) == ran.size, f"not all ranks came so far:\n{ran.output}"


def test_the_job_ends_well(ran: Ran) -> None:
    assert ran.code == 0, ran.output


def test_a_job_without_addresses_cannot_use_tensorflow() -> None:
    with pytest.raises(TfparError, match="gives 0.*--backend tensorflow.*TFPAR_ADDRESSES"):
        TensorFlowTransport(Job(0, 2, launcher="Slurm"))


def test_tensorflow_cannot_be_used_once_its_runtime_has_started() -> None:
    import tensorflow as tf

    tf.constant(0)
    with pytest.raises(TfparError, match="before TensorFlow computes"):
        TensorFlowTransport(Job(0, 2, addresses=("127.0.0.1:1", "127.0.0.1:2")))
