"""The function of a task: what it is given, what it returns, and what it adds up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpar.compile.local.rank_local_axis import COMBINE, is_narrowed
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import FunctionRef, Graph, Op, Tensor, is_floating, itemsize


class TaskBody:
    """A function that runs some ops of a program, for one microbatch.

    Attributes:
        read: the program's tensors that it is given, in the order of its arguments; behind them
            come the sums so far.
        made: those that it returns; behind them come the sums.
        summed: what is added up, and how.
        sums: the sums in its body.
    """

    def __init__(self, name: str, functions: dict[str, Graph]) -> None:
        self.name = FunctionRef(name)
        self.build = GraphBuilder(Graph(functions=functions))
        self.read: list[Tensor] = []
        self.made: list[Tensor] = []
        self.summed: list[tuple[Tensor, str]] = []
        self.sums: list[Tensor] = []
        self._tensors: dict[Tensor, Tensor] = {}
        self._ops: dict[Op, Op] = {}

    @property
    def carried(self) -> tuple[tuple[int, int], ...]:
        """Positions of each sum, among the arguments and among the results."""
        first, made = len(self.read), len(self.made)
        return tuple((first + i, made + i) for i in range(len(self.sums)))

    def copy(self, op: Op, attrs: dict[str, Any]) -> None:
        """Add an op of the program."""
        clone = self.build.emit(
            op.type,
            [self._local(t) for t in op.inputs],
            [(t.shape, t.dtype) for t in op.outputs],
            attrs,
            op.name,
            [self._ops[c] for c in op.control if c in self._ops],
            op.stateful,
        )
        self._ops[op] = clone
        self._tensors.update(zip(op.outputs, clone.outputs, strict=True))

    def _local(self, tensor: Tensor) -> Tensor:
        """`tensor` in the body: computed there, written there, or an argument."""
        if tensor not in self._tensors and tensor.op.type == "Const":
            self.copy(tensor.op, tensor.op.attrs)
        elif tensor not in self._tensors:
            self.read.append(tensor)
            name = f"{tensor.op.name}/given{tensor.index}"
            self._tensors[tensor] = self.build.placeholder(tensor, name)
        return self._tensors[tensor]

    def add_up(self, tensor: Tensor, reduction: str) -> None:
        """Return the sum so far with `tensor` added to it."""
        operand = operand_of(self._tensors[tensor])
        self.build.name = f"{tensor.op.name}/sum"
        operand = self.build.cast(operand, sum_dtype(operand))
        attrs = {"dtype": operand.dtype}
        so_far = self.build.one("Placeholder", (), operand.shape, operand.dtype, attrs)
        self.summed.append((tensor, reduction))
        self.sums.append(self.build.binary(COMBINE[reduction], so_far, operand))

    def finish(self, effects: Sequence[Op]) -> Graph:
        """Return the function; `effects` of the program are to run all the same."""
        graph = self.build.graph
        graph.inputs += [t.op.inputs[0] for t in self.sums]
        graph.outputs = [*(self._tensors[t] for t in self.made), *self.sums]
        graph.effects = [self._ops[op] for op in effects]
        return graph


def operand_of(tensor: Tensor) -> Tensor:
    """Return the tensor that is added up for `tensor`: as it was before it was narrowed to be
    carried."""
    return tensor.op.inputs[0] if is_narrowed(tensor) else tensor


def sum_dtype(tensor: Tensor) -> str:
    """Return the dtype of a sum: many terms in 16 bits would lose what one product's sum keeps."""
    short = is_floating(tensor.dtype) and itemsize(tensor.dtype) < 4
    return "float32" if short else tensor.dtype
