"""Graphs to text; the form is described in `tfpar.ir.text`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from tfpar.ir.graph import Gradient, Graph, Op, Tensor
from tfpar.ir.step import StepGraph
from tfpar.ir.text.values import attributes_text, name_text, shape_text, tensor_text

_INDENT = "  "


def format_graph(graph: Graph, notes: Mapping[Op, str] | None = None) -> str:
    """Format the graph as text, which `parse_graph` reads back.

    Control edges and effects that name ops outside of the graph mean nothing and are left out.

    Args:
        notes: comments behind ops.
    """
    return "\n".join(_Writer(notes or {}).block("graph", graph)) + "\n"


def format_step(step: StepGraph, notes: Mapping[Op, str] | None = None) -> str:
    """Format the step as text, which `parse_step` reads back."""
    lines = _Writer(notes or {}).block("graph", step.graph, step.num_arguments, step.gradients)
    return "\n".join(lines) + "\n"


class _Writer:
    """Writes one graph with the bodies that it names."""

    def __init__(self, notes: Mapping[Op, str]) -> None:
        self.notes = notes

    def block(
        self,
        head: str,
        graph: Graph,
        num_arguments: int | None = None,
        gradients: Sequence[Gradient] = (),
        around: Mapping[str, Graph] | None = None,
    ) -> Iterator[str]:
        """The lines of a graph or a body.

        Args:
            around: the functions of the graph that the body is of.
        """
        yield f"{head}({_inputs_text(graph, num_arguments)}) {{"
        for line in self._inside(graph, gradients, around):
            yield f"{_INDENT}{line}"
        yield "}"

    def _inside(
        self, graph: Graph, gradients: Sequence[Gradient], around: Mapping[str, Graph] | None
    ) -> Iterator[str]:
        for variable in graph.variables:
            flags = ", trainable" if variable.trainable else ""
            flags += ", offloaded" if variable.offloaded else ""
            place = f", place {json.dumps(variable.place)}" if variable.place else ""
            kind = f"{variable.dtype}{shape_text(variable.shape)}"
            handle = tensor_text(variable.handle)
            yield f"variable {json.dumps(variable.name)}: {kind} = {handle}{flags}{place}"
        present = set(graph.ops)
        for op in graph.ops:
            yield self._op_text(op, present)
        for gradient in gradients:
            tensors = ", ".join(map(tensor_text, gradient.tensors))
            yield f"gradient {json.dumps(gradient.variable)} = {tensors}"
        effects = [op for op in graph.effects if op in present]
        if effects:
            yield f"effects({_ops_text(effects)})"
        yield f"return({', '.join(map(tensor_text, graph.outputs))})"
        if graph.functions is not around:
            for name, body in graph.functions.items():
                head = f"function @{name_text(name)}"
                yield from self.block(head, body, around=graph.functions)

    def _op_text(self, op: Op, present: set[Op]) -> str:
        kinds = [f"{t.dtype}{shape_text(t.shape)}" for t in op.outputs]
        kind = kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"
        text = f"%{name_text(op.name)}: {kind} = {name_text(op.type)}"
        if op.inputs:
            text += f"({', '.join(map(tensor_text, op.inputs))})"
        if op.attrs:
            text += f" {attributes_text(op.attrs)}"
        if op.stateful:
            text += " stateful"
        control = [c for c in op.control if c in present]
        if control:
            text += f" after({_ops_text(control)})"
        note = self.notes.get(op)
        return f"{text}  // {note}" if note else text


def _ops_text(ops: Sequence[Op]) -> str:
    return ", ".join(f"%{name_text(op.name)}" for op in ops)


def _inputs_text(graph: Graph, num_arguments: int | None) -> str:
    def listed(tensors: Sequence[Tensor]) -> str:
        return ", ".join(map(tensor_text, tensors))

    if num_arguments is None or num_arguments == len(graph.inputs):
        return listed(graph.inputs)
    return f"{listed(graph.inputs[:num_arguments])}; {listed(graph.inputs[num_arguments:])}"
