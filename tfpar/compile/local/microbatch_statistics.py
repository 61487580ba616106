"""Rewrite of normalisations to the statistics of one microbatch, which
`compile.local.batch_statistics` finds."""

from __future__ import annotations

import numpy as np

from tfpar.compile.local.batch_statistics import StatisticsSearch
from tfpar.compile.local.local_graph import LocalProgram
from tfpar.compile.local.microbatch_rounds import meets
from tfpar.compile.local.reshard import all_reduce
from tfpar.ir.builder import GraphBuilder, numpy_dtype
from tfpar.ir.graph import Op, Tensor, is_floating
from tfpar.ir.order import sort_topologically
from tfpar.ir.roles import Roles
from tfpar.ir.traits import CONSTANTS
from tfpar.pipeline.statistics import BatchStatistics
from tfpar.rules.normalization import NUM_AVERAGED, unbiasing
from tfpar.spec import Shard, TfparError, local_indices


def use_ghost_batches(program: LocalProgram, roles: Roles) -> BatchStatistics:
    """Have normalisations take the statistics of one microbatch, of all ranks; in place.

    Args:
        program: its last mesh axis are the microbatches.
        roles: of the ops that it was written for.

    Returns:
        The statistics that it had.

    Raises:
        TfparError: what is made of a statistic once a step is not a number that could be averaged.
    """
    search = StatisticsSearch(program, roles)
    found = search.found()
    if found.sums:
        _Writer(program, search, found).write()
    return found


class _Writer:
    """Puts the parts of sums, and averages of what is made of them, where these are read."""

    def __init__(
        self, program: LocalProgram, search: StatisticsSearch, found: BatchStatistics
    ) -> None:
        self.program = program
        self.build = GraphBuilder(program.graph)
        self._search = search
        self._found = found
        self._axis = search.axis
        shares = shares_of(program)
        self._share = shares
        self._scale = [1.0 / share if share else 0.0 for share in shares]
        self._parts: dict[Tensor, Tensor] = {}
        self._averages: dict[Tensor, Tensor] = {}

    def write(self) -> None:
        graph = self.program.graph
        runs = self._found.each
        for op in list(graph.ops):
            is_each = op in runs or self._search.is_each(op) or self._gathers(op)
            op.inputs = [self._read(t, is_each) for t in op.inputs]
            if op in runs and NUM_AVERAGED in op.attrs:
                op.inputs[1] = self._unbiasing(op)
        graph.outputs = [self._read(t, False) for t in graph.outputs]
        read = {t for op in graph.ops for t in op.inputs} | {*graph.outputs}
        unread = {op for op in self._found.sums if op.outputs[0] not in read}
        graph.ops = sort_topologically([op for op in graph.ops if op not in unread])

    def _gathers(self, op: Op) -> bool:
        """Whether `op` puts the parts of microbatches together, each of which has its own."""
        return op.type in ("AllGather", "AllToAll") and meets(op, self._axis)

    def _read(self, tensor: Tensor, is_each: bool) -> Tensor:
        """Return the tensor that an op reads in place of `tensor`, for each microbatch or once for
        all."""
        if tensor.op in self._found.sums:
            return self._part(tensor) if is_each else tensor
        return self._average(tensor) if tensor.op in self._found.each and not is_each else tensor

    def _part(self, tensor: Tensor) -> Tensor:
        """Return the sum as it would be if all of the batch were as the microbatch is."""
        if tensor not in self._parts:
            op, first = tensor.op, self._begin(tensor)
            (part,) = op.inputs
            axes = tuple(axis for axis in op.attrs["axes"] if axis != self._axis)
            if axes:
                part = all_reduce(self.build, part, axes, "sum")
            self._parts[tensor] = self._times(part, self._scale)
            self._end(op, first)
        return self._parts[tensor]

    def _average(self, tensor: Tensor) -> Tensor:
        """The average over microbatches, weighted by their samples."""
        if tensor not in self._averages:
            if not is_floating(tensor.dtype):
                raise TfparError(
                    f"{tensor.name!r} ({tensor.dtype}) is made of statistics of the batch once a "
                    f"step: those of microbatches cannot be averaged there. Leave out "
                    f"batch_statistics='microbatch'."
                )
            first = self._begin(tensor)
            share = self._times(tensor, self._share)
            self._averages[tensor] = all_reduce(self.build, share, (self._axis,), "sum")
            self._end(tensor.op, first)
        return self._averages[tensor]

    def _unbiasing(self, op: Op) -> Tensor:
        """Emit the factor that makes a variance over the samples of a microbatch unbiased."""
        self.build.name = f"{op.name}/of_microbatch"
        dtype = op.inputs[1].dtype
        factors = [unbiasing(op.attrs[NUM_AVERAGED] * share) for share in self._share]
        return self.build.per_rank([np.asarray(f, numpy_dtype(dtype)) for f in factors], dtype)

    def _times(self, tensor: Tensor, factors: list[float]) -> Tensor:
        dtype = numpy_dtype(tensor.dtype)
        values = [np.asarray(factor, dtype) for factor in factors]
        return self.build.binary("Mul", tensor, self.build.per_rank(values, tensor.dtype))

    def _begin(self, tensor: Tensor) -> int:
        self.build.name = f"{tensor.op.name}/of_microbatch{tensor.index}"
        return len(self.program.graph.ops)

    def _end(self, op: Op, first: int) -> None:
        """Copy the origin and the stage pass of `op` to the ops emitted since index `first`."""
        program = self.program
        for emitted in program.graph.ops[first:]:
            program.origins[emitted] = program.origins[op]
            if op in program.places and emitted.type not in CONSTANTS:
                program.places[emitted] = program.places[op]


def shares_of(program: LocalProgram) -> list[float]:
    """Return by rank of the mesh the part of the batch's samples that its microbatch has, of all
    ranks together.

    A last microbatch may have fewer than others, or none.
    """
    mesh = program.mesh
    cut = (
        (shape[0], spec)
        for shape, spec in zip(program.input_shapes, program.input_specs, strict=True)
        if spec[-1] == Shard(0)
    )
    length, spec = next(cut)
    samples: dict[int, set[int]] = {}
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        indices = local_indices(length, 0, spec, mesh, coordinates)
        samples.setdefault(coordinates[-1], set()).update(indices[indices >= 0].tolist())
    return [len(samples[mesh.coordinates(r)[-1]]) / length for r in range(mesh.size)]
