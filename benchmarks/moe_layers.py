"""What layers of a mixture of experts take on devices that are described but not measured.

Every other block of a GPT has experts in place of its dense layers (GShard: Lepikhin et al. 2021;
GLaM: Du et al. 2022, §4); the rest is as in `benchmarks.gpt_layers`. Of such a block:

    experts     two products of each with the tokens that it gets, at the device's rate for their
                sides, but no faster than its weights are read from memory: few tokens for many
                experts take as long as many do. All experts get as many tokens, and no more
    router      a product with as many columns as there are experts; three more ops, beside it the
                choice, what sends tokens and what adds up what comes back
    bytes       19 s h of the activations for each expert of a token; tokens travel in 2 bytes an
                entry to each of their experts and back; tensor ranks sum one activation of
                attention, and what each expert of a token gives
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from benchmarks.gpt_layers import (
    ATTENTION,
    DENSE,
    FEED_FORWARD,
    OPS,
    Gpt,
    attention,
    both,
    gpt_table,
    moved,
    product,
    product_of_rows,
    weights,
)
from benchmarks.trials import ENTRY_BYTES
from tfpar.cluster.description import Cluster, Device
from tfpar.planning.inter_op.three_d.cost_table import (
    Experts,
    LayerCostTable,
    LayerType,
    ProfileKey,
)

ROUTER_OPS = 4


@dataclasses.dataclass(frozen=True)
class Moe:
    """The sizes of a model, of which every other block has experts.

    Attributes:
        gpt: what it is without experts.
        experts: of a block, each as large as the dense layers in whose place they are.
        chosen: experts of a token.
    """

    gpt: Gpt
    experts: int
    chosen: int

    @property
    def parameters(self) -> int:
        """Of the whole model, without biases and norms."""
        gpt, square = self.gpt, self.gpt.hidden**2
        blocks, sparse = gpt.layers, gpt.layers // 2
        attending = ATTENTION * gpt.hidden * gpt.inner
        dense = FEED_FORWARD * square * (blocks - sparse + sparse * self.experts)
        words = 2 * gpt.vocabulary * gpt.hidden
        return blocks * attending + dense + sparse * gpt.hidden * self.experts + words


GLAM = Moe(Gpt(64, 8192, 128, 1024, 256_000, head=128), experts=64, chosen=2)
"""GLaM 64B/64E (Du et al. 2022, Table 4), the largest of the paper."""


def moe_table(
    cluster: Cluster, microbatches: Iterable[int], tensor: Iterable[int], moe: Moe = GLAM
) -> LayerCostTable:
    """The layers on every kind of device of a cluster, experts over any power of two of copies."""
    microbatches, tensor = tuple(microbatches), tuple(tensor)
    table = gpt_table(cluster, microbatches, tensor, moe.gpt)
    gpt, kept = moe.gpt, _kept_bytes(moe)
    cases = [
        (device, ProfileKey(device.name, degree, microbatch, 2**power))
        for device in {device.name: device for device in cluster.devices}.values()
        for degree in tensor
        for microbatch in microbatches
        for power in range(moe.experts.bit_length())
        if moe.experts % 2**power == 0
    ]
    sent = gpt.length * gpt.hidden * ENTRY_BYTES
    experts = weights(moe.experts * FEED_FORWARD * gpt.hidden**2)
    beside = weights(gpt.hidden * (ATTENTION * gpt.inner + moe.experts))
    sparse = LayerType(
        {
            case: both(_block(moe, device, case) + moved(device, case, 2 * kept))
            for device, case in cases
        },
        kept_bytes=kept,
        reduced_bytes=(1 + moe.chosen) * sent,
        sent_bytes=sent,
        input_bytes=sent,
        experts=Experts(routed_bytes=moe.chosen * sent, **experts),
        **{name: experts[name] + beside[name] for name in experts},
    )
    blocks = ("block", "sparse") * (gpt.layers // 2)
    return LayerCostTable({**table.kinds, "sparse": sparse}, ("embedding", *blocks, "head"))


def _kept_bytes(moe: Moe) -> float:
    """Of a sample, of a block with experts."""
    gpt = moe.gpt
    return gpt.activations + (moe.chosen - 1) * DENSE * gpt.length * gpt.hidden


def _block(moe: Moe, device: Device, case: ProfileKey) -> float:
    gpt = moe.gpt
    router = product(gpt, device, case, gpt.hidden, moe.experts)
    own = moe.experts / case.experts
    rows = case.microbatch * gpt.length * moe.chosen / own
    wide = 4 * gpt.hidden / case.tensor
    computed = product_of_rows(device, rows, gpt.hidden, wide) + product_of_rows(
        device, rows, wide, gpt.hidden
    )
    read = 2 * gpt.hidden * wide * ENTRY_BYTES / device.memory_bandwidth
    ops = (OPS + ROUTER_OPS) * device.launch_s
    return ops + attention(gpt, device, case) + router + own * max(computed, read)
