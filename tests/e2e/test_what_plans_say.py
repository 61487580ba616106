"""Plans show how weights lie, in which patterns, and what else was priced."""

import pytest

import tfpar as tap
from benchmarks.models import SMALL, batch_of, compile_model
from tfpar.spec import PlanError


def build():
    """A GPT for which splitting weights gains more than predictions may be off."""
    return compile_model(SMALL["gpt"](hidden=512, length=256, vocabulary=4000, num_layers=1))


@pytest.fixture(scope="module")
def plan():
    return tap.plan(build, batch_of(build(), 1), [1, 4], "rhino-m8", planner="tap")


@pytest.mark.slow
def test_the_summary_goes_layer_by_layer(plan):
    text = plan.summary()
    assert "Found by the tap planner for cluster 'rhino-m8' (1 node of 4)" in text
    assert "Memory of a device" in text and "Next best layouts: " in text
    layers = text[text.index("Layers (") : text.index("Total: ")]
    assert "S(0) over model" in layers and " all_reduce" in layers and " us |" in layers
    assert "To compare: one device" in text and "data parallel" in text
    whole = plan.summary(full=True)
    assert "all_reduce over model" in whole and "Variables\n" in whole


@pytest.mark.slow
def test_a_variable_is_explained_with_the_runner_up(plan):
    text = plan.explain("block_0_fc1/kernel")
    assert "S(1) over model" in text and "chosen by the tap planner" in text
    others = text[text.index("otherwise, at best:") :].splitlines()[1:]
    assert "replicated: " in text and "%)" in others[0]


@pytest.mark.slow
def test_a_layer_is_explained_with_its_patterns(plan):
    text = plan.explain("block_0_fc2")
    assert "Layer 'block_0_fc2' (Dense), made in transformers.py:" in text and "Sharding patterns, each by itself:" in text
    assert "kernel S(0) over model:" in text and "all_reduce over model (forward" in text


@pytest.mark.slow
def test_a_name_that_is_nothing_is_refused(plan):
    with pytest.raises(PlanError, match="no variable or layer 'block_9'"):
        plan.explain("block_9")


@pytest.mark.slow
def test_diff_tells_what_another_cluster_changes(plan):
    other = tap.plan(build, batch_of(build(), 64), [1, 4], "v100-ethernet", planner="tap")
    lines = plan.diff(other)
    assert any(line.startswith("cluster: rhino-m8 -> v100-ethernet") for line in lines)
    assert any(line.startswith("predicted step: ") for line in lines)
    assert plan.diff(plan) == []


@pytest.mark.slow
def test_a_saved_plan_says_the_same_without_the_graph(plan):
    again = tap.Plan.from_json(plan.to_json())
    assert again == plan
    assert "Predicted" in again.summary() and "otherwise, at best" in again.explain("head/kernel")
