"""Weights are gathered for each pass over the layers, block by block, and nothing keeps them."""

from __future__ import annotations

import pytest

from tests.graphs import saved
from tfpar.ir import Graph
from tfpar.ir.gathered_weights import (
    find_gathers,
    find_turn,
    gradient_of,
    is_scattered_gradient,
)
from tfpar.ir.passes.gather_weights import gather_weights
from tfpar.ir.planning_graph import planning_graph
from tfpar.ir.roles import BACKWARD, FORWARD, Roles


def gathered(name: str, keep: bool = False) -> tuple[Graph, Roles]:
    """A saved step that gathers all weights, those of a block together."""
    step = saved(name)
    graph = gather_weights(
        step.graph, groups(step.graph), names(step.graph) if keep else (), {}, Roles.of(step.graph)
    )
    return graph, Roles.of(graph)


def names(graph: Graph) -> list[str]:
    return [v.name for v in graph.variables if v.trainable]


def groups(graph: Graph) -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for name in names(graph):
        found.setdefault(block_of(name), []).append(name)
    return [*found.values()]


def block_of(weight: str) -> str:
    return "_".join(weight.split("/")[0].split("_")[:2])


def by_pass(graph: Graph, roles: Roles) -> tuple[list[str], list[str]]:
    """The weights that are gathered in the forward and in the backward pass."""
    found = {phase: [] for phase in (FORWARD, BACKWARD)}
    for tensor, name in find_gathers(graph).items():
        found[roles.phase[tensor.op]].append(name)
    return found[FORWARD], found[BACKWARD]


@pytest.mark.parametrize("name", ["gpt", "t5", "gshard_moe", "resnet", "recurrent"])
def test_each_pass_gathers_what_it_reads_and_keeps_nothing(name):
    graph, roles = gathered(name)
    forward, backward = by_pass(graph, roles)
    weights = [v.name for v in graph.variables if v.trainable]
    assert sorted(set(forward)) == sorted(weights), "each is read"
    assert set(backward) < set(weights), "biases and the last layer are not gathered again"
    kept = {
        weight
        for tensor, weight in find_gathers(graph).items()
        if roles.phase[tensor.op] == FORWARD and reaches_backward(graph, roles, tensor)
    }
    assert not kept & set(backward)


def reaches_backward(graph: Graph, roles: Roles, tensor) -> bool:
    """Whether the backward pass reads a gathered weight, or what is made of it alone."""
    readers = graph.consumers()
    fed = set(graph.inputs)
    for op in graph.ops:
        if any(t in fed for t in op.inputs):
            fed.update(op.outputs)
    todo = [tensor]
    while todo:
        for op in readers.get(todo.pop(), ()):
            if roles.phase[op] == BACKWARD:
                return True
            todo += [t for t in op.outputs if t not in fed]
    return False


def test_the_weights_of_a_block_wait_for_the_block_before():
    graph, roles = gathered("gpt")
    turns = {}
    for tensor, weight in find_gathers(graph).items():
        phase = roles.phase[tensor.op]
        turns.setdefault((phase, block_of(weight)), set()).add(find_turn(tensor.op))
    assert all(len(found) == 1 for found in turns.values()), turns
    first, second = (turns[FORWARD, f"block_{i}"] for i in (0, 1))
    assert first != second and turns[FORWARD, "tokens"] == {frozenset()}
    (waits,) = (name for turn in second for name in turn)
    assert "block_0" in waits, "what block 0 begins with"
    (waits,) = (name for turn in turns[BACKWARD, "block_0"] for name in turn)
    assert "block_1" in waits


def test_what_is_kept_is_gathered_once():
    graph, roles = gathered("gpt", keep=True)
    forward, backward = by_pass(graph, roles)
    assert forward and not backward


def test_the_update_reads_gradients_scattered():
    step = saved("gpt")
    cut = planning_graph(step.graph, step.gradients)
    handles = {v.handle: v.name for v in cut.graph.variables}
    gradients = {handles[op.inputs[0]]: op.inputs[1] for op in cut.stand_ins}
    graph = gather_weights(cut.graph, [], (), gradients, Roles.of(cut.graph))
    scattered = {gradient_of(op): op for op in graph.ops if is_scattered_gradient(op)}
    assert sorted(scattered) == sorted(names(graph))
    readers = graph.consumers()
    for op in scattered.values():
        (update,) = readers[op.outputs[0]]
        assert update.inputs[1] is op.outputs[0]
    dense = {g.variable: g.values for g in step.gradients if g.indices is None}
    bare = gather_weights(step.graph, [], (), dense, Roles.of(step.graph, dense.values()))
    assert not any(map(is_scattered_gradient, bare.ops)), "nothing updates"


def test_gathering_again_changes_nothing():
    once, roles = gathered("gpt")
    twice = gather_weights(once, groups(once), (), {}, roles)
    assert [op.name for op in twice.ops] == [op.name for op in once.ops]
