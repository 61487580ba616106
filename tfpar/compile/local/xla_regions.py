"""Regions: what a rank computes between collectives, as functions that XLA compiles.

Whatever XLA cannot take, and what talks to other ranks, stays where it is and cuts the program.
Two ops may share a region if nothing between them is cut off. A region returns all its results at
once; so what a large collective carries is in another region than what follows it in the program,
which can then hide it.

Every op has a *turn*, three numbers: after which cut what it reads is there, how many large
collectives could have begun before it, and how often, since then, ranks that share a memory have
come back from what each computes for itself to what is computed once for all. Turns never fall
along an edge, and through a cut they rise. So the ops of one turn in which the same ranks differ
are a region, and regions cannot wait for each other in a circle. What a rank receives may be made
of all that it has sent before, so a `Recv` comes after the turns of every `Send` above it: no
circle goes through the programs of other ranks either.

Repeated blocks give equal regions, which are one function and compiled once.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from tfpar.compile.local.local_graph import TASK
from tfpar.compile.local.rank_dependence import DIFFERS, Axes
from tfpar.compile.local.reshard import COLLECTIVE_TYPES, ONCE
from tfpar.compile.local.transfers import TRANSFER_TYPES
from tfpar.compile.local.xla_lists import (
    can_compile_lists,
    has_list,
    is_list_maker,
    lists_in_pieces,
)
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import DType, FunctionRef, Graph, Op, Shape, Tensor, freeze, walk_functions
from tfpar.ir.order import sort_topologically
from tfpar.ir.traits import (
    ASSIGNMENTS,
    FREE,
    KEYED_DRAWS,
    ON_HOST,
    OPTIMIZERS,
    REGIONS,
    SCATTERS,
    SOURCES,
    SPARSE_OPTIMIZERS,
    TRACELESS,
    VARIABLE_READS,
)

Compiles = Callable[[Op], bool]
"""Whether XLA has a kernel for an op, whatever its bodies hold."""

MUST_COMPILE = "_XlaMustCompile"
"""The attribute by which TensorFlow knows a call that XLA compiles."""

_EFFECTS_TAKEN = (
    VARIABLE_READS | ASSIGNMENTS | OPTIMIZERS | SPARSE_OPTIMIZERS | SCATTERS | REGIONS | KEYED_DRAWS
)
"""Of the op types that are marked stateful, those that do to variables alone what they do."""

_FEWEST = 4
"""Ops that compute; fewer are not worth a call. As TensorFlow's own clustering has it."""

_LARGE = 2**20
"""Bytes that a collective moves, from which on it is worth being hidden (a guess)."""

_SMALL = 2**16
"""Bytes of results, up to which an op may be computed later than it could be (a guess)."""

_Turn = tuple[int, int, int]


def compile_regions(
    graph: Graph,
    compiles: Compiles,
    shapes: dict[Tensor, Sequence[Shape]] | None = None,
    differing: Mapping[Op, Axes] | None = None,
) -> Graph:
    """Put what XLA can compile into functions that it must compile, in place; returns `graph`.

    Args:
        shapes: of tensors whose shapes differ between ranks, kept up to date.
        differing: where ranks share a memory, the axes along which they differ in each op: regions
            are such that ranks run them together that run their ops together.
    """
    taken = {op for op in graph.ops if _can_take(graph, op, compiles)}
    reads = _first_reads(graph, taken)
    taken -= reads.keys()
    axes = dict(differing or {})
    regions = _regions(graph, taken, reads, axes)
    while apart := lists_in_pieces(graph, regions):
        taken -= apart
        regions = _regions(graph, taken, reads, axes)
    worth = [ops for ops in regions if _is_worth_it(ops)]
    if worth:
        _replace(graph, worth, reads, {} if shapes is None else shapes, axes)
    return graph


def _regions(
    graph: Graph, taken: Collection[Op], reads: Mapping[Op, Sequence[Op]], axes: dict[Op, Axes]
) -> list[list[Op]]:
    """Return candidates for regions: the ops of one turn in which the same ranks differ."""
    turns = _turns(graph, taken, reads, axes)
    found: dict[tuple[_Turn, Axes | None], list[Op]] = {}
    for op in graph.ops:
        if op in taken and op.type != "Const":
            found.setdefault((turns[op], axes.get(op)), []).append(op)
    return [*found.values()]


