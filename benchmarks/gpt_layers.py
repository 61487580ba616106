"""What layers of a GPT take on devices that are described but not measured.

    blocks      four products with weights and two of attention at the device's rate for their
                sides, and what the ops between read and write at that of its memory
    bytes       of a block's activations: 34 s h + 5 a s^2 a sample (Korthikanti et al. 2022, §4),
                each of them written and read once in a pass; of its input 2 s h
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
from tfpar.cost.work import efficiency
from tfpar.search.three_d.table import Case, LayerKind, LayerTable, Passes


@dataclasses.dataclass(frozen=True)
class Gpt:
    """The sizes of a GPT."""

    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int

    @property
    def activations(self) -> float:
        """Bytes that a block keeps of a sample."""
        return 34 * self.length * self.hidden + 5 * self.heads * self.length**2


GPT2 = Gpt(24, 1024, 16, 1024, 50_257)
"""GPT-2 with L = 24 and H = 1024 (auto3d, §5.1)."""

STORED_BYTES, SLOT_BYTES = 16, 12
OPS = 18
"""Of a block's forward pass: 6 products, 2 norms, 4 biases, 2 residual sums, GELU, softmax, mask
and dropout."""

DTYPE = "float16"
TENSOR, MICROBATCHES = (1, 2, 4), (1, 2, 4, 8, 16, 32)


def gpt_table(
    cluster: Cluster,
    microbatches: Iterable[int] = MICROBATCHES,
    tensor: Iterable[int] = TENSOR,
    gpt: Gpt = GPT2,
) -> LayerTable:
    """The layers on every kind of device of a cluster."""
    cases = [
        (device, Case(device.name, degree, microbatch))
        for device in {device.name: device for device in cluster.devices}.values()
        for degree in tensor
        for microbatch in microbatches
    ]
    sent = gpt.length * gpt.hidden * ENTRY_BYTES
    words = gpt.vocabulary * gpt.hidden
    kinds = {
        "embedding": LayerKind(
            {case: _both(_moved(device, case, 2 * sent)) for device, case in cases},
            sent_bytes=sent,
            input_bytes=0.0,
            **_weights(words),
        ),
        "block": LayerKind(
            {
                case: _both(_block(gpt, device, case) + _moved(device, case, 2 * gpt.activations))
                for device, case in cases
            },
            kept_bytes=gpt.activations,
            reduced_bytes=SUMS * sent,
            sent_bytes=sent,
            input_bytes=sent,
            **_weights(12 * gpt.hidden**2),
        ),
        "head": LayerKind(
            {
                case: _both(_product(gpt, device, case, gpt.hidden, gpt.vocabulary / case.tensor))
                for device, case in cases
            },
            kept_bytes=gpt.length * gpt.vocabulary * ENTRY_BYTES,
            input_bytes=sent,
            **_weights(words),
        ),
    }
    return LayerTable(kinds, ("embedding", *["block"] * gpt.layers, "head"))


def _weights(parameters: float) -> dict[str, float]:
    return {
        "fixed_bytes": parameters * STORED_BYTES,
        "slot_bytes": parameters * SLOT_BYTES,
        "gradient_bytes": parameters * GRADIENT_BYTES,
        "weight_bytes": parameters * ENTRY_BYTES,
    }


def _both(forward: float) -> Passes:
    return Passes(forward, BACKWARD * forward)


def _block(gpt: Gpt, device: Device, case: Case) -> float:
    hidden, part = gpt.hidden, gpt.hidden / case.tensor
    products = ((hidden, 3 * part), (part, hidden), (hidden, 4 * part), (4 * part, hidden))
    dense = sum(_product(gpt, device, case, depth, columns) for depth, columns in products)
    attention = 2 * 2 * case.microbatch * gpt.length**2 * part / device.flops_of(DTYPE)
    return OPS * device.launch_s + dense + attention


def _product(gpt: Gpt, device: Device, case: Case, depth: float, columns: float) -> float:
    """Of all tokens of a microbatch with a matrix of depth x columns."""
    rows = case.microbatch * gpt.length
    sides = (rows, round(columns), round(depth))
    rate = device.flops_of(DTYPE) * efficiency(sides, device.half_size)
    return 2 * rows * columns * depth / rate


def _moved(device: Device, case: Case, num_bytes: float) -> float:
    """Of a sample, in the memory of the ranks that share it."""
    return case.microbatch * num_bytes / case.tensor / device.memory_bandwidth
