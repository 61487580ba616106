"""What propagation needs to know of a graph and computes once for all plans."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Graph, Op, Tensor, freeze
from tfpar.propagation.deferral import carried_tensors
from tfpar.rules.registry import find_rule
from tfpar.rules.rule import OpRule, replicate_rule

REGION_TYPES = frozenset(
    {"If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase",
     "PartitionedCall", "StatefulPartitionedCall"}
)  # fmt: skip

PINNED_DTYPES = frozenset({"resource", "variant"})


@dataclasses.dataclass(eq=False)
class PreparedGraph:
    """A graph with its rules, deferral choices and a memo of decisions.

    Attributes:
        rules: the rule of every op; ops of one signature share one object.
        fallbacks: ops without a rule, which run replicated.
        carried: see `deferral.carried_tensors`.
        zeros: constant tensors that are zero everywhere (Partial for free).
        memo: decisions by (rule, input specs, ...); shared by all plans.
        bodies: prepared function bodies by name; expansions by (rule, parts).
    """

    graph: Graph
    constants: Constants
    rules: dict[Op, OpRule]
    fallbacks: list[Op]
    carried: frozenset[Tensor]
    zeros: frozenset[Tensor]
    consumers: dict[Tensor, list[Op]]
    memo: dict[Any, Any] = dataclasses.field(default_factory=dict)
    bodies: dict[Any, PreparedGraph] = dataclasses.field(default_factory=dict)

    def body(self, name: str) -> PreparedGraph:
        """The prepared body of function `name`."""
        if name not in self.bodies:
            body = self.graph.functions[name]
            if not body.functions:
                body.functions = self.graph.functions
            self.bodies[name] = prepare(body)
        return self.bodies[name]


def prepare(graph: Graph) -> PreparedGraph:
    """Look up every rule once and decide where Partials are resolved."""
    constants = Constants(graph)
    by_signature: dict[Any, OpRule] = {}
    rules: dict[Op, OpRule] = {}
    fallbacks: list[Op] = []
    for op in graph.ops:
        key = _signature(op, constants)
        rule = by_signature.get(key)
        if rule is None:
            rule = find_rule(op, constants)
            if rule is None:
                rule = replicate_rule(op)
                if op.type not in REGION_TYPES and (op.inputs or op.stateful):
                    fallbacks.append(op)
            else:
                by_signature[key] = rule
        rules[op] = rule
    zeros = frozenset(
        op.outputs[0]
        for op in graph.ops
        if op.type == "Const" and op.attrs["value"].dtype.kind in "fiu" and not op.attrs["value"].any()
    )
    return PreparedGraph(
        graph, constants, rules, fallbacks, carried_tensors(graph, rules), zeros, graph.consumers()
    )


def _signature(op: Op, constants: Constants) -> Any:
    """Equal for ops that must have equal rules."""
    operands = []
    for tensor in op.inputs:
        value = None
        if tensor.dtype in ("int32", "int64", "bool"):
            value = constants.value(tensor)
        operands.append(
            (tensor.shape, tensor.dtype, None if value is None else (value.shape, value.tobytes()))
        )
    attrs = () if op.type == "Const" else tuple(
        (k, freeze(v)) for k, v in sorted(op.attrs.items()) if not k.startswith("_")
    )
    return (op.type, attrs, tuple(operands), tuple((t.shape, t.dtype) for t in op.outputs))