def find_uncompiled_ops(graph: Graph, compiles: Compiles) -> list[Op]:
    """Find the ops that compute something on a rank, and that no region of a compiled graph
    takes."""
    own = {*SOURCES, *COLLECTIVE_TYPES, *TRANSFER_TYPES, TASK}
    return [
        op
        for op in graph.ops
        if not (op.type in own or ON_HOST in op.attrs)
        and (has_list(op) or not _can_take(graph, op, compiles))
    ]


def _can_take(graph: Graph, op: Op, compiles: Compiles) -> bool:
    """Whether XLA computes what the kernels would, with all that `op` holds."""
    if op.type == "Const":
        return compiles(op)
    if op.type in SOURCES or ONCE in op.attrs or ON_HOST in op.attrs or not compiles(op):
        return False
    # Its truncated numbers are others, and no longer those of one device where a rank draws some.
    if op.type == "StatelessTruncatedNormalV2":
        return False
    if op.stateful and op.type not in _EFFECTS_TAKEN:
        return False
    if not all(t.is_static for t in op.outputs if t.dtype != "variant"):
        return False
    if has_list(op) and not can_compile_lists(op):
        return False
    return all(
        inner.type == "Placeholder"
        or inner.type == "RankConst"
        or _can_take(graph, inner, compiles)
        for _, body in walk_functions(graph, op)
        for inner in body.ops
    )


def _first_reads(graph: Graph, taken: Collection[Op]) -> dict[Op, list[Op]]:
    """The reads of variables that each region may do for itself: by read, what writes afterwards.

    A value that a region returns is copied, and one that is read beside it is not updated in
    place. So these reads are repeated, and whatever writes the variable waits for their readers.
    """
    position = {op: i for i, op in enumerate(graph.ops)}
    readers = graph.consumers()
    returned = {t.op for t in graph.outputs}
    found = {}
    for op in graph.ops:
        if op not in taken or op.type != "ReadVariableOp" or op.control or op in returned:
            continue
        writers = [w for w in readers[op.inputs[0]] if w.type not in VARIABLE_READS]
        first = min((position[w] for w in writers), default=len(position))
        if all(position[r] < first for r in readers.get(op.outputs[0], ())):
            found[op] = writers
    return found


def _turns(
    graph: Graph, taken: Collection[Op], reads: Mapping[Op, Sequence[Op]], axes: dict[Op, Axes]
) -> dict[Op, _Turn]:
    """The turn of every op but those that are there from the start; see the module.

    Args:
        axes: along which ranks differ in each op; small ones then differ where their readers do.
    """
    before = _edges(graph, reads)
    position = {op: i for i, op in enumerate(graph.ops)}
    cuts = [op for op in before if op not in taken]
    ready = {cut: max((position[b] for b in before[cut]), default=-1) for cut in cuts}
    number = {
        cut: i for i, cut in enumerate(sorted(cuts, key=lambda c: (ready[c], position[c])), 1)
    }
    begun = sorted(ready[cut] for cut in cuts if _is_large(cut))
    turns: dict[Op, _Turn] = {}
    for op, awaited in before.items():
        after = max((number.get(b) or turns[b][0] for b in awaited), default=0)
        at = after, bisect.bisect_left(begun, position[op])
        beside = (b for b in awaited if turns[b][:2] == at)
        turns[op] = *at, max((turns[b][2] + _comes_back(axes, b, op) for b in beside), default=0)
    _delay(taken, before, turns, axes)
    return turns


def _comes_back(axes: Mapping[Op, Axes], op: Op, reader: Op) -> bool:
    """Whether ranks that each compute `op` for themselves compute `reader` once."""
    return not axes.get(op, frozenset()) <= axes.get(reader, frozenset())


def _edges(graph: Graph, reads: Mapping[Op, Sequence[Op]]) -> dict[Op, list[Op]]:
    """By op, in order, the ops that it waits for; sources and reads are there from the start.

    A `Recv` waits for every `Send` above it; see the module.
    """
    readers = graph.consumers()
    writes: dict[Op, list[Op]] = {}
    for read, writers in reads.items():
        for writer in writers:
            writes.setdefault(writer, []).extend(readers.get(read.outputs[0], ()))
    sent: list[Op] = []
    for op in graph.ops:
        if op.type == "Send":
            sent.append(op)
        elif op.type == "Recv":
            writes[op] = [*sent]
    there = {op for op in graph.ops if op.type in SOURCES or op in reads}
    return {
        op: [b for b in dict.fromkeys((*op.predecessors, *writes.get(op, ()))) if b not in there]
        for op in graph.ops
        if op not in there
    }


