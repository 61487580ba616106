"""Pattern routing (TAP §IV-E, Algorithm 3): whether the patterns of a plan connect.

Breadth first over the GraphNodes, in the order in which their inputs are ready: from the root (what
nothing feeds) to the leaf (the loss). A node is reached when all it reads from is and its pattern
takes what arrives: the propagation engine finds the collectives between them. It does not take it
if the engine finds no strategy for one of its ops, or if a split weight would be gathered for an op
that every rank then computes in full: such a Split is a Replica that communicates more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfpar.ir.graph import Op
from tfpar.ir.graph_nodes import GraphNode, NodeGraph


@dataclasses.dataclass(frozen=True)
class Routing:
    """Whether a plan is valid, and if not, where it breaks.

    Attributes:
        reason: names the GraphNode, the op and what does not fit; empty for a valid plan.
    """

    valid: bool
    reason: str = ""


VALID = Routing(True)


def pattern_routing(nodes: NodeGraph, refusing: Mapping[Op, str]) -> Routing:
    """Route a plan from root to leaf.

    Args:
        refusing: ops for which no pattern takes what arrives, and why.
    """
    if not refusing:
        return VALID
    node, why = min(
        ((nodes.node_of.get(op, GraphNode(op.name)), why) for op, why in refusing.items()),
        key=lambda found: nodes.order.get(found[0], len(nodes.order)),
    )
    return Routing(False, f"GraphNode {node.name!r}: {why}")
