"""`memory_limit=`: the fastest plan that fits is taken, and where none does that is said."""

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.graphs.models import MODELS
from tfpar.planning.intra_op import TapPlanner
from tfpar.spec import MemoryLimitError, TfparError

build, BATCH = MODELS["three_layers"]


def plan(limit=None, **arguments):
    """Of one stage: among pipelines, of plans within the uncertainty of the fastest the simplest is
    taken, which need not be the fastest of all."""
    return tap.plan(
        build,
        BATCH,
        [4],
        "v100-ethernet",
        memory_limit=limit,
        planner="tap",
        pipeline=tap.Pipeline(stages=1, microbatches=1),
        **arguments,
    )


@pytest.mark.slow
def test_the_fastest_plan_that_fits_is_taken():
    keras.utils.clear_session(free_memory=False)
    fastest = plan()
    needed = fastest.cost.memory_bytes
    smaller = plan(0.8 * needed)
    assert smaller.cost.memory_bytes <= 0.8 * needed
    assert smaller.cost.seconds >= fastest.cost.seconds
    keras.utils.clear_session(free_memory=False)
    assert plan("16 GB").variables == fastest.variables


def test_a_limit_that_no_plan_meets_says_by_how_much_and_why():
    with pytest.raises(MemoryLimitError) as error:
        plan("800 kB")
    text = str(error.value)
    assert error.value.needed_bytes > 800e3
    for part in (
        "No plan fits into the memory of a device of 'v100-ethernet'",
        "where 781.25 KiB may be used",
        "too much: weights",
        "weigh most: '",
        "would help: ",
        "memory_limit=",
    ):
        assert part in text, text


def test_what_devices_have_no_room_for_is_not_searched():
    """Weights, gradients and slots alone are too large, however they are split."""
    searched = []

    class Searching(TapPlanner):
        def solve(self, problem):
            searched.append(problem)
            return super().solve(problem)

    for pipeline in (None, "auto", tap.Pipeline(2, 2)):
        with pytest.raises(MemoryLimitError, match="4 ranks share all weights, gradients") as error:
            tap.plan(
                build,
                BATCH,
                [4],
                "v100-ethernet",
                memory_limit="500 kB",
                planner=Searching(),
                pipeline=pipeline,
                offload=False,
            )
    assert not searched
    weights = build().trainable_weights
    needed = sum(w.numpy().nbytes for w in weights) * 4 / 4  # two slots of Adam
    assert error.value.needed_bytes == pytest.approx(needed, rel=0.02)
    assert f"more devices (above {int(4 * needed / 500e3)} of these)" in str(error.value)


def test_what_stages_lack_is_told_of_one_rank():
    """The limit that a user gave, not that of all stages together."""

    def build():
        layers = [keras.layers.Dense(64) for _ in range(4)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile("sgd", "mse")
        return model

    batch = np.zeros((256, 64), "float32"), np.zeros((256, 64), "float32")
    with pytest.raises(MemoryLimitError) as error:
        tap.plan(
            build,
            batch,
            [2],
            "v100-ethernet",
            memory_limit="100 KiB",
            planner="tap",
            pipeline=tap.Pipeline(2, 1),
        )
    text = str(error.value)
    assert "one device of each of 2 stages together" in text
    assert "where 200.00 KiB may be used, 100.00 KiB of each of them on average" in text
    assert 100 * 2**10 < error.value.needed_bytes


@pytest.mark.parametrize("limit", ["16 GB/s", "much", 0, -1])
def test_what_is_no_limit(limit):
    with pytest.raises(TfparError, match="memory_limit"):
        tap.auto_parallel([2], memory_limit=limit)