def _delay(
    taken: Collection[Op],
    before: Mapping[Op, Sequence[Op]],
    turns: dict[Op, _Turn],
    axes: dict[Op, Axes],
) -> None:
    """Give what is small the first turn in which it is needed, if only regions need it.

    What has no effect is then computed by each of the ranks that need it.
    """
    needed: dict[Op, list[Op]] = {}
    for op, awaited in before.items():
        for b in awaited:
            needed.setdefault(b, []).append(op)
    for op in reversed([*before]):
        after = needed.get(op, ())
        if not after or op not in taken or not all(a in taken for a in after):
            continue
        if (
            is_list_maker(op)
            or op.type in FREE
            or 0 < sum(t.num_bytes for t in op.outputs) <= _SMALL
        ):
            at = min(turns[a][0] for a in after), min(turns[a][1] for a in after)
            needing = {axes[a] for a in after if a in axes}
            if len(needing) == 1 and not op.stateful:
                axes[op] = axes[op] | needing.pop()
            beside = [a for a in after if turns[a][:2] == at]
            last = turns[op][2] if turns[op][:2] == at else 0
            back = (turns[a][2] - _comes_back(axes, op, a) for a in beside)
            turns[op] = *at, min(back, default=last)


def _is_large(op: Op) -> bool:
    return op.type in COLLECTIVE_TYPES and sum(t.num_bytes for t in op.inputs) >= _LARGE


def _is_worth_it(ops: Sequence[Op]) -> bool:
    # Draws are XLA's in any case: what numbers a step draws must not depend on what is beside them.
    if any(op.type in KEYED_DRAWS for op in ops):
        return True
    return sum(op.type not in FREE for op in ops) >= _FEWEST


def _replace(
    graph: Graph,
    regions: Sequence[Sequence[Op]],
    reads: Mapping[Op, Sequence[Op]],
    shapes: dict[Tensor, Sequence[Shape]],
    axes: Mapping[Op, Axes],
) -> None:
    """Put a call in the place of the ops of each region."""
    region_of = {op: i for i, ops in enumerate(regions) for op in ops}
    functions = _Functions(graph)
    written = [
        _Region(functions, ops, reads, returned)
        for ops, returned in zip(regions, _returned(graph, region_of), strict=True)
    ]
    for region, ops in zip(written, regions, strict=True):
        if ops[0] in axes:
            region.call.attrs[DIFFERS] = sorted(axes[ops[0]])
    results = {old: new for region in written for old, new in region.results.items()}
    shapes.update((new, shapes[old]) for old, new in results.items() if old in shapes)

    def instead(op: Op) -> Op:
        """Return the op that runs in place of `op`."""
        region = region_of.get(op)
        return op if region is None else written[region].call

    waits: dict[Op, dict[Op, None]] = {}
    for op in graph.ops:
        waits.setdefault(instead(op), {}).update(dict.fromkeys(map(instead, op.control)))
    for region in written:
        for read in region.reads:
            for writer in reads[read]:
                waits[instead(writer)][region.call] = None
    repeated = {read for region in written for read in region.reads}
    last = {ops[-1] for ops in regions}
    graph.ops = [instead(op) for op in graph.ops if op not in region_of or op in last]
    for op in graph.ops:
        op.inputs = [results.get(t, t) for t in op.inputs]
        op.control = [b for b in waits[op] if b is not op]
    graph.outputs = [results.get(t, t) for t in graph.outputs]
    graph.effects = list(dict.fromkeys(map(instead, graph.effects)))
    graph.ops = sort_topologically(_in_use(graph, repeated))


def _in_use(graph: Graph, repeated: Collection[Op]) -> list[Op]:
    """The ops without the reads and constants that only regions needed, who have copies."""
    used = {t.op for op in graph.ops for t in op.inputs} | {t.op for t in graph.outputs}
    gone = {
        op for op in graph.ops if op not in used and (op in repeated or op.type == "Const")
    } - set(graph.effects)
    for op in graph.ops:
        op.control = [b for b in op.control if b not in gone]
    return [op for op in graph.ops if op not in gone]


def _returned(graph: Graph, region_of: Mapping[Op, int]) -> list[list[Tensor]]:
    """The tensors of each region that something outside of it reads."""
    found: dict[int, dict[Tensor, None]] = {i: {} for i in region_of.values()}
    read = ((t, region_of.get(op)) for op in graph.ops for t in op.inputs)
    for tensor, reader in (*read, *((t, None) for t in graph.outputs)):
        region = region_of.get(tensor.op)
        if region is not None and region != reader:
            found[region][tensor] = None
    return [list(found[i]) for i in sorted(found)]


