"""Large models on large clusters: their sizes against what was published of them."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.large_models import SETUPS
from benchmarks.moe_layers import GLAM


def test_a_third_of_the_machines_is_a_generation_older():
    for name, expected in [
        ("gpt3-175b", {"A100-SXM4-80GB": 1024}),
        ("gpt3-175b, mixed", {"A100-SXM4-80GB": 680, "V100-SXM2-32GB": 344}),
        ("glam-1t", {"H100-SXM5-80GB": 2048}),
        ("glam-1t, mixed", {"H100-SXM5-80GB": 1368, "A100-SXM4-80GB": 680}),
    ]:
        model = SETUPS[name].model
        assert Counter(device.name for device in model.cluster.devices) == expected
        assert model.table.expert_degrees == ([1, 2, 4, 8, 16, 32, 64] if "glam" in name else [1])


def test_operations_are_those_of_the_published_formula():
    """Narayanan et al. 2021, §5.1, without the forward pass that they compute again."""
    setup = SETUPS["gpt3-175b"]
    gpt, batch = setup.gpt, setup.batch
    beside = gpt.length / 6 / gpt.hidden + gpt.vocabulary / 12 / gpt.layers / gpt.hidden
    blocks = 72 * batch * gpt.length * gpt.layers * gpt.hidden**2
    assert setup.flops == pytest.approx(blocks * (1 + beside))


def test_weights_of_glam_are_those_that_its_layers_store():
    """1.2 T in the paper, of which a token meets 96.6 G."""
    table = SETUPS["glam-1t"].model.table
    stored = sum(table.kinds[table.layers[layer]].weight_bytes for layer in range(len(table))) / 2
    assert stored == pytest.approx(GLAM.parameters)
    assert stored == pytest.approx(1.2e12, rel=0.05)
    sparse = table.kinds["sparse"]
    unused = sparse.experts.weight_bytes / 2 * (1 - GLAM.chosen / GLAM.experts)
    met = stored - unused * GLAM.gpt.layers / 2
    assert met == pytest.approx(96.6e9, rel=0.1)


def test_few_tokens_for_many_experts_take_longer():
    """An expert's weights are read whatever it computes."""
    seconds = SETUPS["glam-1t"].model.table.kinds["sparse"].seconds
    for case, passes in seconds.items():
        if case.experts < GLAM.experts:
            assert passes.forward > seconds[case._replace(experts=2 * case.experts)].forward
