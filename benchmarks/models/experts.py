"""Mixtures of experts."""

from __future__ import annotations

import math

import keras
from keras import layers, ops


class Router(layers.Layer):
    """Sends each token to `top_k` experts that have places left (GShard: Lepikhin et al., 2020).

    The result holds the gate of each token at its place in each of its experts,
    `[groups, tokens, experts, capacity]`; it is zero for a token that finds no place. The
    sequences of a batch are the groups. It is in 32 bits, whatever the policy: places are counted.
    """

    def __init__(
        self,
        experts: int,
        top_k: int = 1,
        capacity_factor: float = 1.25,
        balance: float = 0.01,
        **kwargs,
    ) -> None:
        super().__init__(dtype="float32", **kwargs)
        self.experts = experts
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.balance = balance

    def build(self, x_shape) -> None:
        self.kernel = self.add_weight((x_shape[-1], self.experts), name="kernel")
        places = self.capacity_factor * x_shape[1] * self.top_k
        self.capacity = math.ceil(places / self.experts)

    def call(self, x):
        gates = ops.softmax(ops.matmul(x, self.kernel))
        left, taken, combine = gates, 0.0, 0.0
        for k in range(self.top_k):
            chosen = ops.one_hot(ops.argmax(left, axis=-1), self.experts, dtype=gates.dtype)
            if k == 0:
                self.add_loss(self.balance * self._imbalance(gates, chosen))
            before = ops.cumsum(chosen, axis=1) - chosen + taken
            taken = taken + ops.sum(chosen, axis=1, keepdims=True)
            place = ops.cast(ops.sum(before * chosen, axis=-1), "int32")
            # No place is beyond the capacity: such a row is all zeros.
            place = ops.one_hot(place, self.capacity, dtype=gates.dtype)
            combine = combine + ops.einsum("bte,btc->btec", gates * chosen, place)
            left = left * (1.0 - chosen)
        return combine

    def _imbalance(self, gates, chosen):
        """1 where all experts get the same share of the tokens, more elsewhere."""
        shares = ops.mean(gates, axis=1) * ops.mean(chosen, axis=1)
        return self.experts * ops.mean(ops.sum(shares, axis=-1))


class MoE(layers.Layer):
    """A feed-forward layer of experts, `wi` and `wo` without bias."""

    def __init__(
        self, inner: int, experts: int, *, top_k: int = 1, activation: str = "relu", **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.inner = inner
        self.experts = experts
        self.router = Router(experts, top_k, name="router")
        self.activation = keras.activations.get(activation)

    def build(self, x_shape) -> None:
        hidden = x_shape[-1]
        self.router.build(x_shape)
        initializer = keras.initializers.VarianceScaling(1.0, "fan_in", "truncated_normal")
        self.wi = self.add_weight(
            (self.experts, hidden, self.inner), initializer=initializer, name="wi"
        )
        self.wo = self.add_weight(
            (self.experts, self.inner, hidden), initializer=initializer, name="wo"
        )

    def call(self, x):
        combine = ops.cast(self.router(x), x.dtype)
        dispatch = ops.cast(combine > 0, x.dtype)
        h = ops.einsum("btec,btd->becd", dispatch, x)
        h = self.activation(ops.einsum("becd,edf->becf", h, self.wi))
        h = ops.einsum("becf,efd->becd", h, self.wo)
        return ops.einsum("btec,becd->btd", combine, h)

    def compute_output_shape(self, x_shape):
        return x_shape
