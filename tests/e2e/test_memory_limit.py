"""`memory_limit=`: the fastest plan that fits is taken, and where none does that is said."""

import pytest

import tfpar as tap
from benchmarks.models import batch_of, compile_model, gpt
from tfpar.spec import MemoryLimitError, TfparError


@pytest.fixture(scope="module")
def model():
    return lambda: gpt(512, length=16, hidden=32, num_layers=1)


def plan(model, limit=None, **arguments):
    """Of one stage: among pipelines, of plans within the uncertainty of the fastest the simplest is
    taken, which need not be the fastest of all."""
    batch = batch_of(model(), 4)
    return tap.plan(
        lambda: compile_model(model()),
        batch,
        [4],
        "v100-ethernet",
        memory_limit=limit,
        planner="tap",
        pipeline=tap.Pipeline(stages=1, microbatches=1),
        **arguments,
    )


@pytest.mark.slow
def test_the_fastest_plan_that_fits_is_taken(model):
    fastest = plan(model)
    needed = fastest.cost.memory_bytes
    smaller = plan(model, 0.8 * needed)
    assert smaller.cost.memory_bytes <= 0.8 * needed
    assert smaller.cost.seconds >= fastest.cost.seconds
    assert plan(model, "16 GB").variables == fastest.variables


@pytest.mark.slow
def test_a_limit_that_no_plan_meets_says_by_how_much_and_why(model):
    with pytest.raises(MemoryLimitError) as error:
        plan(model, "100 kB")
    text = str(error.value)
    assert error.value.needed_bytes > 100e3
    for part in (
        "No plan fits into the memory of a device of 'v100-ethernet'",
        "where 97.66 KiB may be used",
        "too much: weights",
        "weigh most: '",
        "would help: ",
        "memory_limit=",
    ):
        assert part in text, text


@pytest.mark.parametrize("limit", ["16 GB/s", "much", 0, -1])
def test_what_is_no_limit(limit):
    with pytest.raises(TfparError, match="memory_limit"):
        tap.auto_parallel([2], memory_limit=limit)
