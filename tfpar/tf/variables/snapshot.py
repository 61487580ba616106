"""Snapshots of variables, restored after steps that are not to count."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfpar.tf.variables.handles import plain_variable
from tfpar.tf.variables.parallel_variable import ParallelVariable
from tfpar.tf.variables.states import Sharded


class VariableSnapshot:
    """Snapshot, in host memory, of the shards that this process stores of variables.

    Where ranks are processes, each keeps and puts back its own shards, and waits for no other.

    Args:
        variables: of a program that is linked; one that it lays on no ranks it does not change.
    """

    def __init__(self, variables: Sequence[ParallelVariable]) -> None:
        self._kept: list[tuple[ParallelVariable, Sharded, dict[int, np.ndarray]]] = []
        for variable in variables:
            state = variable.state
            if isinstance(state, Sharded):
                values = {rank: shard.numpy() for rank, shard in state.stored.items()}
                self._kept.append((variable, state, values))

    def put_back(self) -> None:
        """Lay the variables as they were, with the values that they had."""
        with tf.init_scope():
            for variable, state, values in self._kept:
                variable.let_go()
                stored = {}
                for rank, value in values.items():
                    with tf.device(state.ranks.devices[rank]):
                        stored[rank] = plain_variable(tf.convert_to_tensor(value))
                variable.take(dataclasses.replace(state, stored=stored))
