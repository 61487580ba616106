"""Proposals for steps that are traced here."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.planning.problems import Captured
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.rhino.axis_space import AxisConstraints, AxisStrategySpace
from tfpar.planning.intra_op.rhino.costs import Costs
from tfpar.spec import Mesh, Shard, fits


def in_pieces():
    """A weight whose result is added to a concatenation of pieces that two does not divide."""
    x = inputs = keras.Input((6,))
    pieces = layers.concatenate([layers.Dense(11)(x) for _ in range(4)])
    model = keras.Model(inputs, layers.Dense(5)(layers.add([pieces, layers.Dense(44)(x)])))
    model.compile("sgd", "mse", jit_compile=False)
    return model


@pytest.mark.slow
def test_whatever_is_chosen_along_an_axis_what_is_proposed_along_the_next_fits():
    step = Captured.of(in_pieces, 8, (tf.TensorSpec((8, 6)), tf.TensorSpec((8, 5))))
    problem, mesh = step.problem([2, 2], "cpu"), Mesh(("data", "model"), (2, 2))
    model = FoldedModel.of(problem, 2)
    first = AxisStrategySpace(problem, model, mesh, 0, {}, AxisConstraints())
    strided = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        chosen = first.chosen([int(rng.integers(len(options))) for options in first.strategies])
        space = AxisStrategySpace(problem, model, mesh, 1, chosen, AxisConstraints())
        for node, strategies in zip(space.nodes, space.strategies, strict=True):
            for strategy in strategies:
                for tensor, spec in zip(
                    node[0].outputs, space.specs(node[0], strategy, "kept"), strict=True
                ):
                    assert fits(tensor.shape or (), spec, mesh), (tensor, spec)
                    strided += isinstance(spec[1], Shard) and spec[1].stride == 6
        Costs(space).network()  # as it prices what is proposed
    assert strided, "no stride along the second axis came of one along the first"
