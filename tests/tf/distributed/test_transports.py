"""The contract of transports, the same for every backend: ranks run `transport_ranks`."""

from __future__ import annotations

import importlib.util
import json
import os
import re

import pytest

from tests.tf.distributed import jobs
from tests.tf.distributed.jobs import Checked
from tests.tf.distributed.transport_ranks import CHECKS, OF_4_RANKS
from tests.time_limits import time_limit
from tfpar.compile.local import Channel
from tfpar.spec import TfparError
from tfpar.tf.distributed.job import Job
from tfpar.tf.runtime.backends.tensorflow import TensorFlowTransport

pytestmark = pytest.mark.xdist_group("processes")

_SECONDS = 100  # for one job


def skip_without(backend: str) -> None:
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("horovod", 2), marks=pytest.mark.nightly),
        ("horovod", 4),
        ("tensorflow", 2),
        pytest.param(("tensorflow", 4), marks=pytest.mark.nightly),
    ],
    ids=lambda job: f"{job[0]}-{job[1]}",
)
def ran(request, tmp_path_factory) -> Checked:
    backend, size = request.param
    skip_without(backend)
    folder = tmp_path_factory.mktemp(backend)
    ranks = "tests.tf.distributed.transport_ranks"
    return Checked(jobs.run(size, ranks, folder, seconds=_SECONDS, backend=backend), folder)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_on_every_rank(ran: Checked, check: str) -> None:
    if check in OF_4_RANKS and ran.job.size != 4:
        pytest.skip("needs 4 ranks")
    ran.assert_held(check)


KILLED, SILENT = "rank 1 .* was killed by SIGKILL", "rank 1 .* hung at"


@pytest.mark.slow
def test_the_job_ends_well(ran: Checked) -> None:
    assert ran.job.code == 0, ran.job.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "fault", "code", "said"),
    [
        ("horovod", "killed", 137, KILLED),
        ("tensorflow", "silent", 70, SILENT),
        pytest.param("tensorflow", "killed", 137, KILLED, marks=pytest.mark.nightly),
        pytest.param("horovod", "silent", 70, SILENT, marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_others_wait_for_is_named(tmp_path, backend, fault, code, said) -> None:
    skip_without(backend)
    ranks, timeout_s = "tests.tf.distributed.lost_ranks", 8
    job = jobs.run(
        2, ranks, tmp_path, fault, seconds=_SECONDS, timeout_s=timeout_s, backend=backend
    )
    assert job.code == code and re.search(said, job.output), job.output
    if fault == "killed":  # the other learns of it, too
        error, message, waited = json.loads((tmp_path / "told.json").read_text())
        assert error == "PeerLostError" and "the second step: another rank has ended" in message
        assert waited < time_limit(timeout_s)


@pytest.mark.parametrize(("num_ranks", "told"), [(2, None), (3, "1")])
def test_horovod_looks_for_new_groups_only_where_there_can_be_one(monkeypatch, num_ranks, told):
    skip_without("horovod")
    from tfpar.tf.runtime.backends import horovod as backend

    seen, made, name = [], [], "HOROVOD_DYNAMIC_PROCESS_SETS"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    for asked, answer in (("rank", 0), ("size", num_ranks), ("mpi_enabled", False)):
        monkeypatch.setattr(backend.hvd, asked, lambda answer=answer: answer)
    monkeypatch.setattr(backend.hvd, "init", lambda: seen.append(os.environ.get(name)))
    monkeypatch.setattr(backend.hvd, "add_process_set", made.append)
    transport = backend.HorovodTransport("CPU:0", num_ranks)
    transport.connect([(0, 1), (1, 0)], [Channel(1, 0, "back")])
    assert seen == [told] and made == ([(0, 1)] if told else [])


def test_a_job_without_addresses_cannot_use_tensorflow() -> None:
    with pytest.raises(TfparError, match="gives 0.*--backend tensorflow.*TFPAR_ADDRESSES"):
        TensorFlowTransport(Job(0, 2, launcher="Slurm"), list)


def test_tensorflow_cannot_be_used_once_its_runtime_has_started() -> None:
    import tensorflow as tf

    tf.constant(0)
    with pytest.raises(TfparError, match="before TensorFlow computes"):
        TensorFlowTransport(Job(0, 2, addresses=("127.0.0.1:1", "127.0.0.1:2")), list)
