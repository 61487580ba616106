"""Cutting of a graph into segments, runs of ops that are propagated and priced as one.

A segment has to stand on its own: what is open in it (a weight that the plan leaves open, a random
draw) is settled in it, by its first reader. And what several segments may ask for is priced once
for all of them: those tensors are the *border*.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tfpar.cost.patterns import passes_through
from tfpar.ir.graph import Op, Tensor, Variable
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.rules.rule import find_relabelled_inputs


def closed_segments(
    segments: Sequence[Sequence[Op]], prepared: PreparedGraph, open_handles: Collection[Tensor]
) -> list[list[Op]]:
    """Change `segments` so that a weight left open, or a draw, is settled where it is opened.

    What waits with an open weight, its read and casts of that, goes to the first segment that reads
    it: until then nothing depends on it. Otherwise segments are merged.

    Args:
        open_handles: of the weights that are open before the first op.
    """
    home = {op: i for i, ops in enumerate(segments) for op in ops}
    for op in reversed(_waiting(prepared, open_handles)):
        readers = [home[r] for r in prepared.consumers.get(op.outputs[0], ()) if r in home]
        if op in home and readers:
            home[op] = max(home[op], min(readers))
    joined = list(range(len(segments)))  # each segment -> the last one it is joined with
    parts: list[list[Op]] = [[] for _ in segments]
    for op in prepared.graph.ops:
        if op not in home:
            continue
        parts[home[op]].append(op)
        opens = prepared.rules[op].drawn or any(t in open_handles for t in op.inputs)
        if opens and op.outputs:
            reader = first_reader(op, prepared)
            if reader is not None:
                joined[home[op]] = max(joined[home[op]], home[reader])
    out: list[list[Op]] = []
    end = -1
    for i, ops in enumerate(parts):
        if i <= end:
            out[-1].extend(ops)
        else:
            out.append(ops)
        end = max(end, joined[i])
    return [ops for ops in out if ops]


def _waiting(prepared: PreparedGraph, open_handles: Collection[Tensor]) -> list[Op]:
    """The ops that only hand on the value of an open weight, in order."""
    found: list[Op] = []
    values = prepared.weights.intersection(open_handles)
    for op in prepared.graph.ops:
        if op.inputs and op.inputs[0] in values and prepared.weights.issuperset(op.outputs):
            values |= set(op.outputs)
            found += [op] if op.outputs else []
    return found


def first_reader(op: Op, prepared: PreparedGraph) -> Op | None:
    """Find the first op that reads what `op` makes, past ops that may only relabel it."""
    position, draws = prepared.position, prepared.rules[op].drawn
    first: Op | None = None
    stack, seen = list(op.outputs), set()
    while stack:
        for reader in prepared.consumers.get(stack.pop(), ()):
            if reader in seen or (first is not None and position[reader] > position[first]):
                continue
            seen.add(reader)
            rule = prepared.rules[reader]
            relabels = len(reader.outputs) == 1 and (
                bool(find_relabelled_inputs(reader, rule)) or (draws and rule.lower is None)
            )
            if relabels:
                stack += reader.outputs
            else:
                first = reader
    return first


def border_tensors(prepared: PreparedGraph, segment_of: Mapping[Op, int]) -> set[Tensor]:
    """Find the tensors that more than the segment that makes them may ask for."""
    graph = prepared.graph
    border = set(graph.outputs)
    for tensor, readers in prepared.consumers.items():
        home = segment_of.get(tensor.op)  # none of what runs alike in all plans
        if any(segment_of.get(op) != home for op in readers):
            border.add(tensor)
    # A list that another segment wants in another spec is made anew, of what it was made of.
    lists = [t for t in border if t.dtype == "variant"]
    while lists:
        sources = set(lists.pop().op.inputs) - border
        border |= sources
        lists += [t for t in sources if t.dtype == "variant"]
    return border | {v.handle for v in graph.variables}


def weight_of_values(prepared: PreparedGraph) -> dict[Tensor, Variable]:
    """Find the tensors that hold all of a trainable weight's value and nothing else: its handle;
    reads, casts, reshapes of it."""
    graph = prepared.graph
    found: dict[Tensor, Variable] = {v.handle: v for v in graph.variables if v.trainable}
    for op in graph.ops:
        for tensor in op.inputs:
            if tensor in found and passes_through(op, tensor, prepared):
                found[op.outputs[0]] = found[tensor]
    return found
