"""Function bodies: what loops, branches and calls of a program run, as TensorFlow functions."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from tfpar.ir.graph import FunctionRef, Graph, Op, Tensor, function_refs
from tfpar.tf.runtime.function_def import (
    FunctionWriter,
    RegisteredFunction,
    const_attrs,
    output_edges,
    serialize_attrs,
)


class BodyWriter:
    """Registers the bodies that the ops of a local graph name, once per device and rank.

    Ranks on one device share a body unless it holds constants in which they differ.
    """

    def __init__(self, functions: Mapping[str, Graph]) -> None:
        self._functions = functions
        self._made: dict[tuple, RegisteredFunction] = {}

    @property
    def registered(self) -> list[RegisteredFunction]:
        """Everything registered so far; dropping the list drops the functions."""
        return list(self._made.values())

    def attrs(self, op: Op, rank: int, device: str) -> bytes:
        """The attributes of `op` on `rank`, naming its bodies there."""
        # XLA compiles a body as a whole and places it itself.
        inside = "" if op.attrs.get("_XlaMustCompile") else device
        return serialize_attrs(
            {key: self._renamed(value, rank, inside) for key, value in op.attrs.items()}
        )

    def _renamed(self, value: Any, rank: int, device: str) -> Any:
        if isinstance(value, list):
            return [self._renamed(v, rank, device) for v in value]
        if isinstance(value, FunctionRef) and value in self._functions:
            return FunctionRef(self._body(value, rank, device).name)
        return value

    def _body(self, name: str, rank: int, device: str) -> RegisteredFunction:
        key = (name, device, rank if self._differs(name) else None)
        if key not in self._made:
            self._made[key] = self._write(name, rank, device)
        return self._made[key]

    def differ(self, op: Op) -> bool:
        """Whether ranks differ in the bodies that `op` names."""
        return any(
            self._differs(ref)
            for ref in function_refs(*op.attrs.values())
            if ref in self._functions
        )

    @functools.cache  # noqa: B019 - lives as long as linking takes
    def _differs(self, name: str) -> bool:
        """Whether ranks differ in the body `name`."""
        body = self._functions[name]
        return any(op.type == "RankConst" or self.differ(op) for op in body.ops)

    def _write(self, name: str, rank: int, device: str) -> RegisteredFunction:
        body = self._functions[name]
        writer = FunctionWriter(re.sub(r"\W", "_", f"tfpar_{name}_r{rank}"))
        edges: dict[Tensor, str] = {}
        for i, tensor in enumerate(body.inputs):
            edges[tensor] = writer.argument(f"in{i}", tensor.dtype)
        written: set[Op] = set()
        for op in body.ops:
            if op.type == "Placeholder":
                continue
            op_type, attrs = op.type, b""
            if op.type == "RankConst":
                op_type = "Const"
                attrs = const_attrs(op.attrs["values"][rank], op.outputs[0].dtype)
                suffixes = ["output:0"]
            else:
                attrs = (
                    const_attrs(op.attrs["value"], op.outputs[0].dtype)
                    if op.type == "Const"
                    else self.attrs(op, rank, device)
                )
                suffixes = output_edges(op)
            control = [c.name for c in op.control if c in written]
            writer.node(op.name, op_type, [edges[t] for t in op.inputs], attrs, device, control)
            written.add(op)
            for tensor, suffix in zip(op.outputs, suffixes, strict=True):
                edges[tensor] = f"{op.name}:{suffix}"
        for tensor in body.outputs:
            writer.output(edges[tensor], tensor.dtype)
        for op in body.effects:
            if op in written:
                writer.effect(op.name)
        return writer.register()


def has_bodies(op: Op) -> bool:
    return any(True for _ in function_refs(*op.attrs.values()))
