"""Offload: selection of slots and activations that stay in host memory between their uses (see
`ir.passes.slots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfpar.constraints.patterns import compile_pattern, some
from tfpar.ir.graph import Gradient, Graph
from tfpar.ir.passes.offload_activations import offload_activations
from tfpar.ir.passes.slots import needed_on_device, offload_slots
from tfpar.ir.roles import Roles
from tfpar.planning.memory.recompute import Blocks, with_changed_graph
from tfpar.planning.problem import Problem
from tfpar.plans import Offload, OffloadPlan
from tfpar.propagation.prepared_graph import prepare
from tfpar.spec import SpecError


def select_offloads(
    asked: Offload,
    graph: Graph,
    gradients: Sequence[Gradient] = (),
    state_ratio: float | None = None,
) -> OffloadPlan:
    """Select the names of what a user asks to have offloaded.

    Args:
        state_ratio: bytes of slots per byte of weight; None where the graph holds the slots.

    Raises:
        SpecError: a pattern that matches nothing.
    """
    slots = _chosen_weights(asked.optimizer, weights_with_slots(graph, state_ratio))
    if not asked.activations:
        return OffloadPlan(slots)
    blocks = Blocks.of(graph, gradients)
    option = "offload=tap.Offload(activations="
    return OffloadPlan(slots, blocks.chosen(asked.activations, option))


def weights_with_slots(graph: Graph, state_ratio: float | None) -> list[str]:
    """Return the names of weights that have optimizer slots; arguments as of `select_offloads`."""
    if state_ratio is None:
        having = {*slots_of(graph).values()}
        return [v.name for v in graph.variables if v.name in having]
    return [v.name for v in graph.variables if v.trainable and state_ratio]


def _chosen_weights(asked: bool | Sequence[str], weights: Sequence[str]) -> tuple[str, ...]:
    if isinstance(asked, bool):
        return tuple(weights) if asked else ()
    found: dict[str, None] = {}
    for pattern in asked:
        names = [*filter(compile_pattern(pattern).fullmatch, weights)]
        if not names:
            there = f"There are {some(weights)}" if weights else "No weight has any"
            raise SpecError(
                f"offload=tap.Offload(optimizer={pattern!r}) matches no weight that has optimizer "
                f"slots. {there}."
            )
        found.update(dict.fromkeys(names))
    return tuple(found)


def slots_of(graph: Graph) -> dict[str, str]:
    """Return the optimizer slots of a graph that holds the optimizer: the weight of each, by
    name."""
    return {slot.name: weight.name for slot, (weight, _) in prepare(graph).followed.items()}


def bound_to_device(graph: Graph) -> frozenset[str]:
    """Return the names of weights with slots that an op of the graph needs on the device."""
    state = [v.name for v in graph.variables if not v.trainable]
    needed = needed_on_device(graph, state)
    slots = slots_of(graph) if needed else {}  # which takes a moment to find out
    return frozenset(slots[name] for name in needed if name in slots)


def offload_graph_slots(
    graph: Graph, weights: Sequence[str], slots: Mapping[str, str], gradients: Sequence[Gradient]
) -> Graph:
    """Return a copy of `graph` in which the slots of these weights are in host memory.

    Args:
        slots: `slots_of` the graph.

    Raises:
        PlanError: an op needs a slot on the device.
    """
    own = {slot: weight for slot, weight in slots.items() if weight in weights}
    return offload_slots(graph, weights, own, gradients)


def offload_graph_activations(
    graph: Graph, names: Sequence[str], gradients: Sequence[Gradient] = ()
) -> Graph:
    """Return a copy of `graph` that has in host memory what the blocks called so keep.

    Raises:
        PlanError: no such block.
    """
    told = "has in host memory what {} keeps for the backward pass"
    blocks = Blocks.of(graph, gradients).named(names, told)
    roles = Roles.of(graph, [t for g in gradients for t in g.tensors])
    return offload_activations(graph, blocks, roles)


def offloaded_problem(problem: Problem, names: OffloadPlan) -> Problem:
    """Return the problem of planning the step so. It keeps its fingerprint: that of the step.

    Where devices compute in the memory of their hosts, it is the same: nothing is saved or copied.
    """
    if not names or problem.cluster.in_host_memory:
        return problem
    known = problem.memo.of(OffloadedProblems)
    if names not in known:
        known[names] = _offloaded_problem(problem, names)
    return known[names].with_settings_of(problem)


def _offloaded_problem(problem: Problem, names: OffloadPlan) -> Problem:
    known, key = problem.step.graph_memo.of(OffloadedGraphs), (problem.step.graph, names)
    if key not in known:
        graph = problem.step.graph
        if names.activations:
            graph = offload_graph_activations(graph, names.activations)
        slots = slots_of(graph) if problem.step.state_ratio is None else {}
        known[key] = offload_graph_slots(graph, names.slots, slots, ())
    return with_changed_graph(problem, known[key])


class OffloadedProblems(dict[OffloadPlan, Problem]):
    """Problems whose graphs have things in host memory, by what."""


class OffloadedGraphs(dict[tuple[Graph, OffloadPlan], Graph]):
    """Graphs that have things in host memory, by graph and what."""
