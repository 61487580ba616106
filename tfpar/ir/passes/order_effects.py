"""Order of effects, made explicit: conflicting accesses wait for each other by edges of their own.

    r = Read(%step)                               r = Read(%step)
    u = Apply(%w, f(r), gradient)                 u = Apply(%w, f(r), gradient)
    c = Const() after(u)               becomes    c = Const()
    a = AssignAdd(%step, c)                       a = AssignAdd(%step, c) after(r)

Before, the order of `r` and `a` depends on a path through ops without effects. Passes move, fold
and repeat such ops, cut them into functions and share them out among ranks; so the path would have
to survive all of that. An edge between the accesses themselves is kept by every pass. A read then
waits for nothing but writes, and a constant for nothing: both can run wherever they are needed.

Graphs of TensorFlow 1 may leave conflicting accesses unordered. TensorFlow then runs them in any
order; ranks must agree on one. It is that of an executor with a kernel free for every op: accesses
come in the order of their depth in the graph, reads before writes of the same depth. So a variable
that is read for the learning rate is read before it is assigned, if the assignment computes
anything.
"""

from __future__ import annotations

from tfpar.ir.effects import Accesses, conflicts, live_ops
from tfpar.ir.graph import Graph, Op
from tfpar.ir.order import sort_topologically
from tfpar.ir.traits import CONSTANTS, VARIABLE_READS

_ANYTIME = CONSTANTS | VARIABLE_READS
"""Op types that need not wait for anything but the writes of what they read."""


def order_effects(graph: Graph) -> Graph:
    """Order conflicting accesses of `graph` and of its bodies, in place; returns `graph`."""
    accesses = Accesses(graph.functions)
    for body in graph.functions.values():
        _order(body, accesses)
    _order(graph, accesses)
    return graph


def _order(graph: Graph, accesses: Accesses) -> None:
    live = live_ops(graph)
    depth = _depths(graph)
    # Stable: of accesses that are alike the first in the graph comes first.
    ops = sorted((op for op in graph.ops if op in live), key=depth.__getitem__)
    waits: dict[Op, dict[Op, None]] = {}
    for each in accesses.by_resource(ops).values():
        each.sort(key=lambda access: (depth[access.op], access.writes))
        for before, after in conflicts(each):
            waits.setdefault(after, {})[before] = None
    effects = dict.fromkeys(graph.effects)
    for op in ops:
        own = waits.get(op, {})
        if op.type in _ANYTIME:
            # What it no longer waits for runs all the same.
            effects.update(dict.fromkeys(c for c in op.control if c not in own))
            op.control = []
        made = {t.op for t in op.inputs}
        op.control = list(dict.fromkeys((*op.control, *(o for o in own if o not in made))))
    graph.effects = list(effects)
    graph.ops = sort_topologically(graph.ops)


def _depths(graph: Graph) -> dict[Op, int]:
    """The length of the longest path to each op, in ops."""
    depth: dict[Op, int] = {}
    for op in graph.ops:
        depth[op] = 1 + max((depth[b] for b in op.predecessors), default=0)
    return depth
