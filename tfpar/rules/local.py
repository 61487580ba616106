"""View of an op on one rank for the `lower` of its rule: its local inputs, and its splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.rule import OpRule, Pattern
from tfpar.spec import Mesh, Replicate, Shard, Spec, local_indices, local_length, local_shape


@dataclasses.dataclass(frozen=True, eq=False)
class LocalOp:
    """An op about to be emitted on every rank.

    Attributes:
        op: the global op.
        rule: its rule.
        splits: per mesh axis (factor, pattern); a negative factor is none.
        inputs: local inputs, already resharded and, for reduced factors that do not
            divide, masked with the reduction's neutral element.
        out_specs: specs of the outputs.
        build: emits local ops.
    """

    op: Op
    rule: OpRule
    splits: tuple[tuple[int, Pattern], ...]
    mesh: Mesh
    inputs: Sequence[Tensor]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    build: GraphBuilder

    def is_split(self, factor: str) -> bool:
        """Whether some axis splits the factor called `factor`."""
        return factor in self.rule.names and any(
            f == self.rule.factor(factor) for f, _ in self.splits
        )

    def axes(self, factor: str) -> tuple[int, ...]:
        """The mesh axes that split the factor called `factor`."""
        if factor not in self.rule.names:
            return ()
        index = self.rule.factor(factor)
        return tuple(a for a, (split, _) in enumerate(self.splits) if split == index)

    def local_size(self, factor: str) -> int:
        """Stored size of the factor on a rank, padding included."""
        index = self.rule.factor(factor)
        size = self.rule.sizes[index]
        for axis, (split, pattern) in enumerate(self.splits):
            if split == index:
                size = local_length(size, Shard(0, *pattern), self.mesh, axis)
        return size

    def indices(self, factor: str) -> list[np.ndarray]:
        """Return for every rank the factor's global index of each stored entry; -1 is padding."""
        index = self.rule.factor(factor)
        spec: Spec = tuple(
            Shard(0, *pattern) if split == index else Replicate() for split, pattern in self.splits
        )
        return [
            local_indices(self.rule.sizes[index], 0, spec, self.mesh, self.mesh.coordinates(r))
            for r in range(self.mesh.size)
        ]

    def starts(self, factor: str) -> list[int]:
        """Return for every rank the global index of the first stored entry of a factor cut
        plainly."""
        index = self.rule.factor(factor)
        starts = []
        for rank in range(self.mesh.size):
            size, start = self.rule.sizes[index], 0
            coords = self.mesh.coordinates(rank)
            for axis, ((split, _), at) in enumerate(zip(self.splits, coords, strict=True)):
                if split == index:
                    before, size = self.mesh.block(axis, size, at)
                    start += before
            starts.append(start)
        return starts

    def offset(self, factor: str, dtype: str = "int32") -> Tensor:
        """Scalar: the global index of the first stored entry of a factor cut plainly."""
        return self.build.per_rank([np.asarray(s, dtype) for s in self.starts(factor)], dtype)

    def mask_padding(self, x: Tensor, position: int, dim: int, fill: Any) -> Tensor:
        """Set the padding of `x`, which has the spec of input `position`, along `dim` to `fill`."""
        length = self.op.inputs[position].shape[dim]
        spec = self.in_specs[position]
        keep = [
            local_indices(length, dim, spec, self.mesh, self.mesh.coordinates(r)) >= 0
            for r in range(self.mesh.size)
        ]
        if all(k.all() for k in keep):
            return x
        return self.build.mask(x, self.build.per_rank(keep), dim, fill)

    def filled(self, position: int, fill: Any) -> Tensor:
        """Input `position` with all of its padding set to `fill`.

        Padding is any value: what an op could fail on (an index, a divisor) needs a good one.
        """
        x = self.inputs[position]
        for dim in range(len(self.op.inputs[position].shape)):
            x = self.mask_padding(x, position, dim, fill)
        return x

    def local_output_shape(self, position: int = 0) -> tuple[int, ...]:
        shape = self.op.outputs[position].shape
        return local_shape(shape, self.out_specs[position], self.mesh)

    def copy(self, inputs: Sequence[Tensor] | None = None, **attrs: Any) -> Op:
        """Emit the op itself on local inputs, with local shape operands; `attrs` replace its
        own."""
        operands = list(self.inputs if inputs is None else inputs)
        for position, output in self.rule.shape_operands.items():
            if inputs is None and operands[position].dtype in ("int32", "int64"):
                shape = np.array(self.local_output_shape(output), operands[position].dtype)
                operands[position] = self.build.const(shape)
        outputs = [
            (self.local_output_shape(i) if t.is_static else t.shape, t.dtype)
            for i, t in enumerate(self.op.outputs)
        ]
        return self.build.emit(
            self.op.type,
            operands,
            outputs,
            {**self.op.attrs, **attrs},
            name=self.op.name,
            stateful=self.op.stateful,
        )
