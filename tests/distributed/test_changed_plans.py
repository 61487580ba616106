"""Plans that change while a model trains on several processes, after trials and by what a monitor
has measured: training gives what one device gives."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from tests.distributed.test_equivalence import Ran, assert_same
from tests.distributed.training import monitored, tried
from tests.distributed.training.place import Case, Place, run
from tests.equivalence import without_graph_optimizers

pytestmark = pytest.mark.xdist_group("processes")

BACKENDS = ["tensorflow", "horovod"]
CASES = {"tried": tried.CASES, "monitored": monitored.CASES}
"""By the module of `training` that a job runs."""


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
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name, case",
    [pytest.param(name, case, id=case.__name__) for name, of in CASES.items() for case in of],
)
def test_two_processes_do_what_one_does(jobs, name: str, case: Case, backend: str, tmp_path):
    with without_graph_optimizers():
        wanted = run(case, Place(tmp_path))
    assert_same(jobs(name, backend).results(case), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name, backend", itertools.product(CASES, BACKENDS))
def test_the_jobs_end_well(jobs, name: str, backend: str):
    ended = jobs(name, backend).job
    assert ended.code == 0, ended.output
