"""Order: TopK, ArgMax, InTopK, running sums.

Batch dims split directly. Where the ordered dim is split, each rank orders its own block and
only the candidates meet. Ties go to the lowest index, as in the kernels.
"""

from __future__ import annotations

from tfpar.ir.builder import GraphBuilder, neutral
from tfpar.ir.constants import Constants
from tfpar.ir.graph import DType, Graph, Op, Tensor, is_floating
from tfpar.rules.pseudo import begin_decomposition, blocks, label_mask, take_last, whole
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule

# --- arg max -------------------------------------------------------------------------


@rule("ArgMax", "ArgMin")
def _arg_max(op: Op, constants: Constants) -> OpRule | None:
    axis = constants.value(op.inputs[1])
    if axis is None:
        return None
    rank = len(op.inputs[0].shape)
    at = int(axis) % rank
    names = ["n" if d == at else f"d{d}" for d in range(rank)]
    out = [n for n in names if n != "n"]
    expand = {}
    if op.inputs[0].dtype not in ("bool", "complex64", "complex128"):
        expand["n"] = lambda op, parts: _expand_arg_max(op, parts, at)
    return make_rule(op, f"{' '.join(names)} -> {' '.join(out)}", expand=expand)


def _expand_arg_max(op: Op, parts: int, at: int) -> Graph:
    """Of the blocks whose extreme is that of all, the first gives the index."""
    build, (x, _) = begin_decomposition(op)
    extreme = "Max" if op.type == "ArgMax" else "Min"
    fill = neutral(extreme.lower(), x.dtype)
    rank = len(x.shape)
    if at != rank - 1:
        x = build.transpose(x, [*range(at), *range(at + 1, rank), at])
    if is_floating(x.dtype):
        # NaN is never an extreme for the kernel.
        nan = build.one("IsNan", (x,), x.shape, "bool", {"T": DType(x.dtype)})
        x = build.select(nan, build.const(fill, x.dtype), x)
    view, starts, _ = blocks(build, x, parts, fill)
    best = build.reduce(extreme, view, [rank])
    attrs = {**op.attrs, "output_type": DType("int32"), "Tidx": DType("int32")}
    axis = build.const(rank, "int32")
    index = build.one(op.type, (view, axis), best.shape, "int32", attrs)
    index = build.binary("AddV2", index, starts)
    overall = build.reduce(extreme, best, [rank - 1], keep_dims=True)
    never = build.const(neutral("min", "int32"), "int32")
    index = build.select(build.binary("Equal", best, overall), index, never)
    index = build.reduce("Min", index, [rank - 1])
    build.graph.outputs = [build.cast(index, op.outputs[0].dtype)]
    return build.graph


# --- top k ---------------------------------------------------------------------------


@rule("TopKV2")
def _top_k(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "... n -> ... ., ... .", expand={"n": _expand_top_k})


@rule("NthElement")
def _nth_element(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "... . -> ...")


def _expand_top_k(op: Op, parts: int) -> Graph:
    """The best of every block's best."""
    build, (x, *_) = begin_decomposition(op)
    k = op.outputs[0].shape[-1]
    view, starts, counts = blocks(build, x, parts, neutral("max", x.dtype))
    block = view.shape[-1]
    values, index = _select(build, view, min(k, block), True)
    candidates = parts * min(k, block)
    flat = (*x.shape[:-1], candidates)
    column = (parts, 1)
    real = build.binary("Less", index, build.reshape(counts, column))
    index = build.binary("AddV2", index, build.reshape(starts, column))
    values, index, real = (whole(build, build.reshape(t, flat)) for t in (values, index, real))
    if x.shape[-1] % parts:
        # Padding must lose ties against real entries of later blocks.
        _, order = _select(build, build.cast(real, "int32"), candidates, True)
        values, index = take_last(build, values, order), take_last(build, index, order)
    values, order = _select(build, values, k, op.attrs.get("sorted", True))
    build.graph.outputs = [values, build.cast(take_last(build, index, order), op.outputs[1].dtype)]
    return build.graph


def _select(build: GraphBuilder, x: Tensor, k: int, in_order: bool) -> list[Tensor]:
    shape = (*x.shape[:-1], k)
    attrs = {
        "sorted": in_order,
        "T": DType(x.dtype),
        "Tk": DType("int32"),
        "index_type": DType("int32"),
    }
    inputs = (x, build.const(k, "int32"))
    return build.emit("TopKV2", inputs, [(shape, x.dtype), (shape, "int32")], attrs).outputs


# --- in top k ------------------------------------------------------------------------


@rule("InTopK", "InTopKV2")
def _in_top_k(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "b c, b -> b", expand={"c": _expand_in_top_k})


def _expand_in_top_k(op: Op, parts: int) -> Graph:
    """Whether fewer than k classes beat the target; never if it or a class is not finite."""
    build, (predictions, targets, *_) = begin_decomposition(op)
    dtype, last = predictions.dtype, [1]
    if len(op.inputs) == 3:
        k = build.graph.inputs[2]
    else:
        k = build.const(op.attrs["k"], "int32")
    mask = label_mask(build, targets, predictions)
    none = build.const(neutral("max", dtype), dtype)
    target = build.reduce("Max", build.select(mask, predictions, none), last, keep_dims=True)
    better = build.cast(build.binary("Greater", predictions, target), k.dtype)
    rank = build.reduce("Sum", better, last)
    finite = build.one("IsFinite", (predictions,), predictions.shape, "bool", {"T": DType(dtype)})
    known = build.binary(
        "LogicalAnd",
        build.binary("GreaterEqual", targets, build.const(0, targets.dtype)),
        build.binary("Less", targets, build.const(predictions.shape[1], targets.dtype)),
    )
    valid = build.binary("LogicalAnd", known, build.reduce("All", finite, last))
    build.graph.outputs = [build.binary("LogicalAnd", valid, build.binary("Less", rank, k))]
    return build.graph


# --- running sums --------------------------------------------------------------------


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _cumulative(op: Op, constants: Constants) -> OpRule | None:
    axis = constants.value(op.inputs[1])
    if axis is None:
        return None
    rank = len(op.inputs[0].shape)
    at = int(axis) % rank
    dims = " ".join("." if d == at else f"d{d}" for d in range(rank))
    linear = ((0,),) if op.type == "Cumsum" else ()
    return make_rule(op, f"{dims} -> {dims}", linear=linear)
