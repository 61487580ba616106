"""Order of a batch whose microbatches are those of the whole batch, however many ranks share it.

A rank has its part of the batch, and cuts it into microbatches. So the samples of microbatch 0 are
others where two ranks share the batch than where one has it all:

    1 rank      0 1 2 3 | 4 5 6 7
    2 ranks     0 1 | 2 3     and     4 5 | 6 7

Stages with unlike numbers of such ranks need the same ones, as what one makes of a microbatch the
next reads. There ranks share each microbatch instead of the batch, which is a strided split:

    2 ranks     0 1 | 4 5     and     2 3 | 6 7
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.ir.graph import Graph
from tfpar.propagation.partitioned_graph import Anchors, OpPlan
from tfpar.spec import Mesh, Placement, Replicate, Shard, Spec


def cut_by_microbatch(
    anchors: Anchors, graph: Graph, mesh: Mesh, batch_size: int, microbatches: int
) -> Anchors:
    """Return the anchors under which ranks share each microbatch.

    A batch that is no multiple of the microbatches is not shared out: all ranks compute all of it.
    """

    def changed(spec: Spec, shape: Sequence[int | None] | None) -> Spec:
        if not shape or shape[0] != batch_size:
            return spec
        length = batch_size
        found: list[Placement] = []
        for placement, parts in zip(spec, mesh.shape, strict=False):
            if placement == Shard(0):
                if length % microbatches:
                    placement = Replicate()
                else:
                    placement = Shard(0, length // microbatches)
                    length = placement.local_length(length, parts)
            found.append(placement)
        return tuple(found)

    def changed_op(name: str, planned: OpPlan) -> OpPlan:
        op = ops.get(name)
        if op is None or len(op.inputs) != len(planned.in_specs):
            return planned
        read = zip(planned.in_specs, op.inputs, strict=True)
        outputs = [t.shape for t in op.outputs]
        return OpPlan(
            tuple(changed(spec, tensor.shape) for spec, tensor in read),
            tuple(map(changed, planned.made, outputs)),
            tuple(map(changed, planned.kept, outputs)),
        )

    ops = {op.name: op for op in graph.ops}
    tensors = {f"{op.name}:{t.index}": t.shape for op in graph.ops for t in op.outputs}
    return dataclasses.replace(
        anchors,
        inputs=[changed(s, t.shape) for s, t in zip(anchors.inputs, graph.inputs, strict=True)],
        tensors={name: changed(spec, tensors.get(name)) for name, spec in anchors.tensors.items()},
        ops={name: changed_op(name, planned) for name, planned in anchors.ops.items()},
    )
