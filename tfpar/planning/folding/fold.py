"""Folding: a model whose blocks repeat becomes one with three of each (TAP §IV-C).

Here is a chain of six dense layers of one size, of which the last has no activation:

    layer_1 -> layer_2 -> layer_3 -> layer_4 -> layer_5 -> layer_6
    layer_1 -> layer_2 ----------------------> layer_5 -> layer_6    `times` of layer_2 is 3

The first five are a block that repeats. Its first, second and last instance stay. Those between
are like the second, whose ops count for them (`times`), whose weights stand for theirs (`twins`).
`layer_5` read what `layer_4` made; it now reads the same of `layer_2`, the nearest instance that
is left on that side. So the folded graph is a real graph, of a model with fewer layers, and its
specs, reshards and costs are found as those of any other.

Two steps: blocks are found by names and weights (`ir.shared_subgraphs`), so ops under no block's
name (residual additions, gradients) are added to them first, by going along the edges from all
instances at once, as long as what is found is equal (`grow`). Then all but three are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import networkx as nx

from tfpar.ir.effects import live_ops
from tfpar.ir.graph import Graph, Op, Tensor, Variable
from tfpar.ir.shared_subgraphs import RepeatedBlock, Signatures, aligned_ops

KEPT_INSTANCES = 3


@dataclasses.dataclass(frozen=True, eq=False)
class FoldedGraph:
    """A graph with fewer layers.

    Attributes:
        graph: ops are copies.
        times: how many ops of the model each op stands for, where not 1.
        twins: for each variable of `graph` all variables of the model that have its spec.
        groups: the variables of `graph` that stand at one place of a block, and so share one
            placement; those of no block stand alone.
        block_of: by the name of a variable of `graph`, which repeated block it belongs to, if any.
        copies: the copy of each op of the model that was kept.
        rows: the ops of `graph` that stand at one place of a block, and so run in the same way.
        stands_for: by the name of an op of `graph`, the names of all ops of the model that run as
            it does, where these are more than itself.
        instances: the ops of `graph` that make up each instance that was kept of a repeated block.
    """

    graph: Graph
    times: Mapping[Op, int]
    twins: Mapping[Variable, Sequence[Variable]]
    groups: Sequence[Sequence[Variable]]
    block_of: Mapping[str, int]
    copies: Mapping[Op, Op]
    rows: Sequence[Sequence[Op]]
    stands_for: Mapping[str, Sequence[str]]
    instances: Sequence[Sequence[Op]]


@dataclasses.dataclass(eq=False)
class _Grown:
    """A repeated block, its instances grown as far as they are equal.

    Attributes:
        instances: the ops of each, those at the same position are equal.
        starts: where each begins, as a position in the graph.
        apart: instances at an end that could not grow with the others (no gradient flows to what
            the first one reads). They stay, and their weights share the placement of the others.
    """

    instances: list[list[Op]]
    starts: list[int]
    apart: list[list[Op]]


def fold(graph: Graph, repeats: Sequence[RepeatedBlock], signatures: Signatures) -> FoldedGraph:
    """Fold every block with more than three instances; copies the graph in any case."""
    position = {op: i for i, op in enumerate(graph.ops)}
    grown = grow(graph, repeats, signatures, position)
    folded = _fold(graph, grown, position)
    if folded is None:
        accepted: list[_Grown] = []
        for repeat in grown:
            if _fold(graph, [*accepted, repeat], position) is not None:
                accepted.append(repeat)
        folded = _fold(graph, accepted, position)
    assert folded is not None, "a graph without folds is always a graph"
    return folded


# --- growing ---------------------------------------------------------------------------


def grow(
    graph: Graph,
    repeats: Sequence[RepeatedBlock],
    signatures: Signatures,
    position: Mapping[Op, int],
) -> list[_Grown]:
    """Grow the instances of each block as far as their ops are equal, position by position."""
    bases = []
    for repeat in repeats:
        rows = list(zip(*aligned_ops(repeat, signatures), strict=True))
        rows = [row for row in rows if len(set(row)) == len(row)]
        if rows:
            bases.append(rows)
    taken: set[Op] = set()
    for rows in sorted(bases, key=_extent):
        rows += _handles(rows, taken)
    consumers = graph.consumers()

    def grown(cuts: Sequence[slice]) -> list[list[tuple[Op, ...]]]:
        return _grown_rows(bases, cuts, consumers, signatures)

    # The first instance may read the model's inputs, to which no gradient flows, and of the last
    # one some results may not be read. Without such an instance the others are alike in more ops.
    cuts = [slice(None)] * len(bases)
    best = grown(cuts)
    for cut in (slice(1, None), slice(None, -1), slice(1, -1)):
        long = [len(base[0][cut]) > KEPT_INSTANCES for base in bases]
        if any(long):
            tried = grown([cut if is_long else slice(None) for is_long in long])
            for i, rows in enumerate(tried):
                if len(rows) > len(best[i]):
                    cuts[i], best[i] = cut, rows
    if any(cut != slice(None) for cut in cuts):
        best = grown(cuts)
    return [
        _Grown(
            [list(c) for c in zip(*rows, strict=True)],
            [min(map(position.__getitem__, c)) for c in zip(*_cut(base, cut), strict=True)],
            _apart(base, cut),
        )
        for base, cut, rows in zip(bases, cuts, best, strict=True)
    ]


def _grown_rows(
    bases: Sequence[Sequence[tuple[Op, ...]]],
    cuts: Sequence[slice],
    consumers: Mapping[Tensor, Sequence[Op]],
    signatures: Signatures,
) -> list[list[tuple[Op, ...]]]:
    owned = {op for base in bases for row in base for op in row}
    grown = [_cut(base, cut) for base, cut in zip(bases, cuts, strict=True)]
    # An op that two blocks reach goes to the larger one. The final norms of two towers are alike
    # too, as a block of two instances, but the layers beside them belong to the towers.
    for rows in sorted(grown, key=_extent):
        at = 0
        while at < len(rows) and len(rows[0]) > 1:
            rows += _beside(rows[at], consumers, owned, signatures)
            at += 1
    return grown


def _extent(rows: Sequence[tuple[Op, ...]]) -> int:
    """A sort key: blocks of many ops come first."""
    return -len(rows) * len(rows[0])


def _cut(rows: Sequence[tuple[Op, ...]], cut: slice) -> list[tuple[Op, ...]]:
    return [row[cut] for row in rows]


def _apart(base: Sequence[tuple[Op, ...]], cut: slice) -> list[list[Op]]:
    columns = [list(c) for c in zip(*base, strict=True)]
    kept = range(len(columns))[cut]
    return [column for i, column in enumerate(columns) if i not in kept]


def _handles(rows: Sequence[tuple[Op, ...]], taken: set[Op]) -> list[tuple[Op, ...]]:
    """Rows of the variables that the ops of `rows` read.

    Args:
        taken: those that rows have already, added to: a weight that several blocks read (the
            layers, and a penalty on all weights) has its place in one.
    """
    found: list[tuple[Op, ...]] = []
    for row in rows:
        for slot, tensor in enumerate(row[0].inputs):
            if tensor.dtype == "resource":
                handles = tuple(op.inputs[slot].op for op in row)
                if len(set(handles)) == len(handles) and taken.isdisjoint(handles):
                    found.append(handles)
                    taken.update(handles)
    return found


def _beside(
    row: Sequence[Op],
    consumers: Mapping[Tensor, Sequence[Op]],
    owned: set[Op],
    signatures: Signatures,
) -> list[tuple[Op, ...]]:
    """Rows of ops next to those of `row`, reached by the same edge from each, alike."""
    found: list[tuple[Op, ...]] = []

    def offer(ops: tuple[Op, ...]) -> None:
        if len(set(ops)) < len(ops) or any(op in owned for op in ops):
            return
        first = ops[0]
        kind = signatures.op(first)
        if all(op.type == first.type and signatures.op(op) == kind for op in ops[1:]):
            found.append(ops)
            owned.update(ops)

    for slot in range(len(row[0].inputs)):
        offer(tuple(op.inputs[slot].op for op in row))
    for index in range(len(row[0].outputs)):
        keyed: list[dict[tuple[int, int], list[Op]]] = []
        for op in row:
            by_key: dict[tuple[int, int], list[Op]] = {}
            tensor = op.outputs[index]
            for reader in consumers.get(tensor, ()):
                if reader not in owned:
                    key = (signatures.op(reader), reader.inputs.index(tensor))
                    by_key.setdefault(key, []).append(reader)
            keyed.append(by_key)
        for key, readers in keyed[0].items():
            others = [by_key.get(key, []) for by_key in keyed]
            if all(len(o) == len(readers) for o in others):
                for ops in zip(*others, strict=True):
                    offer(tuple(ops))
    return found


# --- folding ---------------------------------------------------------------------------


def _fold(graph: Graph, grown: Sequence[_Grown], position: Mapping[Op, int]) -> FoldedGraph | None:
    """The folded graph, or None if leaving out the instances would close a cycle."""
    home: dict[Op, tuple[_Grown, int, int]] = {}  # op -> repeat, instance, place in it
    kept: dict[int, list[int]] = {}  # repeat -> instances that stay
    times: dict[Op, int] = {}
    for repeat in grown:
        count = len(repeat.instances)
        stay = list(range(count))
        if count > KEPT_INSTANCES:
            stay = [0, 1, count - 1]
            times.update(dict.fromkeys(repeat.instances[1], count - 2))
        kept[id(repeat)] = stay
        for i, ops in enumerate(repeat.instances):
            home.update((op, (repeat, i, at)) for at, op in enumerate(ops))

    def dropped(op: Op) -> bool:
        place = home.get(op)
        return place is not None and place[1] not in kept[id(place[0])]

    def stand_in(source: Op, reader: Op) -> Op:
        """The kept op for `source` as `reader` sees it."""
        if not dropped(source):
            return source
        repeat, instance, at = home[source]
        stay = kept[id(repeat)]
        start = repeat.starts[instance]
        place = home.get(reader)
        chosen = stay[1]
        if place is not None:
            own = place[0].starts[place[1]]
            before = [i for i in stay if repeat.starts[i] < own]
            after = [i for i in stay if repeat.starts[i] > own]
            if start < own and before:
                chosen = before[-1]
            elif start > own and after:
                chosen = after[0]
        return repeat.instances[chosen][at]

    copies: dict[Op, Op] = {}
    for op in graph.ops:
        if not dropped(op):
            copy = Op(op.name, op.type, attrs=dict(op.attrs), stateful=op.stateful)
            for tensor in op.outputs:
                copy.add_output(tensor.shape, tensor.dtype)
            copies[op] = copy
    for op, copy in copies.items():
        copy.inputs = [copies[stand_in(t.op, op)].outputs[t.index] for t in op.inputs]
        copy.control = [copies[c] for c in op.control if c in copies]
    ordered = _ordered(list(copies.values()))
    if ordered is None:
        return None
    return _finish(graph, grown, copies, ordered, times, kept)


def _ordered(ops: Sequence[Op]) -> list[Op] | None:
    """`ops` with inputs first, otherwise in their order; None if they close a cycle."""
    position = {op: i for i, op in enumerate(ops)}
    flow = nx.DiGraph()
    flow.add_nodes_from(ops)
    for op in ops:
        flow.add_edges_from((before, op) for before in (*(t.op for t in op.inputs), *op.control))
    try:
        return list(nx.lexicographical_topological_sort(flow, position.__getitem__))
    except nx.NetworkXUnfeasible:
        return None


def _finish(
    graph: Graph,
    grown: Sequence[_Grown],
    copies: Mapping[Op, Op],
    ordered: Sequence[Op],
    times: Mapping[Op, int],
    kept: Mapping[int, Sequence[int]],
) -> FoldedGraph:
    """The folded graph of the copies that are left, and which variables stand for which."""
    handles = graph.variable_of()
    result = Graph(functions=graph.functions)
    result.inputs = [copies[t.op].outputs[t.index] for t in graph.inputs if t.op in copies]
    result.outputs = [copies[t.op].outputs[t.index] for t in graph.outputs if t.op in copies]
    result.effects = [copies[op] for op in graph.effects if op in copies]
    live = live_ops(result)
    result.ops = [op for op in ordered if op in live or op.type == "Placeholder"]
    twins: dict[Variable, list[Variable]] = {}
    copy_of: dict[Variable, Variable] = {}
    for variable in graph.variables:
        handle = copies.get(variable.handle.op)
        if handle is not None:
            copy = Variable(
                variable.name,
                variable.shape,
                variable.dtype,
                variable.trainable,
                handle.outputs[variable.handle.index],
                offloaded=variable.offloaded,
            )
            copy_of[variable] = copy
            twins[copy] = [variable]
            result.variables.append(copy)
    groups: list[list[Variable]] = []
    block_of: dict[str, int] = {}
    rows: list[list[Op]] = []
    stands_for: dict[str, list[str]] = {}
    for number, repeat in enumerate(grown):
        stay = kept[id(repeat)]
        for at, row in enumerate(zip(*repeat.instances, strict=True)):
            rows.append([copies[row[i]] for i in stay])
            if len(stay) < len(row):
                middle_op = row[stay[1]].name
                stands_for[middle_op] = [
                    op.name for i, op in enumerate(row) if i == stay[1] or i not in stay
                ]
            found = [
                handles[op.outputs[0]] for op in row if op.outputs and op.outputs[0] in handles
            ]
            if len(found) < len(row):
                continue
            middle = copy_of[found[stay[1] if len(stay) > 1 else 0]]
            for i, variable in enumerate(found):
                if i not in stay:
                    twins[middle].append(variable)
            group = [copy_of[found[i]] for i in stay]
            ends = (ops[at].outputs[0] for ops in repeat.apart if at < len(ops))
            group += [copy_of[handles[t]] for t in ends]
            groups.append(group)
            block_of.update((v.name, number) for v in group)
    groups += [[v] for v in result.variables if v.name not in block_of]
    repeated = {copies[op]: n for op, n in times.items() if op in copies}
    instances = [
        [copies[op] for op in repeat.instances[i]] for repeat in grown for i in kept[id(repeat)]
    ]
    return FoldedGraph(
        result, repeated, twins, groups, block_of, copies, rows, stands_for, instances
    )
