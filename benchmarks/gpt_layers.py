"""What layers of a GPT take on devices that are described but not measured.

    blocks      four products with weights and two of attention at the device's rate for their
                sides, and what the ops between read and write at that of its memory
    bytes       of a block's activations: 34 s h + 5 a s^2 a sample (Korthikanti et al. 2022, §4),
                each of them written and read once in a pass; of its input 2 s h. Where heads are
                wider together than the model, 8 of the 34 s h are of their width
    weights     16 bytes a parameter with gradients and Adam's slots, 12 of them the slots and the
                weights that Adam updates (Rajbhandari et al. 2020, §3)
    backward    twice the forward pass: two products for each

with s of sequence, h of hidden size, a of heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from benchmarks.trials import BACKWARD, ENTRY_BYTES, GRADIENT_BYTES, SUMS
from tfpar.cluster.description import Cluster, Device
from tfpar.cost.op_compute import efficiency
from tfpar.planning.inter_op.three_d.cost_table import LayerCostTable, LayerType, Passes, ProfileKey


@dataclasses.dataclass(frozen=True)
class Gpt:
    """The sizes of a GPT.

    Attributes:
        head: width of a head; None: all of them together are as wide as the model.
    """

    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    head: int | None = None

    @property
    def inner(self) -> int:
        """The width of all heads together."""
        return self.hidden if self.head is None else self.heads * self.head

    @property
    def activations(self) -> float:
        """Bytes that a block keeps of a sample."""
        attention = 8 * self.length * self.inner + 5 * self.heads * self.length**2
        return attention + (7 + DENSE) * self.length * self.hidden


DENSE = 19
"""Bytes of a token that a block keeps of its dense layers, in units of the width of the model."""

GPT2 = Gpt(24, 1024, 16, 1024, 50_257)
"""GPT-2 with L = 24 and H = 1024 (auto3d, §5.1)."""

STORED_BYTES, SLOT_BYTES = 16, 12
OPS = 18
"""Of a block's forward pass: 6 products, 2 norms, 4 biases, 2 residual sums, GELU, softmax, mask
and dropout."""

ATTENTION, FEED_FORWARD = 4, 8
"""Weights of a block, in units of the square of its width."""

DTYPE = "float16"
TENSOR, MICROBATCHES = (1, 2, 4), (1, 2, 4, 8, 16, 32)


def gpt_table(
    cluster: Cluster,
    microbatches: Iterable[int] = MICROBATCHES,
    tensor: Iterable[int] = TENSOR,
    gpt: Gpt = GPT2,
) -> LayerCostTable:
    """The layers on every kind of device of a cluster."""
    cases = [
        (device, ProfileKey(device.name, degree, microbatch))
        for device in {device.name: device for device in cluster.devices}.values()
        for degree in tensor
        for microbatch in microbatches
    ]
    sent = gpt.length * gpt.hidden * ENTRY_BYTES
    words = gpt.vocabulary * gpt.hidden
    kinds = {
        "embedding": LayerType(
            {case: both(moved(device, case, 2 * sent)) for device, case in cases},
            sent_bytes=sent,
            input_bytes=0.0,
            **weights(words),
        ),
        "block": LayerType(
            {
                case: both(_block(gpt, device, case) + moved(device, case, 2 * gpt.activations))
                for device, case in cases
            },
            kept_bytes=gpt.activations,
            reduced_bytes=SUMS * sent,
            sent_bytes=sent,
            input_bytes=sent,
            **weights(ATTENTION * gpt.hidden * gpt.inner + FEED_FORWARD * gpt.hidden**2),
        ),
        "head": LayerType(
            {
                case: both(product(gpt, device, case, gpt.hidden, gpt.vocabulary / case.tensor))
                for device, case in cases
            },
            kept_bytes=gpt.length * gpt.vocabulary * ENTRY_BYTES,
            input_bytes=sent,
            **weights(words),
        ),
    }
    return LayerCostTable(kinds, ("embedding", *["block"] * gpt.layers, "head"))


def weights(parameters: float) -> dict[str, float]:
    """The fields of a layer with these weights."""
    return {
        "fixed_bytes": parameters * STORED_BYTES,
        "slot_bytes": parameters * SLOT_BYTES,
        "gradient_bytes": parameters * GRADIENT_BYTES,
        "weight_bytes": parameters * ENTRY_BYTES,
    }


def both(forward: float) -> Passes:
    """Seconds of both passes."""
    return Passes(forward, BACKWARD * forward)


def _block(gpt: Gpt, device: Device, case: ProfileKey) -> float:
    wide = 4 * gpt.hidden / case.tensor
    dense = product(gpt, device, case, gpt.hidden, wide) + product(
        gpt, device, case, wide, gpt.hidden
    )
    return OPS * device.launch_s + attention(gpt, device, case) + dense


def attention(gpt: Gpt, device: Device, case: ProfileKey) -> float:
    """Seconds of a block's first half: its four products, and those of queries, keys and values."""
    hidden, part = gpt.hidden, gpt.inner / case.tensor
    projections = product(gpt, device, case, hidden, 3 * part) + product(
        gpt, device, case, part, hidden
    )
    scores = 2 * 2 * case.microbatch * gpt.length**2 * part / device.flops_of(DTYPE)
    return projections + scores


def product(gpt: Gpt, device: Device, case: ProfileKey, depth: float, columns: float) -> float:
    """Of all tokens of a microbatch with a matrix of depth x columns."""
    return product_of_rows(device, case.microbatch * gpt.length, depth, columns)


def product_of_rows(device: Device, rows: float, depth: float, columns: float) -> float:
    """Of so many tokens."""
    sides = (round(rows), round(columns), round(depth))
    rate = device.flops_of(DTYPE) * efficiency(sides, device.half_size)
    return 2 * rows * columns * depth / rate


def moved(device: Device, case: ProfileKey, num_bytes: float) -> float:
    """Of a sample, in the memory of the ranks that share it."""
    return case.microbatch * num_bytes / case.tensor / device.memory_bandwidth
