"""A monitored training on two processes gives what one device gives, by a new plan too."""

from __future__ import annotations

import importlib.util

import pytest

from tests.distributed.test_equivalence import Ran, assert_same
from tests.distributed.training import monitored
from tests.distributed.training.place import Case, Place, run
from tests.equivalence import without_graph_optimizers

pytestmark = pytest.mark.xdist_group("processes")

BACKENDS = ["tensorflow", "horovod"]


@pytest.fixture(scope="module", params=BACKENDS)
def two(request, tmp_path_factory) -> Ran:
    if request.param == "horovod" and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed")
    return Ran(2, "monitored", tmp_path_factory.mktemp("monitored"), request.param)


@pytest.mark.slow
@pytest.mark.parametrize("case", monitored.CASES, ids=lambda case: case.__name__)
def test_two_processes_do_what_one_does(two: Ran, case: Case, tmp_path) -> None:
    with without_graph_optimizers():
        wanted = run(case, Place(tmp_path))
    assert_same(two.results(case), wanted)


@pytest.mark.slow
def test_the_job_ends_well(two: Ran) -> None:
    assert two.job.code == 0, two.job.output
