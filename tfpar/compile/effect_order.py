"""Check of compiled graphs: effects are in the step's order wherever the step has one.

`ir.passes.order_effects` orders all conflicting accesses of a captured step. So a path of effects
that a pass has lost leaves two accesses to a resource that nothing orders: a race, whose numbers
differ from run to run. That is looked for after each part of the compiler. Of the local programs it
is checked, too, that accesses come in the step's order: each carries a mark, the name of the op
that it was written for.

Resources go by the names of their handles, since each graph has handles of its own. What the step
itself leaves unordered, as a graph that is written by hand may do, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from tfpar.compile.local.local_graph import EFFECT_OF, TASK
from tfpar.compile.local.programs import ProgramSet
from tfpar.compile.local.reshard import COLLECTIVE_TYPES
from tfpar.compile.local.transfers import TRANSFER_TYPES, channels_of
from tfpar.ir.effects import OUTSIDE, Access, Accesses, Resource, conflicts, live_ops, resource_of
from tfpar.ir.graph import Graph, Op
from tfpar.ir.traits import SOURCES
from tfpar.spec import CompilerError

_UNORDERED = SOURCES.union(COLLECTIVE_TYPES)
"""Op types whose control edges backends, rounds or regions leave out."""

_FAULT = (
    "Numbers would differ from those of one device. This is a fault of tfpar: please report it "
    "with the graphs that TFPAR_DUMP=folder writes."
)

Race = tuple[Op, Op]
"""Two conflicting accesses in no order; the first comes first in the graph."""


def races(graph: Graph) -> dict[str, Race]:
    """Find the first race of a graph by resource; those of function bodies after it."""
    accesses = _accesses(graph)
    found = _races_of(graph, accesses)
    for name, body in graph.functions.items():
        for resource, race in _races_of(body, accesses).items():
            found[f"{resource} of {name}"] = race
    return found


def check_races(done: str, graph: Graph, allowed: Collection[str]) -> None:
    """See that there are races for no other resources than `allowed`.

    Args:
        done: what was done to the graph, for the message.

    Raises:
        CompilerError: names two ops.
    """
    _refuse(done, races(graph), allowed)


def check_programs(done: str, programs: ProgramSet, allowed: Collection[str]) -> None:
    """See that there are races for no other resources than `allowed`, on any rank or between them.

    Args:
        done: what made the programs, for the message.

    Raises:
        CompilerError: names two ops.
    """
    apart = len(programs.programs) > 1  # then a path may lead through another program
    for program in programs.programs.values():
        check_races(done, program.graph, {*allowed, OUTSIDE} if apart else allowed)
    if apart:
        _refuse(done, _outside_races(programs), allowed)


def check_marks(programs: ProgramSet, step: Graph, allowed: Collection[str]) -> None:
    """See that effects come in the order of the step, on each rank.

    Args:
        step: for which the programs were written.
        allowed: the resources of its races.

    Raises:
        CompilerError: names two ops.
    """
    places = _places(step)
    for program in programs.programs.values():
        _check_marks(program.graph, places, allowed)


def _refuse(done: str, found: Mapping[str, Race], allowed: Collection[str]) -> None:
    for resource, (first, second) in found.items():
        if resource not in allowed:
            raise CompilerError(
                f"{done} lost the order of two effects on {resource!r}: {first.type} "
                f"{first.name!r} and {second.type} {second.name!r}. {_FAULT}"
            )


# --- races ----------------------------------------------------------------------------------------


def _accesses(graph: Graph) -> Accesses:
    return Accesses(graph.functions, TRANSFER_TYPES)


def _by_resource(graph: Graph, accesses: Accesses) -> dict[Resource, list[Access]]:
    live = live_ops(graph)
    return accesses.by_resource(op for op in graph.ops if op in live)


def _races_of(graph: Graph, accesses: Accesses) -> dict[str, Race]:
    each = {_name(r): list(conflicts(a)) for r, a in _by_resource(graph, accesses).items()}
    return _unordered(graph.ops, each, _before)


def _outside_races(programs: ProgramSet) -> dict[str, Race]:
    """Races of several programs for the world outside, which they share."""
    ops = list(programs.in_order())
    senders = {c: op for g, op in ops if op.type == "Send" for c in channels_of(op, g)}
    sent = {
        op: [senders[c] for c in channels_of(op, g) if c in senders]
        for g, op in ops
        if op.type == "Recv"
    }
    outside: list[Access] = []
    live = set[Op]().union(*(live_ops(p.graph) for p in programs.programs.values()))
    for group, program in programs.programs.items():
        accesses = _accesses(program.graph)
        outside += (Access(op, True) for g, op in ops if g == group and OUTSIDE in accesses.of(op))
    position = {op: i for i, (_, op) in enumerate(ops)}
    outside = sorted((a for a in outside if a.op in live), key=lambda a: position[a.op])
    pairs = {OUTSIDE: list(conflicts(outside))}
    return _unordered([op for _, op in ops], pairs, lambda op: [*_before(op), *sent.get(op, ())])


def _unordered(
    ops: Iterable[Op], pairs: Mapping[str, list[Race]], before: Callable[[Op], Collection[Op]]
) -> dict[str, Race]:
    """By resource, the first of its pairs in which no path leads from one to the other.

    Args:
        ops: in topological order.
    """
    apart = {r: [(a, b) for a, b in each if a not in before(b)] for r, each in pairs.items()}
    bits = {a: 1 << i for i, a in enumerate(dict.fromkeys(a for e in apart.values() for a, _ in e))}
    if not bits:
        return {}
    reached: dict[Op, int] = {}
    for op in ops:
        mask = bits.get(op, 0)
        for other in before(op):
            mask |= reached[other]
        reached[op] = mask
    lost = {r: [(a, b) for a, b in each if not reached[b] & bits[a]] for r, each in apart.items()}
    return {resource: each[0] for resource, each in lost.items() if each}


def _before(op: Op) -> list[Op]:
    made = [t.op for t in op.inputs]
    return made if op.type in _UNORDERED else [*made, *op.control]


def _name(resource: Resource) -> str:
    return resource if isinstance(resource, str) else resource.op.name


# --- marks ----------------------------------------------------------------------------------------


def _places(step: Graph) -> dict[str, dict[str, int]]:
    """By resource and op name, the place of each access in the order of its resource."""
    accesses = _by_resource(step, _accesses(step))
    return {_name(r): {a.op.name: i for i, a in enumerate(each)} for r, each in accesses.items()}


def _check_marks(
    graph: Graph, places: Mapping[str, Mapping[str, int]], allowed: Collection[str]
) -> None:
    """See that no access comes after one that it conflicts with and that the step has behind it."""
    accesses = _accesses(graph)
    last: dict[str, dict[bool, tuple[int, str]]] = {}  # by resource, of reads and of writes
    for op in graph.ops:
        for resource, writes, mark in list(_marked(op, graph, accesses)):
            name = _name(resource)
            at = places.get(name, {}).get(mark)
            if at is None or name in allowed:
                continue
            seen = last.setdefault(name, {False: (-1, ""), True: (-1, "")})
            behind = max(seen.values()) if writes else seen[True]
            if behind[0] > at:
                raise CompilerError(
                    f"Writing the program of ranks turned round the order of two effects on "
                    f"{name!r}: {behind[1]!r} comes before {mark!r}. {_FAULT}"
                )
            seen[writes] = max(seen[writes], (at, mark))


def _marked(op: Op, graph: Graph, accesses: Accesses) -> Iterator[tuple[Resource, bool, str]]:
    """The accesses of an op, each with whether it writes and its mark; of a task, its body's."""
    if EFFECT_OF in op.attrs:
        for resource, writes in accesses.of(op).items():
            yield resource, writes, op.attrs[EFFECT_OF]
    elif op.type == TASK:
        body = graph.functions[op.attrs["body"]]
        given = dict(zip(body.inputs, op.inputs, strict=True))
        for inner in body.ops:
            for resource, writes, mark in _marked(inner, graph, accesses):
                if resource in given:
                    yield resource_of(given[resource]), writes, mark
