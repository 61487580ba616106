"""Products that only the update waits for run behind the collectives that all else waits for."""

from __future__ import annotations

from tfpar.compile.local.early_collectives import start_collectives_early
from tfpar.compile.local.packing import pack_collectives
from tfpar.compile.local.reshard import all_reduce
from tfpar.ir import DType, Graph, GraphBuilder, Op, Tensor


class Backward:
    """Gradients of some layers `Y = X W`, written in the order that is worst: dW first."""

    def __init__(self) -> None:
        self.build = GraphBuilder(Graph())

    def input(self, *shape: int) -> Tensor:
        op = self.build.emit("Placeholder", (), [(shape, "float32")], {}, name="in")
        return op.outputs[0]

    def product(self, name: str, x: Tensor, y: Tensor, *shape: int) -> Tensor:
        attrs = {"T": DType("float32")}
        made = self.build.emit("MatMul", (x, y), [(shape, "float32")], attrs, name=name)
        return made.outputs[0]

    def layer(self, gradient: Tensor, *, reduce_weights: bool = False) -> Tensor:
        """dX, summed over ranks, of a layer whose result has `gradient`."""
        weights = self.product("dW", self.input(8, 4), gradient, 4, 4)
        self.update(all_reduce(self.build, weights, (0,), "sum") if reduce_weights else weights)
        inputs = self.product("dX", gradient, self.input(4, 4), 8, 4)
        viewed = self.build.reshape(inputs, (2, 4, 4))
        summed = self.build.reshape(all_reduce(self.build, viewed, (1,), "sum"), (8, 4))
        return self.build.unary("Tanh", summed)

    def update(self, tensor: Tensor) -> None:
        self.build.graph.effects.append(self.build.unary("Neg", tensor).op)

    def early(self) -> dict[str, Op]:
        graph = start_collectives_early(self.build.graph)
        seen: set[Op] = set()
        for op in graph.ops:
            assert all(b in seen for b in (*(t.op for t in op.inputs), *op.control))
            seen.add(op)
        return {op.name: op for op in graph.ops}


def test_the_gradient_of_weights_waits_until_that_of_inputs_is_sent():
    backward = Backward()
    gradient = backward.layer(backward.layer(backward.input(8, 4)))
    backward.update(gradient)
    ops = backward.early()
    for weights, inputs in (("dW", "dX"), ("dW_1", "dX_1")):
        (sent,) = ops[weights].control
        assert sent.type == "Reshape" and sent.inputs[0].op is ops[inputs]
        assert not ops[inputs].control


def test_sums_of_several_products_are_sent_first():
    backward = Backward()
    gradients = [backward.input(8, 4) for _ in range(3)]
    for i, gradient in enumerate(gradients):
        backward.update(backward.product(f"dW{i}", backward.input(8, 4), gradient, 4, 4))
    parts = [
        backward.product(f"dX{i}", g, backward.input(4, 4), 8, 4) for i, g in enumerate(gradients)
    ]
    attrs = {"T": DType("float32"), "N": 3}
    added = backward.build.one("AddN", parts, (8, 4), "float32", attrs)
    backward.update(backward.layer(all_reduce(backward.build, added, (1,), "sum")))
    ops = backward.early()
    assert all(ops[f"dW{i}"].control == [added.op] for i in range(3))


def test_what_everything_waits_for_does_not_wait_for_the_gradients_of_weights():
    backward = Backward()
    gradient = backward.layer(backward.input(8, 4), reduce_weights=True)
    backward.update(backward.layer(gradient, reduce_weights=True))
    ops = backward.early()
    assert ops["dW"].control and ops["dW_1"].control
    assert not ops["dX"].control and not ops["dX_1"].control


def test_a_product_that_leads_to_the_collective_does_not_wait_for_it():
    backward = Backward()
    x, w = backward.input(8, 4), backward.input(4, 4)
    first = backward.product("first", x, w, 8, 4)
    second = backward.product("second", first, w, 8, 4)
    backward.update(backward.layer(all_reduce(backward.build, second, (1,), "sum")))
    assert not backward.early()["first"].control


def test_residual_sums_hold_no_product_up():
    backward = Backward()
    gradient = backward.input(8, 4)
    weights = backward.product("dW", backward.input(8, 4), gradient, 4, 4)
    backward.update(weights)
    inputs = backward.product("dX", gradient, backward.input(4, 4), 8, 4)
    further = backward.layer(inputs)
    added = backward.build.binary("AddV2", inputs, further)
    backward.update(all_reduce(backward.build, added, (1,), "sum"))
    assert not backward.early()["dW"].control


def test_buckets_of_gradients_are_as_without():
    def buckets(early: bool) -> list[int]:
        backward = Backward()
        gradient = backward.input(8, 4)
        for _ in range(4):
            gradient = backward.layer(gradient, reduce_weights=True)
        backward.update(gradient)
        if early:
            backward.early()
        graph = pack_collectives(backward.build.graph)
        return [
            len(op.inputs)
            for op in graph.ops
            if op.type == "AllReduce" and op.attrs["axes"] == (0,)
        ]

    assert buckets(early=True) == buckets(early=False) == [4]
