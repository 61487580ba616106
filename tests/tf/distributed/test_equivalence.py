"""Training on several processes gives what one device gives.

One job of ranks runs many cases of `tests.tf.distributed.training`; what a case gives is the same
on each rank, and the same as here.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests import written_models
from tests.equivalence import without_graph_optimizers
from tests.tf.distributed import jobs
from tests.tf.distributed.training import data, drifts, files, refusals
from tests.tf.distributed.training.place import (
    Case,
    Place,
    Results,
    precision,
    run,
    trained,
)
from tests.tf.distributed.training.sets import BY_DAY, SAME_AS_ONE

pytestmark = [
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"
    ),
]

_SECONDS = 600  # for one job

TOLERANCE = {"float32": (1e-4, 1e-5), "float64": (1e-7, 1e-9)}
"""Relative and absolute, for what floating-point reordering may change."""


class Ran:
    """A job, and what its ranks report.

    Attributes:
        job: how it ended.
        folder: of the files of each case.
    """

    def __init__(self, size: int, cases: str, folder: Path, backend: str = "horovod") -> None:
        self.folder = folder
        ranks = "tests.tf.distributed.training"
        self.job = jobs.run(
            size, ranks, folder, cases, seconds=_SECONDS, timeout_s=120, backend=backend
        )

    def results(self, case: Case) -> list[Results]:
        """Of each rank."""
        return [self._of_rank(case.__name__, rank) for rank in range(self.job.size)]

    def _of_rank(self, case: str, rank: int) -> Results:
        error = self.folder / f"{case}.{rank}.txt"
        assert not error.exists(), f"rank {rank}: {error.read_text()}"
        file = self.folder / f"{case}.{rank}.npz"
        assert file.exists(), f"rank {rank} did not come so far:\n{self.job.output}"
        with np.load(file) as results:
            return dict(results)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Ran:
    return Ran(2, "two", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Ran:
    return Ran(4, "four", tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def four_with_tensorflow(tmp_path_factory) -> Ran:
    folder = tmp_path_factory.mktemp("four_with_tensorflow")
    return Ran(4, "four_with_tensorflow", folder, "tensorflow")


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Callable[[Case], Results]:
    """What a case gives in this process, on one device."""

    @functools.cache
    def results(case: Case) -> Results:
        with without_graph_optimizers():
            return run(case, Place(tmp_path_factory.mktemp(case.__name__)))

    return results


def some_at_night(values: Iterable[Any], by_day: Collection[Any]) -> list[Any]:
    """Parameters, of which some are for the night."""
    marks = {True: (), False: pytest.mark.nightly}
    return [pytest.param(value, marks=marks[value in by_day]) for value in values]


def each(cases: Iterable[Case], job: str) -> pytest.MarkDecorator:
    """These cases, of which a job runs some at night only."""
    values = some_at_night(cases, BY_DAY[job])
    return pytest.mark.parametrize("case", values, ids=lambda case: case.__name__)


@pytest.mark.slow
@each(SAME_AS_ONE["two"], "two")
def test_two_processes_do_what_one_does(two: Ran, case: Case, here) -> None:
    assert_same(two.results(case), here(case))


@pytest.mark.slow
@each(SAME_AS_ONE["four"], "four")
def test_four_processes_do_what_one_does(four: Ran, case: Case, here) -> None:
    assert_same(four.results(case), here(case))


@pytest.mark.slow
@each(SAME_AS_ONE["four_with_tensorflow"], "four_with_tensorflow")
def test_four_processes_over_tensorflow_do_what_one_does(
    four_with_tensorflow: Ran, case: Case, here
) -> None:
    assert_same(four_with_tensorflow.results(case), here(case))


@pytest.mark.slow
@each(data.UNSEEDED, "two")
def test_ranks_draw_the_same_where_the_user_seeds_nothing(two: Ran, case: Case) -> None:
    first, other = two.results(case)
    assert_same([other], first)


@pytest.mark.slow
@each(refusals.MESSAGES, "two")
def test_every_rank_refuses(two: Ran, case: Case) -> None:
    for results in two.results(case):
        assert re.search(refusals.MESSAGES[case], str(results["message"]))


@pytest.mark.slow
@each(drifts.MESSAGES, "two")
def test_what_one_of_two_ranks_changes_or_is_fed_is_told_to_both(two: Ran, case: Case) -> None:
    assert_told(two, case)


@pytest.mark.slow
@each(drifts.ON_FOUR, "four")
def test_what_one_of_four_ranks_changes_or_is_fed_is_told_to_all(four: Ran, case: Case) -> None:
    assert_told(four, case)


def assert_told(ran: Ran, case: Case) -> None:
    """All ranks were told, at the same step, what it is and of which rank."""
    all_results = ran.results(case)
    for results in all_results:
        assert drifts.pattern(case, ran.job.size).search(str(results["message"]))
    assert {int(results["late"]) for results in all_results} == {int(all_results[0]["late"])}


@pytest.mark.slow
def test_training_goes_on_after_refusals(two: Ran) -> None:
    first, other = two.results(refusals.training_goes_on)
    assert_same([other], first)


@pytest.mark.slow
@pytest.mark.nightly
def test_training_goes_on_from_a_file_of_two_processes(two: Ran) -> None:
    results = two.results(files.models_and_weights)[0]
    wanted = [value for name, value in results.items() if name.startswith("weights/")]
    folder = two.folder / files.models_and_weights.__name__
    with precision("float64"):
        model = keras.saving.load_model(folder / "model.keras")
    for got, value in zip(model.get_weights(), wanted, strict=True):
        np.testing.assert_array_equal(got, value)
    assert int(model.optimizer.iterations) == len(results["losses"])
    with precision("float64"):
        later = trained(model, files.X, files.Y, batch_size=4, shuffle=False)
    np.testing.assert_allclose(later["losses"], results["later losses"], 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_at_night(written_models.ROWS, files.WRITTEN_BY_DAY))
def test_what_two_processes_write_computes_what_one_device_does(two: Ran, name: str, here) -> None:
    """The column of processes in the table of `tests/e2e/test_written_models.py`."""
    folder, row = two.folder / files.models_written.__name__, written_models.ROWS[name]
    for rank in range(two.job.size if row.own else 1):
        read = row.read(row.path(folder, name, rank))
        np.testing.assert_allclose(read, here(files.models_written)["outputs"], 1e-4, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["two", "four", "four_with_tensorflow"])
def test_the_job_ends_well(job: str, request) -> None:
    ran = request.getfixturevalue(job)
    assert ran.job.code == 0, ran.job.output


def assert_same(ranks: Iterable[Results], wanted: Results) -> None:
    """Each rank's results are those wanted, but for roundings."""
    for rank, got in enumerate(ranks):
        assert list(got) == list(wanted)
        for name, value in wanted.items():
            rtol, atol = TOLERANCE.get(value.dtype.name, (0, 0))
            message = f"{name} on rank {rank}"
            if rtol:
                np.testing.assert_allclose(got[name], value, rtol, atol, err_msg=message)
            else:
                np.testing.assert_array_equal(got[name], value, err_msg=message)
