"""Microbatches: a rank computes its part of the batch in pieces, and holds the activations of one.

A microbatch is a rank along one more mesh axis that lies within a rank, as a chunk is
(`rewrite.chunks`), but run as a function that is called once for each: the program does not grow
with their number, and what one call computed is gone before the next begins. What they are summed
over, as the gradients of weights, is added up from call to call and exists once:

    sums = zeros                                      (sums of gradients, losses, metrics)
    for each microbatch: sums = task(block of the batch, weights, sums)
    all-reduce the sums over ranks; update            (once)

That is gradient accumulation, with the numbers of the whole batch: propagation has settled how
losses, masks, draws and padding lie along the axis. `rewrite.rounds` says what runs when.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tfpar.ir.builder import GraphBuilder, neutral
from tfpar.ir.graph import FunctionRef, Graph, Op, Tensor, is_floating, itemsize
from tfpar.ir.traits import CONSTANTS
from tfpar.propagation.partitioned import Anchors, PartitionedGraph
from tfpar.rewrite.chunks import cut_in_parts, sum_before_scattering
from tfpar.rewrite.local_graph import TASK, LocalProgram, build_local_program
from tfpar.rewrite.part_bodies import of_part
from tfpar.rewrite.rounds import Rounds, rounds_of
from tfpar.rewrite.within_rank import COMBINE, WithinRank, is_narrowed


def build_microbatched_program(
    partitioned: PartitionedGraph, anchors: Anchors, batched: Collection[Tensor], microbatches: int
) -> LocalProgram:
    """The program of a partitioned graph with the batch in microbatches.

    Variables lie as without, and inputs are fed alike.

    Args:
        partitioned: the graph without microbatches, from `anchors`.
        batched: the inputs of which each microbatch gets a part.

    Raises:
        CannotRepeat: names an op whose effect would come once for each microbatch.
    """
    laid = cut_in_parts(partitioned, anchors, batched, microbatches)
    return run_microbatches(build_local_program(laid))


def run_microbatches(program: LocalProgram) -> LocalProgram:
    """The program for the mesh without its last axis, whose ranks are microbatches within a rank.

    Raises:
        CannotRepeat: names an op with an effect that would come once for each microbatch.
    """
    sum_before_scattering(program.graph, (program.mesh.num_axes - 1,))
    writer = _Writer(program)
    for done in range(writer.rounds.count + 1):
        if done:
            writer.write_round(done)
        for op in program.graph.ops:
            if writer.rounds.once.get(op) == done:
                writer.write_once(op)
    return writer.finish([writer.ops[op][-1] for op in program.graph.effects])


class _Writer(WithinRank):
    """Writes what runs once as ops, and each round as a function with its calls."""

    def __init__(self, program: LocalProgram) -> None:
        super().__init__(program)
        self.rounds: Rounds = rounds_of(program, self.repetition)
        self._sums: dict[tuple[Tensor, str], Tensor] = {}
        self._readers: dict[Tensor, list[Op]] = program.graph.consumers()
        self._returned = set(program.graph.outputs)

    def combined(self, tensor: Tensor, reduction: str) -> Tensor:
        """What has been added up from call to call, where it was."""
        summed = self._sums.get((tensor, reduction))
        return super().combined(tensor, reduction) if summed is None else summed

    def write_once(self, op: Op) -> None:
        """Emit an op that runs once for all microbatches."""
        self.build.name = op.name
        if op.type == "Placeholder":
            self.write_source(op)
        elif self.meets(op):
            self.write_crossing(op)
        elif op.type == "RankConst":
            made = [
                self.build.per_rank(of_part(op, part, self.parts), op.outputs[0].dtype)
                for part in range(self.parts)
            ]
            self.tensors[op.outputs[0]] = made
            self.ops[op] = [tensor.op for tensor in made]
        else:
            outputs = [(t.shape, t.dtype) for t in op.outputs]
            inputs = [self.tensors[t][0] for t in op.inputs]
            attrs = self.repetition.bodies.attrs(op, 0)
            clone = self.build.emit(op.type, inputs, outputs, attrs, op.name, stateful=op.stateful)
            if op.type not in CONSTANTS:
                clone.control = list(dict.fromkeys(self.ops[c][-1] for c in op.control))
            self.ops[op] = [clone] * self.parts
            for old, new in zip(op.outputs, clone.outputs, strict=True):
                self.tensors[old] = [new] * self.parts

    def write_round(self, number: int) -> None:
        """Emit the calls of a round, one for each microbatch, one behind the other."""
        ops = [op for op, of in self.rounds.each.items() if of == number]
        differ = any(self.repetition.bodies.differ(op) for op in ops)
        outside = dict.fromkeys(c for op in ops for c in op.control if c in self.rounds.once)
        task = self._task(number, ops, 0)
        carried = [self._start(key) for key in task.summed]
        calls: list[Op] = []
        for part in range(self.parts):
            if part and differ:
                task = self._task(number, ops, part)
            inputs = [self.tensors[t][part] for t in task.read] + carried
            made = [*task.made, *task.sums]
            call = self.build.emit(
                TASK,
                inputs,
                [(t.shape, t.dtype) for t in made],
                {
                    "body": task.name,
                    "carried": task.carried,
                },
                name=f"round{number}/microbatch{part}",
                control=[*calls[-1:], *(self.ops[c][-1] for c in outside)],
                stateful=True,
            )
            carried = call.outputs[len(task.made) :]
            calls.append(call)
        self.ops.update(dict.fromkeys(ops, calls))
        for i, tensor in enumerate(task.made):
            self.tensors[tensor] = [call.outputs[i] for call in calls]
        self._sums.update(zip(task.summed, carried, strict=True))

    def _start(self, key: tuple[Tensor, str]) -> Tensor:
        """What a sum begins with."""
        tensor, reduction = key
        dtype = _summed_as(_operand(tensor))
        self.build.name = f"{tensor.op.name}/sum"
        value = self.build.const(neutral(reduction, dtype), dtype)
        return self.build.fill(tensor.shape, value)

    def _task(self, number: int, ops: Sequence[Op], part: int) -> _Task:
        """The function of a round: what it does for microbatch `part`, and all like it."""
        name = FunctionRef(f"round{number}" if not part else f"round{number}_part{part}")
        functions = self.build.graph.functions
        task = _Task(name, GraphBuilder(Graph(functions=functions)))
        inside = set(ops)
        for op in ops:
            task.copy(op, self.repetition.bodies.attrs(op, part), inside)
        for tensor in [t for op in ops for t in op.outputs]:
            readers = [r for r in self._readers.get(tensor, ()) if r not in inside]
            sums = {r.attrs["reduction"] for r in readers if self._is_summed(r, tensor)}
            for reduction in sorted(sums):
                task.add_up(tensor, reduction)
            if tensor in self._returned or any(not self._is_summed(r, tensor) for r in readers):
                task.made.append(tensor)
        task.finish([op for op in self.program.graph.effects if op in inside])
        functions[name] = task.build.graph
        return task

    def _is_summed(self, op: Op, tensor: Tensor) -> bool:
        """Whether `op` takes of `tensor` only what all microbatches come to."""
        return self.meets(op) and op.type in ("AllReduce", "ReduceScatter") and tensor.is_static


class _Task:
    """The function of one round.

    Attributes:
        read: the program's tensors that it is given, in the order of its arguments; behind them
            come the sums so far.
        made: those that it returns; behind them come the sums.
        summed: what is added up, and how.
        sums: the sums in its body.
    """

    def __init__(self, name: FunctionRef, build: GraphBuilder) -> None:
        self.name = name
        self.build = build
        self.read: list[Tensor] = []
        self.made: list[Tensor] = []
        self.summed: list[tuple[Tensor, str]] = []
        self.sums: list[Tensor] = []
        self._tensors: dict[Tensor, Tensor] = {}
        self._ops: dict[Op, Op] = {}

    @property
    def carried(self) -> tuple[tuple[int, int], ...]:
        """Where the sums are among the arguments, and among the results."""
        first, made = len(self.read), len(self.made)
        return tuple((first + i, made + i) for i in range(len(self.sums)))

    def copy(self, op: Op, attrs: dict[str, Any], inside: Collection[Op]) -> None:
        """Add an op of the round."""
        clone = self.build.emit(
            op.type,
            [self._local(t, inside) for t in op.inputs],
            [(t.shape, t.dtype) for t in op.outputs],
            attrs,
            op.name,
            [self._ops[c] for c in op.control if c in self._ops],
            op.stateful,
        )
        self._ops[op] = clone
        self._tensors.update(zip(op.outputs, clone.outputs, strict=True))

    def _local(self, tensor: Tensor, inside: Collection[Op]) -> Tensor:
        """`tensor` in the body: computed there, written there, or an argument."""
        if tensor not in self._tensors and tensor.op.type == "Const":
            self.copy(tensor.op, tensor.op.attrs, inside)
        elif tensor not in self._tensors:
            self.read.append(tensor)
            name = f"{tensor.op.name}/given{tensor.index}"
            self._tensors[tensor] = self.build.placeholder(tensor, name)
        return self._tensors[tensor]

    def add_up(self, tensor: Tensor, reduction: str) -> None:
        """Return the sum so far with `tensor` added to it."""
        operand = _operand(self._tensors[tensor])
        self.build.name = f"{tensor.op.name}/sum"
        operand = self.build.cast(operand, _summed_as(operand))
        attrs = {"dtype": operand.dtype}
        so_far = self.build.one("Placeholder", (), operand.shape, operand.dtype, attrs)
        self.summed.append((tensor, reduction))
        self.sums.append(self.build.binary(COMBINE[reduction], so_far, operand))

    def finish(self, effects: Sequence[Op]) -> None:
        """Say what the body takes and gives."""
        graph = self.build.graph
        graph.inputs += [t.op.inputs[0] for t in self.sums]
        graph.outputs = [*(self._tensors[t] for t in self.made), *self.sums]
        graph.effects = [self._ops[op] for op in effects]


def _operand(tensor: Tensor) -> Tensor:
    """What is added up for `tensor`: as it was before it was narrowed to be carried."""
    return tensor.op.inputs[0] if is_narrowed(tensor) else tensor


def _summed_as(tensor: Tensor) -> str:
    """The dtype of a sum: many terms in 16 bits would lose what one product's sum keeps."""
    short = is_floating(tensor.dtype) and itemsize(tensor.dtype) < 4
    return "float32" if short else tensor.dtype
