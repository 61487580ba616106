"""Tensors on branches side by side are moved together, and no two of them wait for each other."""

import collections

import pytest

from tests.graphs import saved
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import DType, Tensor, Variable
from tfpar.ir.packing_groups import moved_together
from tfpar.ir.roles import Roles


class Layers:
    """A graph of products with weights of their own."""

    def __init__(self) -> None:
        self.build = GraphBuilder()
        self.x = self._source("x", (4, 4), "float32")
        self.build.graph.inputs.append(self.x)

    def _source(self, name, shape, dtype):
        attrs = {"dtype": DType(dtype)}
        return self.build.emit("Placeholder", (), [(shape, dtype)], attrs, name).outputs[0]

    def made(self, op_type, *inputs) -> Tensor:
        return self.build.one(op_type, inputs, (4, 4), "float32")

    def product(self, x: Tensor) -> Tensor:
        handle = self._source("handle", (4, 4), "resource")
        self.build.graph.variables.append(Variable("w", (4, 4), "float32", True, handle))
        return self.made("MatMul", x, self.made("ReadVariableOp", handle))

    def attention(self, x: Tensor, source: Tensor) -> list[Tensor]:
        """[query, key, value, what comes out]."""
        q, k, v = self.product(x), self.product(source), self.product(source)
        return [q, k, v, self.made("MatMul", self.made("MatMul", q, k), v)]

    def together(self, *tensors) -> list[int | None]:
        found = moved_together(self.build.graph, ())
        return [found.get(t) for t in tensors]


def test_what_is_made_of_one_tensor_is_moved_together_and_so_are_the_weights_read():
    layers = Layers()
    q, k, v, out = layers.attention(layers.x, layers.x)
    biased = layers.made("BiasAdd", q, layers.product(layers.x).op.inputs[1])
    one, two, three, biased, out = layers.together(q, k, v, biased, out)
    assert one is not None and one == two == three == biased
    assert out is None
    weights = layers.together(*(t.op.inputs[1] for t in (q, k, v)))
    assert len(set(weights)) == 1 and weights[0] not in (None, one)


def test_on_a_branch_what_a_further_product_makes_is_moved_later():
    layers = Layers()
    firsts = [layers.product(layers.x) for _ in range(2)]
    seconds = [layers.product(layers.made("Relu", t)) for t in firsts]
    first, other, second, last = layers.together(*firsts, *seconds)
    assert first == other and second == last and first != second
    assert None not in (first, second)


def test_layers_that_look_at_the_same_do_so_one_after_another():
    layers = Layers()
    first = layers.attention(layers.x, layers.x)
    second = layers.attention(first[3], layers.x)
    _, k1, v1, _ = layers.together(*first)
    _, k2, v2, _ = layers.together(*second)
    assert k1 == v1 and k2 == v2 and k1 != k2 and None not in (k1, k2)


def test_what_is_added_up_is_moved_together():
    layers = Layers()
    roots = [layers.made("MatMul", layers.x, layers.made("Tanh", layers.x)) for _ in range(2)]
    layers.made("AddN", *(layers.product(t) for t in roots))
    one, other = layers.together(*roots)
    assert one == other is not None


@pytest.mark.parametrize("name", ["gpt_5_layers", "moe_4_layers", "resnet"])
def test_nothing_waits_for_what_it_is_moved_with(name):
    step = saved(name)
    roles = Roles.of(step.graph, step.gradient_tensors)
    groups = collections.defaultdict(list)
    for tensor, number in roles.together.items():
        groups[number].append(tensor)
    assert groups and all(len(own) > 1 for own in groups.values())
    for own in groups.values():
        assert not roles.deferrable.intersection(own)
        branches = _independent(own, step.graph)
        assert branches > 1, own


def _independent(tensors, graph) -> int:
    """How many of some tensors wait for none of the others."""
    wanted, reached = set(tensors), set()
    for op in graph.ops:
        if any(t in reached or t in wanted for t in op.inputs):
            reached.update(op.outputs)
    return len(wanted - reached)
