"""Work of an op, from its rule and shapes, and of an update: FLOPs and bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from tfpar.cluster.description import Cluster
from tfpar.ir.attention import ATTENTION, ATTENTION_GRADIENT, Trees, is_causal
from tfpar.ir.graph import Op, Tensor
from tfpar.ir.passes.recompute import is_recomputed
from tfpar.ir.traits import BRANCHES, IN_FLIGHT, LOOPS, MATRIX_PRODUCTS
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.rules.rule import OpRule

# Position of the filter, and of the tensor with one entry per output pixel and channel (-1: the
# op's own output).
_CONVOLUTIONS = {
    "Conv2D": (1, -1),
    "Conv3D": (1, -1),
    "DepthwiseConv2dNative": (1, -1),
    "Conv2DBackpropInput": (1, 2),
    "Conv3DBackpropInputV2": (1, 2),
    "DepthwiseConv2dNativeBackpropInput": (1, 2),
}
_ATTENTION_PRODUCTS = {ATTENTION: (1, 1), ATTENTION_GRADIENT: (3, 2)}
_FILTER_GRADIENTS = {
    "Conv2DBackpropFilter",
    "Conv3DBackpropFilterV2",
    "DepthwiseConv2dNativeBackpropFilter",
}

_FUNCTIONS = dict.fromkeys(
    (
        "Exp",
        "Expm1",
        "Log",
        "Log1p",
        "Tanh",
        "Sigmoid",
        "Erf",
        "Erfc",
        "Softplus",
        "Elu",
        "Selu",
        "Sin",
        "Cos",
        "Tan",
        "Sinh",
        "Cosh",
        "Asin",
        "Acos",
        "Atan",
        "Softmax",
        "LogSoftmax",
    ),
    1,
) | {
    "Pow": 20,
    "SoftmaxCrossEntropyWithLogits": 8,
    "SparseSoftmaxCrossEntropyWithLogits": 8,
}
"""Cost of an op type for each entry of its largest output, in exponentials: measured with
TensorFlow's CPU kernels, of which some are not vectorized."""

_AS_SLOW = {
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), "MatMul"),
    **dict.fromkeys(("Mean", "Max", "Min", "Prod", "EuclideanNorm", "All", "Any"), "Sum"),
    **dict.fromkeys(("ArgMax", "ArgMin", "Cumsum", "Cumprod"), "Sum"),
    **dict.fromkeys(("Erf", "Erfinv"), "Erfc"),
    **dict.fromkeys(("SegmentSum", "ScatterNd", "TensorScatterAdd"), "UnsortedSegmentSum"),
    "LogSoftmax": "Softmax",
    "BroadcastTo": "Tile",
    "Select": "SelectV2",
    "ResourceGather": "GatherV2",
    "Softplus": "Log",
    "Log1p": "Log",
    "Expm1": "Exp",
}
"""Op types that are as fast as the one that is measured (`jobs.calibration.kernels`)."""


def flops(op: Op, rule: OpRule) -> float:
    """Count the floating-point operations of the whole op, if a matrix product, a convolution or an
    attention; else 0.

    Twice the size of the index space (a multiplication and an addition): of a product all
    factors, of a convolution the output's entries times the filter's entries for one output
    channel.
    """
    if op.type in MATRIX_PRODUCTS:
        return 2.0 * math.prod(rule.sizes)
    if op.type in _CONVOLUTIONS:
        weights, at = _CONVOLUTIONS[op.type]
        kernel = op.inputs[weights]
        pixels = op.outputs[0] if at < 0 else op.inputs[at]
        return _convolution(pixels.num_elements, kernel.shape, op.type)
    if op.type in _FILTER_GRADIENTS:
        return _convolution(op.inputs[2].num_elements, op.outputs[0].shape, op.type)
    if op.type in _ATTENTION_PRODUCTS:
        return _attention(op, *_ATTENTION_PRODUCTS[op.type])
    return 0.0


def _attention(op: Op, with_q: int, with_v: int) -> float:
    """Count those of an attention on blocks, at least: half of all where a mask is causal.

    Args:
        with_q, with_v: how many products of scores have as many features as q, and as v.
    """
    q, k, v, *_ = op.inputs
    *batch, rows, features = q.shape
    columns = k.shape[-2]
    causal = rows == columns and is_causal(Trees.of(op).scores, rows)
    scores: float = math.prod(batch) * rows * columns * (0.5 if causal else 1.0)
    multiplied: int = with_q * features + with_v * v.shape[-1]
    return 2.0 * scores * multiplied


def functions(op: Op) -> float:
    """Count the exponentials, logarithms and the like that the whole op evaluates, or that take as
    long."""
    each = _FUNCTIONS.get(op.type, 0)
    return float(each * max(t.num_elements for t in op.outputs)) if each else 0.0


def entries(op: Op, inputs: Sequence[float], outputs: Sequence[float]) -> float:
    """Count the entries that a rate of `Device.entries_per_s` is about, of the largest operand or
    result.

    Of a matrix product those of what its kernel has to bring into another order: a second operand
    that is read transposed, and what an Einsum permutes before and after it multiplies.

    Args:
        inputs, outputs: entries of each operand and result, on one rank.
    """
    if op.type not in MATRIX_PRODUCTS:
        return max((*inputs, *outputs), default=0.0)
    if op.type == "Einsum":
        sizes = (*inputs, *outputs)
        return math.fsum(sizes[i] for i in _permuted(_text(op.attrs["equation"])))
    transposed = op.attrs.get("transpose_b") or op.attrs.get("adj_y")
    return inputs[1] if transposed else 0.0


