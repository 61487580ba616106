"""Fast path for nearly all of a graph: ops that run as they ran before.

Most ops are *ordinary* (`PreparedGraph.ordinary`): how they run depends on their rule and the specs
of their inputs. A search takes this way millions of times, so it does nothing that can be done
once.
"""

from __future__ import annotations

from collections.abc import Callable

from tfpar.ir.graph import Op
from tfpar.propagation.decide import FREE
from tfpar.propagation.state import PropagationState
from tfpar.propagation.step import keep, move


def make_fast_path(state: PropagationState) -> Callable[[Op], bool]:
    """Make a function that takes an op's step if it was decided before; else it answers False."""
    prepared, mesh, specs = state.prepared, state.mesh, state.specs
    if state.whole or state.confined or state.anchors.tensors:
        return lambda op: False
    ordinary, decisions = prepared.ordinary, state.result.decisions
    known = prepared.caches.decisions
    repeated = prepared.caches.repeated.setdefault(mesh, {})

    def repeat(op: Op) -> bool:
        found = ordinary.get(op)
        if found is None:
            return False
        rule, deferred, keeps = found
        arriving = tuple([specs[t] for t in op.inputs])
        decision = repeated.get((rule, arriving, deferred))
        if decision is None:
            if FREE in arriving:
                return False
            loose = (False,) * len(arriving)
            decision = known.get((rule, arriving, loose, mesh, False, (), deferred, False))
            if decision is None:
                return False
            repeated[rule, arriving, deferred] = decision
        strategy = decision.strategy
        if strategy.in_specs != arriving:
            for tensor, need in zip(op.inputs, strategy.in_specs, strict=True):
                move(state, tensor, need)
        decisions[op] = decision
        if keeps and not decision.makes_partials:
            for tensor, made in zip(op.outputs, strategy.out_specs, strict=True):
                specs[tensor] = made
        else:
            keep(state, op, decision)
        return True

    return repeat
