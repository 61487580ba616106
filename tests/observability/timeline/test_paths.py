"""Keras's paths of what steps run, on steps of models that were saved."""

from __future__ import annotations

import pytest

from tests.graphs import saved
from tfpar.ir import Roles
from tfpar.observability.timeline.nodes import Origins


def origins(name: str) -> tuple[Origins, list[str], set[str]]:
    """Of a saved step, with the names of its ops and the paths of the layers that hold weights."""
    step = saved(name)
    weights = (v.name for v in step.graph.variables if v.trainable)
    found = Origins(step.graph, Roles.of(step.graph, step.gradient_tensors))
    return found, [op.name for op in step.graph.ops], {w.rpartition("/")[0] for w in weights}


@pytest.mark.parametrize("name", ["gpt", "resnet", "t5", "vit_4_layers", "unet", "gshard_moe"])
def test_every_layer_with_weights_is_found_by_its_path(name):
    known, ops, layers = origins(name)
    assert layers <= {known.path(op) for op in ops}


def test_layers_without_weights_have_paths_too():
    known, *_ = origins("unet")
    assert known.path("unet_1/down_0_pool_1/MaxPool2d") == "down_0_pool"
    assert known.path("gradient_tape/unet_1/down_0_pool_1/MaxPool2d/MaxPoolGrad") == "down_0_pool"


@pytest.mark.parametrize(
    ("op", "path", "phase"),
    [
        ("functional_1/block_0_attention_1/query_1/MatMul", "block_0_attention/query", "forward"),
        (
            "functional_1/block_0_attention_1/query_1/MatMul/reshard/AllReduce_packed",
            "block_0_attention/query",
            "forward",
        ),
        ("functional_1/Add", "functional", "forward"),
        ("nothing_of_this/model", "nothing_of_this", "forward"),
        ("Cast_99/of_no_op", "step", "forward"),
    ],
)
def test_what_is_written_for_an_op_is_of_its_layer(op, path, phase):
    known, *_ = origins("gpt")
    assert (known.path(op), known.phase(op)) == (path, phase)


def test_the_backward_pass_is_of_the_layer_whose_gradient_it_is():
    known, ops, _ = origins("gpt")
    found = [op for op in ops if op.startswith("gradient_tape/functional_1/head_1/")]
    assert found
    assert {(known.path(op), known.phase(op)) for op in found} == {("head", "backward")}
