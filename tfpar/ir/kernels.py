"""Fusion of ops into kernels, as XLA does it where it compiles a step.

Op by op, each reads its operands from memory and writes its result there. Fused, a chain of
elementwise ops is one kernel: it starts once, reads what enters it once, and writes what leaves it.
Here is `relu(x @ w + b)`, and how often an array of the size of `x @ w` goes through memory:

    %xw = MatMul(%x, %w)     written                       written
    %s  = AddV2(%xw, %b)     read, written                 read
    %r  = Relu(%s)           read, written                 written

An op shares the kernel of those that read its result if these are in one kernel; if they are not,
the result is written. A reduction, or an assignment to a variable, ends the kernel of what it
reads. So do the passes of a step: what the forward pass keeps for the backward pass, or this for
the update, is in memory. Products, what gathers or scatters, loops and branches have kernels of
their own. (XLA fuses more in places: it computes what is cheap in several kernels, and fuses those
that read the same.) Fusion depends on the graph alone, not on a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.traits import (
    ASSIGNMENTS,
    ELEMENTWISE,
    ON_HOST,
    REDUCTIONS,
    REFERENCES,
    SIZES,
    VIEWS,
    forwarded_input,
)


class InKernel(NamedTuple):
    """The part that an op has in its kernel.

    Attributes:
        ends: whether the kernel ends with it, whose results are written; else they stay within.
        reads: the operands that it reads from memory, by position. It does not read what stays
            within, nor what an op of the kernel before it has read.
    """

    ends: bool
    reads: tuple[int, ...]


Kernels = Mapping[Op, InKernel]
"""The ops that XLA fuses; what others have is a kernel for each, or none."""

_FUSED = ELEMENTWISE | REDUCTIONS | ASSIGNMENTS
_WITHOUT_NUMBERS = REFERENCES | {"string"}


def kernels_of(
    graph: Graph, phase: Mapping[Op, int] | None = None, ends: Collection[Tensor] = ()
) -> dict[Op, InKernel]:
    """Return the kernels of a graph and of its functions.

    Args:
        phase: of the graph's ops: kernels do not go across phases. None: there is one.
        ends: tensors that are written whoever reads them, besides the graph's outputs.
    """
    found = _in_graph(graph, phase or {}, {*ends, *graph.outputs})
    for body in graph.functions.values():
        found.update(_in_graph(body, {}, set(body.outputs)))
    return found


def source(tensor: Tensor) -> Tensor:
    """Return the tensor of which `tensor` is a view, or itself."""
    while _is_view(tensor.op):
        tensor = forwarded_input(tensor)
    return tensor


def _in_graph(
    graph: Graph, phase: Mapping[Op, int], ends: Collection[Tensor]
) -> dict[Op, InKernel]:
    consumers = graph.consumers()
    last: dict[Op, Op] = {}  # the op that an op's kernel ends with
    for op in reversed(graph.ops):
        if _fuses(op):
            last[op] = op
            if op.type in ELEMENTWISE:
                kernels = {
                    None
                    if reader is None or phase.get(reader) != phase.get(op)
                    else last.get(reader)
                    for reader in _readers(op.outputs[0], consumers, ends)
                }
                if len(kernels) == 1:
                    last[op] = kernels.pop() or op
    read: set[tuple[Op, Tensor]] = set()
    found = {}
    for op in graph.ops:
        kernel = last.get(op)
        if kernel is None:
            continue
        reads = []
        for i, tensor in enumerate(op.inputs):
            entering = kernel, source(tensor)
            if tensor.dtype in REFERENCES:
                reads.append(i)
            elif last.get(entering[1].op) is not kernel and entering not in read:
                read.add(entering)
                reads.append(i)
        found[op] = InKernel(kernel is op, tuple(reads))
    return found


def _fuses(op: Op) -> bool:
    if op.type not in _FUSED or ON_HOST in op.attrs:
        return False
    return all(t.is_static and t.dtype not in _WITHOUT_NUMBERS for t in op.outputs)


def _is_view(op: Op) -> bool:
    """Whether an op is one that XLA does not see; one that waits for others is a barrier."""
    return op.type in VIEWS and not op.control


def _readers(
    tensor: Tensor, consumers: Mapping[Tensor, Sequence[Op]], ends: Collection[Tensor]
) -> Iterator[Op | None]:
    """Who reads a tensor or a view of it; None stands for whoever reads what is in `ends`."""
    if tensor in ends:
        yield None
    for reader in consumers.get(tensor, ()):
        if _is_view(reader):
            for view in reader.outputs:
                if forwarded_input(view) is tensor:
                    yield from _readers(view, consumers, ends)
        elif reader.type not in SIZES:
            yield reader
