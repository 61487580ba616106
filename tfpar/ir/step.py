"""A step as a graph, and what is known of the layers of its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tfpar.ir.graph import Gradient, Graph, Tensor


@dataclasses.dataclass(eq=False)
class StepGraph:
    """A step, as data.

    Attributes:
        graph: its inputs are the step's arguments, then tensors from outside that it reads.
        num_arguments: how many graph inputs are arguments.
        gradients: what enters the optimizers, in order, as tensors of `graph`; empty for a step
            without one. `rewrite` keeps them valid.
        layers: of the model, for messages; empty where there is none.
    """

    graph: Graph
    num_arguments: int
    gradients: list[Gradient] = dataclasses.field(default_factory=list, kw_only=True)
    layers: Sequence[ModelLayer] = dataclasses.field(default=(), kw_only=True)

    @property
    def arguments(self) -> list[Tensor]:
        """The graph inputs that are arguments."""
        return self.graph.inputs[: self.num_arguments]

    @property
    def gradient_tensors(self) -> list[Tensor]:
        """The tensors of all gradients, in order."""
        return [t for g in self.gradients for t in g.tensors]

    def rewrite(self, passes: Callable[[Graph], Graph]) -> None:
        """Put `passes(graph)` in the place of `graph`; what marks tensors follows them."""
        before, outputs = self.graph, self.graph.outputs
        before.outputs = [*outputs, *self.gradient_tensors]
        self.graph = passes(before)
        rewritten = iter(self.graph.outputs[len(outputs) :])
        self.gradients = [
            Gradient(g.variable, *(next(rewritten) for _ in g.tensors)) for g in self.gradients
        ]
        del self.graph.outputs[len(outputs) :]
        if self.graph is not before:
            before.outputs = outputs


# --- layers ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModelLayer:
    """A layer, or the model itself.

    Attributes:
        path: its name in those of the layers around it, as Keras gives it: `block_0/attention`.
        class_name: `Dense`.
        source: the line of the user's program that makes it, `model.py:42`; empty where that is
            not known.
    """

    path: str
    class_name: str
    source: str = ""
