"""Microbatches: a rank computes its part of the batch in pieces, and holds the activations of one.

A microbatch is a rank along one more mesh axis within a rank, as a chunk is
(`compile.local.chunks`), but run as a function that is called once for each: the program does not
grow with their number, and what one call computed is gone before the next begins. What they are
summed over, as the gradients of weights, is added up from call to call and exists once:

    sums = zeros                                      (sums of gradients, losses, metrics)
    for each microbatch: sums = task(block of the batch, weights, sums)
    all-reduce the sums over ranks; update            (once)

That is gradient accumulation, with the numbers of the whole batch: propagation has decided how
losses, masks, draws and padding are split along the axis. The order of ops is that of
`compile.local.microbatch_rounds`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tfpar.compile.local.chunks import sum_before_scattering
from tfpar.compile.local.local_graph import TASK, LocalProgram, StagePass, build_local_program
from tfpar.compile.local.microbatch_rounds import MicrobatchRounds, schedule_rounds
from tfpar.compile.local.microbatch_statistics import use_ghost_batches
from tfpar.compile.local.rank_local_axis import (
    COMBINE,
    RankLocalAxis,
    constant_of_sub_batch,
    is_narrowed,
)
from tfpar.compile.local.round_tasks import RoundTasks, TaskKey
from tfpar.compile.local.stage_split import PipelineLowering, send_in_slices, write_in_stages
from tfpar.ir.builder import GraphBuilder, neutral
from tfpar.ir.gathered_weights import is_scattered_gradient
from tfpar.ir.graph import FunctionRef, Graph, Op, Tensor, is_floating, itemsize
from tfpar.ir.roles import Roles
from tfpar.ir.traits import CONSTANTS, HANDED_ON
from tfpar.pipeline import Schedule
from tfpar.pipeline.generators import generate
from tfpar.pipeline.recompute import RecomputeOf, recomputes
from tfpar.pipeline.tasks import Task
from tfpar.propagation.partitioned_graph import PartitionedGraph


def build_microbatched_program(
    laid: PartitionedGraph,
    stages: PipelineLowering | None = None,
    statistics: Roles | None = None,
) -> LocalProgram:
    """Build the program of a step whose batch is in microbatches.

    Variables and inputs have the same specs as without.

    Args:
        laid: the step with the axis of the microbatches (`chunks.split_batch`).
        stages: in which the step runs, if there are several.
        statistics: the roles of the graph's ops, if normalisations take the statistics of one
            microbatch (`compile.local.microbatch_statistics`); None: those of the whole batch.

    Raises:
        NotRepeatableError: names an op whose effect would come once for each microbatch.
        TfparError: what is made of statistics cannot be averaged over microbatches.
    """
    program = write_in_stages(laid, stages) if stages else build_local_program(laid)
    if statistics is not None:
        use_ghost_batches(program, statistics)
    if stages is None:
        return run_microbatches(program)
    send_in_slices(program, stages)  # statistics, too, if they are now those of a microbatch
    return run_microbatches(program, stages.schedule, stages.recompute)


def run_microbatches(
    program: LocalProgram, schedule: Schedule | None = None, recompute: RecomputeOf = False
) -> LocalProgram:
    """Return the program for the mesh without its last axis, whose ranks are microbatches within a
    rank.

    Args:
        schedule: of a program in stages; by default it has one.
        recompute: the stages whose backward pass runs their forward pass again, and keeps of it
            only what that read.

    Raises:
        NotRepeatableError: names an op with an effect that would come once for each microbatch.
    """
    axes = (program.mesh.num_axes - 1,)
    sum_before_scattering(program.graph, axes, _sums_of_parts(program.graph))
    schedule = schedule or generate("1f1b", 1, program.mesh.shape[-1])
    writer = _Writer(program, schedule, recompute)
    for done in range(writer.rounds.count + 1):
        if done:
            writer.write_round(done)
        for op in program.graph.ops:
            if writer.rounds.once.get(op) == done:
                writer.write_once(op)
    return writer.finish([writer.ops[op][-1] for op in program.graph.effects])


def _sums_of_parts(graph: Graph) -> set[Tensor]:
    """Return the sums over microbatches of gradients of which ranks store a part each."""
    found = set()
    for op in filter(is_scattered_gradient, graph.ops):
        (total,) = op.inputs
        while total.op.type in HANDED_ON:
            total = total.op.inputs[0]
        found.add(total)
    return found


class _Writer(RankLocalAxis):
    """Writes what runs once as ops, and each round as functions with their calls."""

    def __init__(self, program: LocalProgram, schedule: Schedule, recompute: RecomputeOf) -> None:
        super().__init__(program)
        self.rounds: MicrobatchRounds = schedule_rounds(program, self.repetition)
        self._schedule = schedule
        self._recompute = recompute
        self._sums: dict[tuple[Tensor, str], Tensor] = {}
        self._repeats: dict[Op, list[Op]] = {}  # of what runs again, the last calls that do it
        self._readers: dict[Tensor, list[Op]] = program.graph.consumers()
        self._returned = set(program.graph.outputs)

    def combined(self, tensor: Tensor, reduction: str) -> Tensor:
        """Return the value that was accumulated from call to call, if it was; else combine the
        parts."""
        summed = self._sums.get((tensor, reduction))
        return super().combined(tensor, reduction) if summed is None else summed

    def write_once(self, op: Op) -> None:
        """Emit an op that runs once for all microbatches."""
        self.build.name = op.name
        first = len(self.build.graph.ops)
        if op.type == "Placeholder":
            self.write_source(op)
        elif self.meets(op):
            self.write_crossing(op)
        elif op.type == "RankConst":
            made = [
                self.build.per_rank(
                    constant_of_sub_batch(op, part, self.parts), op.outputs[0].dtype
                )
                for part in range(self.parts)
            ]
            self.tensors[op.outputs[0]] = made
            self.ops[op] = [tensor.op for tensor in made]
        else:
            outputs = [(t.shape, t.dtype) for t in op.outputs]
            inputs = [self.tensors[t][0] for t in op.inputs]
            attrs = self.repetition.bodies.attrs(op, 0)
            control = self._ran(op.control)
            clone = self.build.emit(op.type, inputs, outputs, attrs, op.name, control, op.stateful)
            self.ops[op] = [clone] * self.parts
            for old, new in zip(op.outputs, clone.outputs, strict=True):
                self.tensors[old] = [new] * self.parts
        self._place(first, self.program.places.get(op))

    def _place(self, first: int, place: StagePass | None) -> None:
        """Assign the ops emitted from `first` on to `place`."""
        if place is not None:
            emitted = (op for op in self.build.graph.ops[first:] if op.type not in CONSTANTS)
            self.places.update(dict.fromkeys(emitted, place))

    def write_round(self, number: int) -> None:
        """Emit the calls of a round: each task of each microbatch, in the order of the schedule."""
        cut = RoundTasks(self.rounds, number, self.program, self._schedule, self._is_summed)
        bodies = [self._bodies(number, cut, 0)]
        if any(self.repetition.bodies.differ(op) for op in cut.key_of):
            bodies += [self._bodies(number, cut, part) for part in range(1, self.parts)]
        carried: dict[TaskKey, Sequence[Tensor]] = {}
        for key, body in bodies[0].items():
            first = len(self.build.graph.ops)
            carried[key] = [self._start(summed) for summed in body.summed]
            self._place(first, self._place_of(key))
        ops = {op: [op] * self.parts for op in cut.key_of}
        made = {t: [t] * self.parts for body in bodies[0].values() for t in body.made}
        self.ops.update(ops)  # what calls read is put in the place of these, one by one
        self.tensors.update(made)
        last: dict[int, Op] = {}  # call of each actor
        for task in cut.in_order({key: body.read for key, body in bodies[0].items()}):
            key, actor = TaskKey(task.kind, task.stage), self._schedule.actors[task.stage]
            body = bodies[task.micro % len(bodies)][key]
            control = self._awaited(cut.members[key], last.get(actor))
            last[actor] = call = self._call(number, task, body, carried[key], control)
            carried[key] = call.outputs[len(body.made) :]
            for op in cut.members[key]:
                ops[op][task.micro] = call
            for tensor, output in zip(body.made, call.outputs, strict=False):
                made[tensor][task.micro] = output
        for key in bodies[0]:
            for op in self._again(cut, key):
                self._repeats.setdefault(op, []).append(last[self._schedule.actors[key.stage]])
        for key, body in bodies[0].items():
            self._sums.update(zip(body.summed, carried[key], strict=True))

    def _bodies(self, number: int, cut: RoundTasks, part: int) -> dict[TaskKey, TaskBody]:
        """The functions of a round: what they do for microbatch `part`, and all like it."""
        functions, bodies = self.build.graph.functions, {}
        suffix = f"_part{part}" if part else ""
        for key, ops in cut.members.items():
            own = f"_{key.kind}{key.stage}" if self.program.places else ""
            name = f"round{number}{own}{suffix}"
            bodies[key] = body = TaskBody(name, functions)
            for op in (*self._again(cut, key), *ops):
                body.copy(op, self.repetition.bodies.attrs(op, part))
        given = {t for body in bodies.values() for t in body.read}
        for key, body in bodies.items():
            for tensor in [t for op in cut.members[key] for t in op.outputs]:
                readers = [r for r in self._readers.get(tensor, ()) if r not in cut.key_of]
                sums = {r.attrs["reduction"] for r in readers if self._is_summed(r, tensor)}
                for reduction in sorted(sums):
                    body.add_up(tensor, reduction)
                whole = any(not self._is_summed(r, tensor) for r in readers)
                if whole or tensor in given or tensor in self._returned:
                    body.made.append(tensor)
            effects = [op for op in self.program.graph.effects if cut.key_of.get(op) == key]
            functions[body.name] = body.finish(effects)
        return bodies

    def _again(self, cut: RoundTasks, key: TaskKey) -> list[Op]:
        """Return the forward ops of its stage that a backward pass runs again, to read them."""
        if key.kind == "F" or not recomputes(self._recompute, key.stage):
            return []
        read = {t.op for op in cut.members[key] for t in op.inputs}
        again: list[Op] = []
        for op in reversed(cut.members.get(TaskKey("F", key.stage), ())):
            if op in read and not self.repetition.has_effects(op):
                again.append(op)
                read.update(t.op for t in op.inputs)
        return again[::-1]

    def _is_summed(self, op: Op, tensor: Tensor) -> bool:
        """Whether `op` takes of `tensor` only what all microbatches come to."""
        return self.meets(op) and op.type in ("AllReduce", "ReduceScatter") and tensor.is_static

    def _awaited(self, ops: Sequence[Op], before: Op | None) -> list[Op]:
        """Return the ops that a call of `ops` waits for: that `before` it on its ranks, and all
        they wait for."""
        outside = dict.fromkeys(c for op in ops for c in op.control if c in self.rounds.once)
        return [*([before] if before else []), *self._ran(outside)]

    def _ran(self, ops: Iterable[Op]) -> list[Op]:
        """Return the last op that runs each of `ops` of the program, and those that run it
        again."""
        return list(
            dict.fromkeys(o for op in ops for o in (self.ops[op][-1], *self._repeats.get(op, ())))
        )

    def _call(
        self,
        number: int,
        task: Task,
        body: TaskBody,
        carried: Sequence[Tensor],
        control: Sequence[Op],
    ) -> Op:
        """Emit the call of a task; that of a pipeline says which it is."""
        own = f"{task.kind}{task.stage}/" if self.program.places else ""
        said = {"task": str(task)} if self.program.places else {}
        call = self.build.emit(
            TASK,
            [*(self.tensors[t][task.micro] for t in body.read), *carried],
            [(t.shape, t.dtype) for t in (*body.made, *body.sums)],
            {"body": body.name, "carried": body.carried, **said},
            name=f"round{number}/{own}microbatch{task.micro}",
            control=control,
            stateful=True,
        )
        self._place(len(self.build.graph.ops) - 1, self._place_of(task))
        return call

    def _place_of(self, task: Task | TaskKey) -> StagePass | None:
        return StagePass(task.stage, task.kind != "F") if self.program.places else None

    def _start(self, summed: tuple[Tensor, str]) -> Tensor:
        """Emit the initial value of a sum."""
        tensor, reduction = summed
        dtype = sum_dtype(operand_of(tensor))
        self.build.name = f"{tensor.op.name}/sum"
        value = self.build.const(neutral(reduction, dtype), dtype)
        return self.build.fill(tensor.shape, value)


# --- The function of a task: what it is given, what it returns, and what it adds up ---


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
