"""What putting back variables does not undo."""

from __future__ import annotations

from tests.propagation.by_hand import FLOAT, ByHand
from tfpar.ir.effects import find_lasting_effect
from tfpar.ir.graph import FunctionRef, Graph


def step() -> ByHand:
    """Adds to a weight what is fed and what is drawn."""
    build = ByHand(Graph())
    x, handle = build.fed("x", 4), build.variable("w", 4)
    drawn = build.emit("RandomUniform", (x,), [((4,), "float32")], {"dtype": FLOAT}, stateful=True)
    build.update(handle, build.one("AddV2", (x, drawn.outputs[0]), (4,), "float32"))
    return build


def test_updates_and_draws_can_be_undone():
    assert find_lasting_effect(step().graph) is None


def test_a_python_function_lasts_in_whatever_body():
    body, build = step(), step()
    told = body.emit("EagerPyFunc", (body.graph.inputs[0],), [((4,), "float32")], stateful=True)
    assert find_lasting_effect(body.graph) is told
    build.graph.functions["body"] = body.graph
    (fed,) = build.graph.inputs
    branches = {"branches": [FunctionRef("body")]}
    build.emit("Case", (fed, fed), [((4,), "float32")], branches, stateful=True)
    assert find_lasting_effect(build.graph) is told
