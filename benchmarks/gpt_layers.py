"""What layers of a GPT take on devices that are described but not measured: auto3d's model (§5).

    blocks      four products with weights and two of attention at the device's rate for their
                sides, and what the ops between read and write at that of its memory
    bytes       of a block's activations: 34 s h + 5 a s^2 a sample (Korthikanti et al. 2022, §4),
                each of them written and read once in a pass
    weights     16 bytes a parameter with gradients and Adam's slots (Rajbhandari et al. 2020, §3)
    backward    twice the forward pass: two products for each

with s of sequence, h of hidden size, a of heads.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.trials import BACKWARD, ENTRY_BYTES, GRADIENT_BYTES, SUMS
from tfpar.cluster.description import Cluster, Device
from tfpar.cost.work import efficiency
from tfpar.search.three_d.table import Case, LayerKind, LayerTable, Passes

LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY = 24, 1024, 16, 1024, 50_257
"""GPT-2 with L = 24 and H = 1024 (auto3d, §5.1)."""

STORED_BYTES = 16
OPS = 18
"""Of a block's forward pass: 6 products, 2 norms, 4 biases, 2 residual sums, GELU, softmax, mask
and dropout."""

DTYPE = "float16"
TENSOR, MICROBATCHES = (1, 2, 4), (1, 2, 4, 8, 16, 32)


def gpt_table(cluster: Cluster, microbatches: Iterable[int] = MICROBATCHES) -> LayerTable:
    """The layers on every kind of device of a cluster."""
    cases = [
        (device, Case(device.name, tensor, microbatch))
        for device in {device.name: device for device in cluster.devices}.values()
        for tensor in TENSOR
        for microbatch in microbatches
    ]
    activations = (34 * LENGTH * HIDDEN) + 5 * HEADS * LENGTH**2
    sent = LENGTH * HIDDEN * ENTRY_BYTES
    block, words = 12 * HIDDEN**2, VOCABULARY * HIDDEN
    kinds = {
        "embedding": LayerKind(
            {case: _both(_moved(device, case, 2 * sent)) for device, case in cases},
            fixed_bytes=words * STORED_BYTES,
            gradient_bytes=words * GRADIENT_BYTES,
            sent_bytes=sent,
        ),
        "block": LayerKind(
            {
                case: _both(_block(device, case) + _moved(device, case, 2 * activations))
                for device, case in cases
            },
            fixed_bytes=block * STORED_BYTES,
            gradient_bytes=block * GRADIENT_BYTES,
            kept_bytes=activations,
            reduced_bytes=SUMS * sent,
            sent_bytes=sent,
        ),
        "head": LayerKind(
            {
                case: _both(_product(device, case, HIDDEN, VOCABULARY / case.tensor))
                for device, case in cases
            },
            fixed_bytes=words * STORED_BYTES,
            gradient_bytes=words * GRADIENT_BYTES,
            kept_bytes=LENGTH * VOCABULARY * ENTRY_BYTES,
        ),
    }
    return LayerTable(kinds, ("embedding", *["block"] * LAYERS, "head"))


def _both(forward: float) -> Passes:
    return Passes(forward, BACKWARD * forward)


def _block(device: Device, case: Case) -> float:
    part = HIDDEN / case.tensor
    products = ((HIDDEN, 3 * part), (part, HIDDEN), (HIDDEN, 4 * part), (4 * part, HIDDEN))
    dense = sum(_product(device, case, depth, columns) for depth, columns in products)
    attention = 2 * 2 * case.microbatch * LENGTH**2 * part / device.flops_of(DTYPE)
    return OPS * device.launch_s + dense + attention


def _product(device: Device, case: Case, depth: float, columns: float) -> float:
    """Of all tokens of a microbatch with a matrix of depth x columns."""
    rows = case.microbatch * LENGTH
    sides = (rows, round(columns), round(depth))
    rate = device.flops_of(DTYPE) * efficiency(sides, device.half_size)
    return 2 * rows * columns * depth / rate


def _moved(device: Device, case: Case, num_bytes: float) -> float:
    """Of a sample, in the memory of the ranks that share it."""
    return case.microbatch * num_bytes / case.tensor / device.memory_bandwidth
