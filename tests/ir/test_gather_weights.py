"""Weights are gathered for each pass over the layers, block by block, and nothing keeps them."""

from __future__ import annotations

import dataclasses

import pytest

from tests.graphs import saved
from tfpar.ir import Graph
from tfpar.ir.gathered_weights import (
    find_gathers,
    find_turn,
    gradient_of,
    is_scattered_gradient,
)
from tfpar.ir.planning_graph import planning_graph
from tfpar.ir.roles import BACKWARD, FORWARD, Roles
from tfpar.planning.memory.gathered_weights import gather_graph_weights
from tfpar.spec import Replicate, Shard, Spec


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A weight that is gathered."""

    spec: Spec = (Shard(0),)
    slots: Spec | None = None
    gathered: Spec | None = (Replicate(),)
    keep_gathered: bool = False
    scatters_gradient: bool = False


def gathered(name: str, **said) -> tuple[Graph, Roles]:
    step = saved(name)
    weights = {v.name: Sharded(**said) for v in step.graph.variables if v.trainable}
    graph = gather_graph_weights(step.graph, weights, step.gradients)
    return graph, Roles.of(graph)


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
        turns.setdefault((phase, weight.split("/")[0][: len("block_0")]), set()).add(
            find_turn(tensor.op)
        )
    assert all(len(found) == 1 for found in turns.values()), turns
    first, second = (turns[FORWARD, f"block_{i}"] for i in (0, 1))
    assert first != second and turns[FORWARD, "tokens"] == {frozenset()}
    (waits,) = (name for turn in second for name in turn)
    assert "block_0" in waits, "what block 0 begins with"
    (waits,) = (name for turn in turns[BACKWARD, "block_0"] for name in turn)
    assert "block_1" in waits


def test_what_is_kept_is_gathered_once():
    graph, roles = gathered("gpt", keep_gathered=True)
    forward, backward = by_pass(graph, roles)
    assert forward and not backward


def test_the_update_reads_gradients_scattered():
    step = saved("gpt")
    cut = planning_graph(step.graph, step.gradients)
    weights = {v.name: Sharded(scatters_gradient=True) for v in cut.graph.variables if v.trainable}
    graph = gather_graph_weights(cut.graph, weights, updates=cut.stand_ins)
    scattered = {gradient_of(op): op for op in graph.ops if is_scattered_gradient(op)}
    assert scattered.keys() == weights.keys()
    readers = graph.consumers()
    for op in scattered.values():
        (update,) = readers[op.outputs[0]]
        assert update.inputs[1] is op.outputs[0]
    bare = gather_graph_weights(step.graph, weights, step.gradients)
    assert not any(map(is_scattered_gradient, bare.ops)), "nothing updates"


def test_gathering_again_changes_nothing():
    step = saved("gpt")
    weights = {v.name: Sharded() for v in step.graph.variables if v.trainable}
    once = gather_graph_weights(step.graph, weights)
    twice = gather_graph_weights(once, weights)
    assert [op.name for op in twice.ops] == [op.name for op in once.ops]
