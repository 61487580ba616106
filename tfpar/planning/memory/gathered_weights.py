"""FSDP: weights that ranks store in parts and gather, block by block, for each pass over the layers
(see `ir.passes.gather_weights`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tfpar.ir.gathered_weights import GatheredWeight, gathered_tensors
from tfpar.ir.graph import Gradient, Graph, Op
from tfpar.ir.passes.gather_weights import gather_weights
from tfpar.ir.roles import Roles
from tfpar.planning.memory.recompute import Blocks, with_changed_graph
from tfpar.planning.problem import ConstrainedSpec, Problem


class Gathered(GatheredWeight, Protocol):
    """A weight that may be gathered; see `plans.PlannedVariable`."""

    @property
    def keep_gathered(self) -> bool: ...


def gathered_problem(problem: Problem, variables: Mapping[str, Gathered]) -> Problem:
    """Return the problem of the step that gathers weights, and scatters gradients, as these
    variables say. It keeps its fingerprint: that of the step."""
    changed = {
        name: variable
        for name, variable in variables.items()
        if variable.gathered is not None or variable.scatters_gradient
    }
    if not changed:
        return problem
    key = frozenset(
        (name, one.spec, one.slots, one.gathered, one.keep_gathered, one.scatters_gradient)
        for name, one in changed.items()
    )
    known = problem.memo.of(GatheredProblems)
    if key not in known:
        known[key] = _gathered_problem(problem, changed)
    return known[key].with_settings_of(problem)


def _gathered_problem(problem: Problem, weights: Mapping[str, Gathered]) -> Problem:
    known, before = problem.step.graph_memo.of(GatheredGraphs), problem.step.graph
    done = frozenset(
        (name, one.gathered is not None, one.keep_gathered, one.scatters_gradient)
        for name, one in weights.items()
    )
    if (before, done) not in known:
        updates = () if problem.step.state_ratio is None else problem.step.zero_cost_ops
        made = gather_graph_weights(before, weights, updates=updates)
        known[before, done] = known[made, done] = made
    graph = known[before, done]
    if graph is before:
        return problem
    fixed = gathered_tensors(graph, weights)
    given = {name: ConstrainedSpec(spec, "gathered for its layer") for name, spec in fixed.items()}
    found = with_changed_graph(problem, graph)
    return found.with_given(tensors={**found.given.tensors, **given})


class GatheredProblems(dict[frozenset[tuple[object, ...]], Problem]):
    """Problems whose graphs gather weights and scatter gradients, by what is said of these."""


class GatheredGraphs(dict[tuple[Graph, frozenset[tuple[str, bool, bool, bool]]], Graph]):
    """Graphs that gather weights and scatter gradients, by the graph before and what is done with
    each weight."""


def gather_graph_weights(
    graph: Graph,
    weights: Mapping[str, Gathered],
    gradients: Sequence[Gradient] = (),
    updates: Collection[Op] = (),
) -> Graph:
    """Return a copy of `graph` that gathers those of these weights which are gathered, those of a
    block at the same time, and scatters the gradients of those which are scattered.

    Args:
        gradients: of a whole step.
        updates: of a step that is cut at its gradients: what stands for the optimizer.
    """
    roles = Roles.of(graph, [t for g in gradients for t in g.tensors])
    gathered = [n for n, v in weights.items() if v.gathered is not None]
    kept = [n for n in gathered if weights[n].keep_gathered]
    names = {v.handle: v.name for v in graph.variables}
    readers = graph.consumers()
    dense = {g.variable: g.values for g in gradients if g.indices is None}
    dense |= {  # the rows of a sparse one, added up
        g.variable: op.outputs[0]
        for g in gradients
        if g.indices is not None
        for op in readers.get(g.values, ())
        if op.type == "UnsortedSegmentSum"
    }
    dense |= {names[op.inputs[0]]: op.inputs[1] for op in updates}
    scattered = {n: g for n, g in dense.items() if n in weights and weights[n].scatters_gradient}
    return gather_weights(graph, _groups(graph, gathered, gradients), kept, scattered, roles)


def _groups(
    graph: Graph, weights: Collection[str], gradients: Sequence[Gradient]
) -> list[list[str]]:
    """Put together the weights of each block that repeats; of the others, those of a layer."""
    block_of = {op: name for name, ops in Blocks.of(graph, gradients).ops.items() for op in ops}
    readers = graph.consumers()
    groups: dict[str, list[str]] = {}
    for variable in graph.variables:
        if variable.name in weights:
            using = readers.get(variable.handle, ())
            blocks = (block_of[op] for op in using if op in block_of)
            layer = variable.name.rpartition("/")[0]
            groups.setdefault(next(blocks, layer), []).append(variable.name)
    return [*groups.values()]
