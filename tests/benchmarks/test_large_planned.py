"""Plans of large Keras models, as the benchmark finds them, on a part of one."""

import keras
import pytest

from benchmarks.large_planned import planned
from benchmarks.planned_scale import measured


@pytest.fixture(autouse=True)
def _policy():
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "layers", "nodes", "batch"),
    [("gpt3-175b", 1, 1, 12), ("gpt3-175b, mixed", 1, 3, 36), ("glam-1t", 2, 2, 8)],
)
def test_a_part_of_the_model_is_planned_on_a_part_of_the_machines(name, layers, nodes, batch):
    row = planned(name, "mixed_bfloat16", layers=layers, nodes=nodes)
    assert (row["layers"], row["devices"], row["batch"]) == (layers, 8 * nodes, batch)
    assert row["step_s"] > 0 and row["plan_cpu_s"] > 0 and 0 < row["mfu"] < 1
    assert 0 < row["memory_bytes"] <= 80 * 2**30, "it fits"
    rivals = {rival["name"].split(" stages")[0]: rival for rival in row["rivals"]}
    assert len(rivals) >= len([n for n in range(2, 8 * nodes + 1) if 8 * nodes % n == 0]) - 1
    assert all(rival["parts"] or "would" in rival["why"] for rival in rivals.values())


@pytest.mark.nightly
def test_search_time_is_measured_for_a_number_of_devices_and_layers():
    row = measured(devices=8, layers=1)
    assert (row["devices"], row["layers"]) == (8, 1)
    assert row["step_s"] > 0 and row["search_cpu_s"] > 0 and row["plan"]
