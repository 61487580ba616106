"""Writer of a program with chunks for ranks: some ops run once, others once for each chunk."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from tfpar.compile.local.local_graph import LocalProgram
from tfpar.compile.local.rank_local_axis import NotRepeatableError, RankLocalAxis
from tfpar.compile.local.reshard import CHUNK, COLLECTIVE_TYPES, ONCE
from tfpar.compile.local.sub_batch_bodies import constant_of_sub_batch
from tfpar.ir.graph import Op


class ChunkWriter(RankLocalAxis):
    """Emits the ops of a program with chunks, each once for each chunk.

    Attributes:
        runs_for: the chunks for which a new op runs, where that is not all of them.
    """

    def __init__(self, program: LocalProgram) -> None:
        super().__init__(program)
        self.runs_for: dict[Op, frozenset[int]] = {}

    def write(self, op: Op) -> None:
        """Emit what `op` of the program becomes.

        Raises:
            NotRepeatableError: it must not run once for each chunk.
        """
        self.build.name = op.name
        if op.type == "Placeholder":
            self.write_source(op)
        elif self.meets(op):
            self.write_crossing(op)
        else:
            self._clone(op)

    def _clone(self, op: Op) -> None:
        """Once for each chunk, or for several that would run it on the same tensors."""
        groups: dict[Hashable, list[int]] = {}
        for chunk in range(self.parts):
            groups.setdefault(self._key(op, chunk), []).append(chunk)
        if len(groups) > 1 and self.repetition.has_effects(op):
            raise NotRepeatableError(op)
        made: list[Op] = [op] * self.parts
        for members in groups.values():
            clone = self._emit(op, members[0], alone=len(groups) == 1)
            if len(groups) > 1:
                self.runs_for[clone] = frozenset(members)
            before = (self.ops[c][chunk] for c in op.control for chunk in members)
            clone.control = list(dict.fromkeys(before))
            for chunk in members:
                made[chunk] = clone
        self.ops[op] = made
        for i, tensor in enumerate(op.outputs):
            self.tensors[tensor] = [clone.outputs[i] for clone in made]

    def _key(self, op: Op, chunk: int) -> Hashable:
        """Equal for chunks that `op` runs for once."""
        if op.type == "RankConst":
            return tuple(
                np.asarray(v).tobytes() for v in constant_of_sub_batch(op, chunk, self.parts)
            )
        if ONCE in op.attrs or self.repetition.writes(op):
            return None  # chunks hold the same, even where each has computed it
        inputs = tuple(self.tensors[t][chunk] for t in op.inputs)
        return inputs, chunk if self.repetition.bodies.differ(op) else None

    def _emit(self, op: Op, chunk: int, alone: bool) -> Op:
        name = f"{op.name}/chunk{chunk}" if chunk else op.name
        outputs = [(t.shape, t.dtype) for t in op.outputs]
        if op.type == "RankConst":
            values = constant_of_sub_batch(op, chunk, self.parts)
            return self.build.per_rank(values, op.outputs[0].dtype).op
        attrs = self.repetition.bodies.attrs(op, chunk)
        if not alone and op.type in COLLECTIVE_TYPES:
            attrs = {**attrs, CHUNK: chunk}
        inputs = [self.tensors[t][chunk] for t in op.inputs]
        return self.build.emit(op.type, inputs, outputs, attrs, name, stateful=op.stateful)
