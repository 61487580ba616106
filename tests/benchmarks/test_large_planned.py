"""Plans of large Keras models, as the benchmark finds them, on a part of one."""

import pytest

from benchmarks.large_planned import planned


@pytest.mark.slow
def test_a_part_of_the_model_is_planned_on_a_part_of_the_machines():
    row = planned(1, 1)
    assert (row["layers"], row["devices"], row["batch"]) == (1, 8, 12)
    assert row["step_s"] > 0 and row["plan_cpu_s"] > 0
    assert 0 < row["memory_bytes"] <= 80 * 2**30, "it fits"