def rate_of(op_type: str, rates: Mapping[str, float]) -> float | None:
    """Look up the entries a second of ops of a type: as listed, or as ops that do the same are;
    else None."""
    return rates.get(op_type, rates.get(_AS_SLOW.get(op_type, "")))


@functools.lru_cache(maxsize=1024)
def _permuted(equation: str) -> tuple[int, ...]:
    """Find the operands (0, 1) and the result (2) of an Einsum of two operands that are permuted:
    those that are not batch dims, dims of their own and dims that are summed, one after another."""
    given, _, out = equation.replace(" ", "").replace("...", ".").partition("->")
    if given.count(",") != 1:
        return ()
    one, other = given.split(",")
    batch = "".join(c for c in one if c in other and c in out)
    summed = "".join(c for c in one if c in other and c not in out)
    own = ["".join(c for c in x if c not in y) for x, y in ((one, other), (other, one))]
    found = [
        i
        for i, (labels, free) in enumerate(zip((one, other), own, strict=True))
        if labels not in (batch + free + summed, batch + summed + free)
    ]
    return (*found, 2) if out != batch + own[0] + own[1] else tuple(found)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def sides(op: Op, rule: OpRule, sizes: Sequence[int]) -> tuple[int, int, int] | None:
    """Find rows, columns and depth of a matrix product with factors of these sizes; None for
    others."""
    if op.type not in MATRIX_PRODUCTS or len(rule.inputs) != 2:
        return None
    one, other, out = ({f for dim in dims for f in dim} for dims in (*rule.inputs, rule.outputs[0]))

    def size(factors: set[int]) -> int:
        return math.prod(sizes[f] for f in factors)

    return size((one & out) - other), size((other & out) - one), size((one & other) - out)


def efficiency(lengths: Sequence[int], half_size: float) -> float:
    """Estimate the part of its peak that a device reaches in a product of these sides.

    Each side counts as x / (x + half_size): short ones leave units idle (ATP §5.2 finds it when
    products are cut into chunks).
    """
    return math.prod(n / (n + half_size) for n in lengths)


def _convolution(pixels: int, kernel: tuple[int, ...], op_type: str) -> float:
    if not kernel:
        return 0.0
    channels = kernel[-1] if not op_type.startswith("Depthwise") else kernel[-1] * kernel[-2]
    return 2.0 * pixels * math.prod(kernel) / max(channels, 1)


def trips(op: Op) -> int:
    """Find how often the body of a loop runs, read off the lists that it walks; 1 for other ops."""
    if op.type not in LOOPS:
        return 1
    lengths = [t.shape[0] for t in (*op.inputs, *op.outputs) if _is_list(t)]
    return max((n for n in lengths if n), default=1)


def _is_list(tensor: Tensor) -> bool:
    return tensor.dtype == "variant" and bool(tensor.shape)


# --- update ---------------------------------------------------------------------------------
# What it costs where the graph holds only stand-ins for it. A plan is searched without tracing the
# optimizer (`ir.planning_graph`): all that is known of it is its *state ratio*, bytes of slots per
# byte of weight.

# What an optimizer moves per byte of weight: Keras's go op by op, and each op reads and writes
# whole arrays. Counted in their graphs: SGD 5, Adagrad 17, Lion 19, RMSprop 21, Adam 30, AdamW 37.
_PASSES, _PASSES_PER_SLOT = 5.0, 12.5

# The same where XLA fuses them (`ir.kernels`): SGD 3, Adagrad, Lion and RMSprop 7, Adam 12, AdamW
# 15.
_FUSED_PASSES, _FUSED_PASSES_PER_SLOT = 3.0, 4.5


def update_seconds(
    weight_bytes: float, state_ratio: float, cluster: Cluster, *, fused: bool = False
) -> float:
    """Price the reading and writing of gradients, weights and slots in an update.

    Args:
        fused: XLA compiles it.
    """
    passes = _PASSES + _PASSES_PER_SLOT * state_ratio
    if fused:
        passes = _FUSED_PASSES + _FUSED_PASSES_PER_SLOT * state_ratio
    return weight_bytes * passes / cluster.device.memory_bandwidth


def temporaries(trainable: bool, state_ratio: float | None, away: bool = False) -> float:
    """Count the tensors of a variable's size that its update has beside those that the graph shows.

    A weight's slots are computed side by side: while one is written, what another gets is there.
    Stand-ins show nothing: `lr * g` without slots, else what two slots get.

    Args:
        state_ratio: None where the graph holds the update itself.
        away: its slots lie in host memory: those of some weights are there in passing.
    """
    if state_ratio is None:
        return 0 if trainable or away else 1
    return (2 if state_ratio else 1) + (IN_FLIGHT * state_ratio if away else 0)


# --- FLOPs of a step, whatever runs it ------------------------------------------------------


def model_flops(partitioned: PartitionedGraph) -> Mapping[str, float]:
    """Count the floating-point operations of the matrix products and convolutions of a step on the
    whole batch, by dtype.

    What a plan computes again counts once, and what several ranks compute alike, too; a loop
    counts for each of its trips, where it is known how many there are, a branching as its longest
    branch.
    """
    found: dict[str, float] = {}
    for op, decision in partitioned.decisions.items():
        bodies = [model_flops(body) for body in decision.bodies.values()]
        if op.type in BRANCHES and bodies:
            bodies = [max(bodies, key=lambda work: sum(work.values()))]
        for work in bodies:
            for dtype, count in work.items():
                found[dtype] = found.get(dtype, 0.0) + trips(op) * count
        count = flops(op, partitioned.prepared.rules[op])
        if count and not is_recomputed(op):
            dtype = op.outputs[0].dtype
            found[dtype] = found.get(dtype, 0.0) + count
    return found
