"""View of a pass for strategies: the graph, the mesh, and the specs so far.

Strategies (`consumer_spec`, `open_weights`, `generated_dims`, `own_splits`) read it and answer;
they write nothing. A `PropagationState` is a view; a test makes one of three fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tfpar.ir.graph import Tensor
from tfpar.propagation.factors import WHOLE, spec_of, splits_of
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.spec import Mesh, Spec


class View(Protocol):
    """View of a pass over a graph, as strategies see it."""

    @property
    def prepared(self) -> PreparedGraph:
        """The graph and what is known of it whatever the plan."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def specs(self) -> Mapping[Tensor, Spec | None]:
        """Specs of tensors so far; FREE for those that are open."""

    def anchor_of(self, tensor: Tensor) -> Spec | None:
        """Return the spec that the plan gives a tensor by its name."""


def settled_spec(view: View, tensor: Tensor) -> Spec | None:
    """Return the spec of `tensor`, or of the variable it reads, if it is settled by now."""
    spec = view.specs.get(tensor)
    if spec is None and tensor.op.type == "ReadVariableOp":
        return view.specs.get(tensor.op.inputs[0])
    return spec


def known_spec(view: View, tensor: Tensor) -> Spec | None:
    """Return the spec of `tensor` if it is settled by now, or follows from that of the weight it
    holds."""
    spec = view.specs.get(tensor)
    if spec is not None or tensor not in view.prepared.weights or not tensor.op.inputs:
        return spec
    source = known_spec(view, tensor.op.inputs[0])
    if source is None:
        return None
    sizes, known = view.mesh.shape, view.prepared.caches.known_specs
    spec = known.get((sizes, tensor, source))
    if spec is None:
        rule = view.prepared.rules[tensor.op]
        splits = splits_of(rule.inputs[0], source, rule.sizes, sizes)
        chosen = tuple(WHOLE if s is None else s for s in splits)
        spec = spec_of(rule.outputs[0], rule, chosen, sizes, is_output=True)
        known[sizes, tensor, source] = spec
    return spec