class _Region:
    """One region, written as a function and a call of it.

    Attributes:
        call: the op in the place of the region's.
        results: of the tensors that it returns, what the call gives for them.
        reads: the reads that it repeats.
    """

    def __init__(
        self,
        functions: _Functions,
        ops: Sequence[Op],
        reads: Mapping[Op, Sequence[Op]],
        returned: Sequence[Tensor],
    ) -> None:
        self.reads: dict[Op, None] = {}
        self._repeatable = reads
        self._build = GraphBuilder(Graph(functions=functions.graph.functions))
        self._given: list[Tensor] = []
        self._tensors: dict[Tensor, Tensor] = {}
        self._ops: dict[Op, Op] = {}
        for op in ops:
            self._copy(op)
        body = self._build.graph
        body.outputs = [self._tensors[t] for t in returned]
        body.effects = [o for o in body.ops if o.stateful and o.type not in TRACELESS]
        self.call = Op(
            f"{ops[-1].name}/xla",
            "StatefulPartitionedCall" if body.effects else "PartitionedCall",
            self._given,
            {
                "f": functions.name_of(body),
                "Tin": [DType(t.dtype) for t in self._given],
                "Tout": [DType(t.dtype) for t in returned],
                MUST_COMPILE: True,
            },
            stateful=bool(body.effects),
        )
        self.results = {t: self.call.add_output(t.shape, t.dtype) for t in returned}

    def _copy(self, op: Op) -> None:
        inputs = [self._local(t) for t in op.inputs]
        awaited = [*op.control, *(r for r in self.reads if op in self._repeatable[r])]
        control = [self._ops[b] for b in dict.fromkeys(awaited) if b in self._ops]
        computed = [b for b in control if b.outputs and not b.stateful]
        if op.type == "Identity" and computed:
            made = self._wait(op, inputs[0], computed)
        else:
            outputs = [(t.shape, t.dtype) for t in op.outputs]
            made = self._build.emit(
                op.type, inputs, outputs, op.attrs, op.name, control, op.stateful
            )
        self._ops[op] = made
        self._tensors.update(zip(op.outputs, made.outputs, strict=False))

    def _wait(self, op: Op, given: Tensor, computed: Sequence[Op]) -> Op:
        """Hand on a tensor once others are computed: XLA knows no control edges.

        Without it XLA would see that what is recomputed is what the forward pass has computed.
        Reads and writes need no such barrier, as they are compiled in the order of control edges.
        It would keep what was read of weights beside what is written to them.
        """
        tensors = [given, *(b.outputs[0] for b in computed)]
        attrs = {"T": [DType(t.dtype) for t in tensors]}
        outputs = [(t.shape, t.dtype) for t in tensors]
        return self._build.emit("XlaOptimizationBarrier", tensors, outputs, attrs, op.name)

    def _local(self, tensor: Tensor) -> Tensor:
        """`tensor` inside: computed there, written or read there, or an argument."""
        if tensor in self._tensors:
            return self._tensors[tensor]
        if tensor.op.type == "Const":  # shapes and axes have to be known to the compiler
            self._copy(tensor.op)
        elif tensor.op in self._repeatable:
            self.reads[tensor.op] = None
            self._copy(tensor.op)
        else:
            self._given.append(tensor)
            self._tensors[tensor] = self._build.placeholder(tensor, f"given{len(self._given)}")
        return self._tensors[tensor]


class _Functions:
    """The functions of a graph's regions: of equal regions, one."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._names: dict[Hashable, FunctionRef] = {}

    def name_of(self, body: Graph) -> FunctionRef:
        """Return the name of the function that computes `body`, which is added if need be."""
        signature = _signature(body)
        if signature not in self._names:
            name = self._names[signature] = FunctionRef(f"xla{len(self.graph.functions)}")
            self.graph.functions[name] = body
        return self._names[signature]


def _signature(body: Graph) -> Hashable:
    """All that a function computes, whatever its ops are called."""
    index = {op: i for i, op in enumerate(body.ops)}
    ops = tuple(
        (
            op.type,
            tuple((index[t.op], t.index) for t in op.inputs),
            tuple(index[b] for b in op.control),
            tuple((k, freeze(v)) for k, v in sorted(op.attrs.items()) if not k.startswith("_")),
            tuple((t.shape, t.dtype) for t in op.outputs),
        )
        for op in body.ops
    )
    outputs = tuple((index[t.op], t.index) for t in body.outputs)
    return ops, outputs, tuple(index[op] for op in body.effects)
