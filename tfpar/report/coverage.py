"""Coverage: which op types of a graph have a rule, and which run replicated."""

from __future__ import annotations

import dataclasses

from tfpar.ir.graph import FunctionRef, Graph, Op
from tfpar.propagation.prepared import REGION_TYPES, PreparedGraph, prepare
from tfpar.report.tables import render_table
from tfpar.rules.registry import has_rule


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
    """What has a rule and what runs replicated (inputs gathered, every rank computes).

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
    found: dict[str, OpCoverage] = {}
    pending, seen = [prepared], {id(prepared)}
    while pending:
        current = pending.pop()
        fallbacks = set(current.fallbacks)
        for op in current.graph.ops:
            have = found.setdefault(op.type, OpCoverage(op.type))
            field = "ruled"
            if op in fallbacks:
                field = "partial" if has_rule(op.type) else "fallback"
                have = dataclasses.replace(have, example=have.example or op.name)
            found[op.type] = dataclasses.replace(have, **{field: getattr(have, field) + 1})
            if op.type in REGION_TYPES:
                bodies = [current.body(name) for name in _functions_of(op)]
                pending += [b for b in bodies if id(b) not in seen]
                seen.update(map(id, bodies))
    return Coverage(tuple(found[t] for t in sorted(found)))


def _functions_of(op: Op) -> list[str]:
    """The names of the function bodies of `op`, each once."""
    values = (v if isinstance(v, list) else [v] for v in op.attrs.values())
    return list(dict.fromkeys(n for names in values for n in names if isinstance(n, FunctionRef)))
