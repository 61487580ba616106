"""Coverage: which op types of a graph have a rule, and which run replicated."""

from __future__ import annotations

import dataclasses

from tfpar.ir.graph import Graph
from tfpar.observability.report.tables import render_table
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import Anchors
from tfpar.propagation.prepared_graph import PreparedGraph, prepare
from tfpar.rules import has_rule
from tfpar.spec import Mesh


@dataclasses.dataclass(frozen=True)
class OpCoverage:
    """The ops of one type.

    Attributes:
        ruled: run by their rule (control flow: by the rules of its bodies).
        partial: the type has a rule, but not for these ops' attributes or shapes.
        fallback: the type has no rule.
        example: an op that runs replicated; empty if none does.
    """

    op_type: str
    ruled: int = 0
    partial: int = 0
    fallback: int = 0
    example: str = ""

    @property
    def count(self) -> int:
        return self.ruled + self.partial + self.fallback

    @property
    def status(self) -> str:
        """`rule`, `partial` or `fallback`: the worst that some op of the type gets."""
        return "fallback" if self.fallback else "partial" if self.partial else "rule"


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Coverage of ops by rules: the others run replicated (inputs gathered, every rank computes).

    Prints as a table: what lacks a rule first.
    """

    op_types: tuple[OpCoverage, ...]

    @property
    def complete(self) -> bool:
        """Whether every op runs by a rule."""
        return all(o.status == "rule" for o in self.op_types)

    def without_rule(self) -> tuple[str, ...]:
        """The op types of which some op runs replicated."""
        return tuple(o.op_type for o in self.op_types if o.status != "rule")

    def __str__(self) -> str:
        worst = {"fallback": 0, "partial": 1, "rule": 2}
        rows = [
            [o.op_type, str(o.count), o.status, str(o.partial + o.fallback or ""), o.example]
            for o in sorted(self.op_types, key=lambda o: (worst[o.status], -o.count, o.op_type))
        ]
        total = sum(o.count for o in self.op_types)
        lacking = sum(o.partial + o.fallback for o in self.op_types)
        columns = ("Op type", "Ops", "Coverage", "Replicated", "First replicated op")
        table = render_table("Op coverage", columns, rows, numeric=(1, 3))
        return f"{table}\n{total - lacking} of {total} ops run by a rule, {lacking} run replicated"

    __repr__ = __str__


def coverage(graph: Graph | PreparedGraph) -> Coverage:
    """Count the ops of `graph`, function bodies included, by how they will run."""
    prepared = graph if isinstance(graph, PreparedGraph) else prepare(graph)
    # Bodies are prepared as they are met, with what is known of their arguments.
    propagate(prepared, Mesh.of([1]), Anchors())
    found: dict[str, OpCoverage] = {}
    for current in _with_bodies(prepared, {}).values():
        fallbacks = set(current.fallbacks)
        for op in current.graph.ops:
            have = found.setdefault(op.type, OpCoverage(op.type))
            field = "ruled"
            if op in fallbacks:
                field = "partial" if has_rule(op.type) else "fallback"
                have = dataclasses.replace(have, example=have.example or op.name)
            found[op.type] = dataclasses.replace(have, **{field: getattr(have, field) + 1})
    return Coverage(tuple(found[t] for t in sorted(found)))


def _with_bodies(
    prepared: PreparedGraph, found: dict[int, PreparedGraph]
) -> dict[int, PreparedGraph]:
    """`prepared` and the function bodies in it, however deep, each once."""
    if id(prepared) not in found:
        found[id(prepared)] = prepared
        for body in prepared.bodies.values():
            _with_bodies(body, found)
    return found
