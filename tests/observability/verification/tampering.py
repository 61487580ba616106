"""Errors of collectives and transfers: what ranks exchange in one process is tampered with.

An error takes the edges that the ranks of a group put in, and gives those that they put in instead;
or it exchanges them as another op. So it is in the program of the mesh alone, whatever the plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfpar.ir import DType, Op, Tensor
from tfpar.tf.runtime.backends import in_process
from tfpar.tf.runtime.function_def import const_attrs, serialize_attrs

Linker = in_process._Linker
Change = Callable[["Exchange"], None]


@dataclasses.dataclass
class Exchange:
    """One tensor of a collective, in one group of ranks, before they meet.

    Attributes:
        edges: what each rank of the group puts in; an error changes it.
        name: of the nodes that an error adds.
    """

    linker: Linker
    op: Op
    tensor: Tensor
    group: Sequence[int]
    edges: list[str]
    name: str

    def product(self, position: int, factor: Any) -> str:
        """What a rank puts in, times a number or an array."""
        rank, dtype = self.group[position], self.tensor.dtype
        device, name = self.linker.devices[rank], f"{self.name}_{position}"
        value = np.asarray(factor, tf.as_dtype(dtype).as_numpy_dtype)
        self.linker.writer.node(f"{name}_by", "Const", (), const_attrs(value, dtype), device)
        self.linker.writer.node(
            name,
            "Mul",
            [self.edges[position], f"{name}_by:output:0"],
            serialize_attrs({"T": DType(dtype)}),
            device,
        )
        return f"{name}:z:0"


# --- errors -----------------------------------------------------------------------------


def scaled(factor: float, last_only: bool = False) -> Change:
    """All ranks, or the last, put in something larger or smaller."""

    def change(at: Exchange) -> None:
        positions = range(len(at.group))[-1:] if last_only else range(len(at.group))
        for i in positions:
            at.edges[i] = at.product(i, factor)

    return change


def reversed_order(at: Exchange) -> None:
    at.edges.reverse()


def rotated(at: Exchange) -> None:
    """Each rank puts in its neighbour's part."""
    at.edges[:] = [*at.edges[1:], at.edges[0]]


def first_twice(at: Exchange) -> None:
    """The last rank puts in the part of the first."""
    at.edges[-1] = at.edges[0]


def without_last_row(at: Exchange) -> None:
    """The last row of what the last rank puts in is missing."""
    shape = at.linker.program.shape_on(at.group[-1], at.tensor)
    mask = np.ones([shape[0], *[1] * (len(shape) - 1)] if shape else [])
    mask[-1:] = 0
    at.edges[-1] = at.product(-1 % len(at.group), mask)


def reduced_by(reduction: str) -> Callable[[Op], Op]:
    def change(op: Op) -> Op:
        return _copied(op, reduction=reduction)

    return change


def over_other_axes(op: Op) -> Op:
    """Of a mesh of two axes."""
    (axis,) = op.attrs["axes"]
    return _copied(op, axes=(1 - axis,))


def _copied(op: Op, **attrs: Any) -> Op:
    made = Op(op.name, op.type, attrs={**op.attrs, **attrs})
    made.inputs, made.outputs = op.inputs, op.outputs
    return made


# --- where they are planted -------------------------------------------------------------


def is_float(op: Op) -> bool:
    return all("float" in t.dtype for t in (*op.inputs, *op.outputs))


def has_rows(op: Op) -> bool:
    """No scalar: activations, weights, gradients."""
    return is_float(op) and all(t.shape for t in (*op.inputs, *op.outputs))


def is_gradient(op: Op) -> bool:
    """Of weights or activations, so that losses and metrics are right."""
    return has_rows(op) and "gradient_tape" in op.name


def has_one_axis(op: Op) -> bool:
    return is_float(op) and len(op.attrs["axes"]) == 1


@dataclasses.dataclass(frozen=True)
class Error:
    """A way in which a collective, or what is received, is wrong.

    Attributes:
        change: of what ranks put in.
        op: of what they exchange it by.
        result: of what ranks have put in and what comes of it, what each gets.
        only: the ops in which it is an error.
    """

    change: Change | None = None
    op: Callable[[Op], Op] = lambda op: op
    result: Callable[[list[str], list[str]], list[str]] | None = None
    only: Callable[[Op], bool] = is_float


ERRORS = {
    "scaled": Error(scaled(1.02)),
    "scaled gradients": Error(scaled(1.02), only=is_gradient),
    "doubled": Error(scaled(2.0)),
    "lost": Error(scaled(0.0, last_only=True)),
    "one rank scaled": Error(scaled(1.1, last_only=True)),
    "without last row": Error(without_last_row, only=has_rows),
    "reversed": Error(reversed_order),
    "first twice": Error(first_twice),
    "maximum": Error(op=reduced_by("max")),
    "other axis": Error(op=over_other_axes, only=has_one_axis),
    "dropped": Error(result=lambda given, made: given),
    "neighbour's": Error(result=lambda given, made: [*made[1:], made[0]]),
}


@contextlib.contextmanager
def tampered(kind: str, error: Error) -> Iterator[list[Op]]:
    """Ops of `kind`, collectives or `Recv`, are wrong inside; yields those that were."""
    right, right_recv = Linker._collective, Linker._recv
    found: list[Op] = []

    def collective(self: Linker, given: Op) -> None:
        if given.type != kind or not error.only(given):
            right(self, given)
            return
        found.append(given)
        ranks = [*self.ranks][: 1 if kind == "Broadcast" else None]  # those that put in something
        before = {(r, t): self.edges[r][t] for r in ranks for t in given.inputs}
        made = error.op(given)
        groups = self.mesh.groups(made.attrs["axes"])
        for n, group in enumerate(groups):
            for i, tensor in enumerate(given.inputs):
                change(self, given, tensor, [r for r in group if r in ranks], f"wrong{n}_{i}")
        right(self, made)
        for (rank, tensor), edge in before.items():
            self.edges[rank][tensor] = edge
        for group in groups if error.result is not None else ():
            for source, result in zip(given.inputs, given.outputs, strict=True):
                put_in = [self.edges[rank][source] for rank in group]
                got = [self.edges[rank][result] for rank in group]
                for rank, edge in zip(group, error.result(put_in, got), strict=True):
                    self.edges[rank][result] = edge

    def recv(self: Linker, given: Op) -> None:
        right_recv(self, given)
        if kind == "Recv" and error.only(given):
            found.append(given)
            change(self, given, given.outputs[0], self.ranks, "wrong")

    def change(linker: Linker, op: Op, tensor: Tensor, group: Sequence[int], name: str) -> None:
        if error.change is None:
            return
        edges = [linker.edges[rank][tensor] for rank in group]
        at = Exchange(linker, op, tensor, group, edges, f"{linker.scope}{op.name}/{name}")
        error.change(at)
        for rank, edge in zip(group, at.edges, strict=True):
            linker.edges[rank][tensor] = edge

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linker, "_collective", collective)
        patch.setattr(Linker, "_recv", recv)
        yield found
