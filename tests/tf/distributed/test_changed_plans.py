"""Plans that change while a model trains on several processes, after trials and by what a monitor
has measured: training gives what one device gives."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.equivalence import without_graph_optimizers
from tests.tf.distributed.test_equivalence import Ran, assert_same
from tests.tf.distributed.training import monitored, tried
from tests.tf.distributed.training.place import Case, Place, run
from tests.tf.distributed.training.sets import BY_DAY

pytestmark = pytest.mark.xdist_group("processes")

CASES = {"tried": tried.CASES, "monitored": monitored.CASES}
"""By the module of `training` that a job runs."""
JOBS = [
    pytest.param("tried", "tensorflow"),
    pytest.param("tried", "horovod", marks=pytest.mark.nightly),
    pytest.param("monitored", "tensorflow", marks=pytest.mark.nightly),
    pytest.param("monitored", "horovod"),
]
"""With their backends: each by one of them by day."""


def cases() -> Iterator[Any]:
    """All that the jobs run."""
    for job in JOBS:
        name, backend = job.values
        for case in CASES[name]:
            marks = (*job.marks, *([] if case in BY_DAY[name] else [pytest.mark.nightly]))
            yield pytest.param(name, backend, case, id=f"{case.__name__}-{backend}", marks=marks)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Starts the job of a module on two processes of a backend, once."""
    started: dict[tuple[str, str], Ran] = {}

    def job(name: str, backend: str) -> Ran:
        if backend == "horovod" and importlib.util.find_spec("horovod") is None:
            pytest.skip("Horovod is not installed")
        if (name, backend) not in started:
            started[name, backend] = Ran(2, name, tmp_path_factory.mktemp(name), backend)
        return started[name, backend]

    return job


@pytest.mark.slow
@pytest.mark.parametrize("name, backend, case", cases())
def test_two_processes_do_what_one_does(jobs, name: str, backend: str, case: Case, tmp_path):
    with without_graph_optimizers():
        wanted = run(case, Place(tmp_path))
    assert_same(jobs(name, backend).results(case), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name, backend", JOBS)
def test_the_jobs_end_well(jobs, name: str, backend: str):
    ended = jobs(name, backend).job
    assert ended.code == 0, ended.output
