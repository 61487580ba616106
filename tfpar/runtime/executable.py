"""From a captured step to something that runs: plan, propagate, rewrite, link."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.capture.step import CapturedStep, feeds
from tfpar.ir.passes.inline_calls import inline_calls
from tfpar.ir.passes.predicate_branches import predicate_branches
from tfpar.ir.passes.split_bundles import split_bundles
from tfpar.ir.passes.trim import trim
from tfpar.propagation.engine import Anchors, PartitionedGraph, propagate
from tfpar.propagation.prepared import prepare
from tfpar.rewrite.local_graph import build_local_program
from tfpar.rewrite.packing import DEFAULT_BUCKET_BYTES, pack_all_reduces
from tfpar.runtime.backends.in_process import InProcessProgram
from tfpar.runtime.variables import ParallelVariable
from tfpar.spec import Mesh, Replicate, RuntimeMismatchError, Spec, format_spec, replicated

logger = logging.getLogger("tfpar")


class Executable:
    """One step, compiled for one set of argument shapes.

    Attributes:
        captured: the step as captured; its variables are all `ParallelVariable`s.
        partitioned: specs and reshards.
        packed_bytes: payload of each all-reduce once they are packed, in program order.
    """

    def __init__(
        self, captured: CapturedStep, partitioned: PartitionedGraph, devices: Sequence[str],
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:  # fmt: skip
        self.captured = captured
        self.partitioned = partitioned
        self.devices = list(devices)
        local = build_local_program(partitioned)
        pack_all_reduces(local.graph, bucket_bytes)
        self.packed_bytes = [
            sum(t.num_bytes for t in op.inputs) for op in local.graph.ops if op.type == "AllReduce"
        ]
        self.program = InProcessProgram(local, devices)
        self._place_variables()
        self._handles: list[list[tf.Tensor]] = []
        self._shards: list[Any] = []
        self._checked = False

    @property
    def mesh(self) -> Mesh:
        return self.partitioned.mesh

    def __call__(self, arguments: Any) -> Any:
        """Run one step on (structured) arguments; gives the step's structured result."""
        self._refresh_handles()
        flat = self.program([*feeds(arguments), *self.captured.closure], self._handles)
        if not self._checked:
            self._checked = True
            check_placement(self.captured.variables, self._specs(), self.mesh, self.devices)
        return self.captured.pack_outputs(flat)

    def _specs(self) -> list[Spec]:
        return [self.partitioned.variable_specs[v] for v in self.partitioned.graph.variables]

    def _place_variables(self) -> None:
        placed = zip(self.captured.variables, self._specs(), self.program.holders, strict=True)
        for variable, spec, holders in placed:
            variable.shard(self.mesh, spec, self.devices, holders)

    def _refresh_handles(self) -> None:
        """Variables may have been gathered or laid otherwise since the last call."""
        current = [v._shards for v in self.captured.variables]
        if len(current) == len(self._shards) and all(
            a is b for a, b in zip(current, self._shards, strict=True)
        ):
            return
        self._place_variables()
        self._shards = [v._shards for v in self.captured.variables]
        self._handles = [[s.handle for s in v.shards] for v in self.captured.variables]


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """How steps are compiled.

    Attributes:
        bucket_bytes: upper bound on a packed all-reduce, in bytes; what the plan's cost is least
            with if None.
        strict: ops without a rule are an error instead of being replicated.
    """

    bucket_bytes: int | None = None
    strict: bool = False


def simplify_step(captured: CapturedStep) -> None:
    """Inline calls, trim and predicate branches of a captured step, in place."""
    captured.rewrite(lambda g: predicate_branches(trim(split_bundles(inline_calls(g))).graph))


def prepare_step(captured: CapturedStep):
    """Simplify a captured step, and look up the rules of its ops."""
    simplify_step(captured)
    return prepare(captured.graph)


def compile_step(
    captured: CapturedStep, anchors: Anchors, mesh: Mesh, devices: Sequence[str],
    bucket_bytes: int | None = None, prepared=None,
) -> Executable:  # fmt: skip
    """Propagate the anchors and link the program."""
    prepared = prepared if prepared is not None else prepare_step(captured)
    whole = replicated(mesh.num_axes)
    anchors = dataclasses.replace(anchors, outputs=[whole] * len(captured.graph.outputs))
    partitioned = propagate(prepared, mesh, anchors)
    return Executable(captured, partitioned, devices, bucket_bytes or DEFAULT_BUCKET_BYTES)


def check_placement(
    variables: Sequence[ParallelVariable], specs: Sequence[Spec], mesh: Mesh,
    devices: Sequence[str],
) -> None:  # fmt: skip
    """Check that every variable lies where the plan says and that ranks agree.

    Raises:
        RuntimeMismatchError: names the first variable and rank that differ.
    """
    weights = (v for v in variables if v.dtype.is_floating and v.shape.rank)
    largest = max((_largest(v.shards[0].numpy()) for v in weights), default=0.0)
    for variable, spec in zip(variables, specs, strict=True):
        if variable.layout != (mesh, spec):
            raise RuntimeMismatchError(
                f"Variable {variable.name!r} is laid as {variable.layout}, not as the plan's "
                f"{format_spec(spec)} on {mesh}."
            )
        for rank, shard in enumerate(variable.shards):
            device = devices[variable.holders[rank]]
            if not shard.device.endswith(device.rpartition("/")[2]):
                raise RuntimeMismatchError(
                    f"The shard of variable {variable.name!r} for rank {rank} lies on "
                    f"{shard.device}, not on {device}."
                )
        _check_agreement(variable, spec, mesh, largest)


AGREEMENT = {8: 1e-8, 4: 1e-3, 2: 1e-1}
"""Largest difference between ranks, relative to the variable's largest value, by bytes per
element. Replicated sums run on every rank by themselves, and CPU and GPU kernels may add in any
order, so that equality to the bit cannot be asked for (empirical)."""

NOISE = 1e-2
"""Differences below this share of the model's largest weight are a warning: adaptive optimizers
blow up the rounding of gradients that are truly zero (the bias of attention keys)."""


def _check_agreement(variable: ParallelVariable, spec: Spec, mesh: Mesh, largest: float) -> None:
    """Ranks that differ only in replicated axes must hold the same values."""
    axes = tuple(a for a, p in enumerate(spec) if isinstance(p, Replicate))
    for group in mesh.groups(axes):
        first = variable.shards[group[0]].numpy()
        for rank in group[1:]:
            if variable.holders[rank] == variable.holders[group[0]]:
                continue
            other = variable.shards[rank].numpy()
            if np.array_equal(first, other, equal_nan=first.dtype.kind in "fc"):
                continue
            apart = _difference(first, other)
            inexact = first.dtype.kind not in "iub"
            allowed = AGREEMENT.get(first.dtype.itemsize, 0.0) * _largest(first)
            if inexact and apart <= allowed:
                continue
            message = (
                f"Ranks {group[0]} and {rank} hold different values of {variable.name!r}, which "
                f"is replicated between them ({format_spec(spec)} on {mesh}): {apart:.1e} apart."
            )
            if inexact and apart <= NOISE * largest:
                logger.warning(
                    "%s Its gradient is noise, or its sums are ill-conditioned.", message
                )
                return
            raise RuntimeMismatchError(f"{message} Please report it with the model.")


def _largest(value: np.ndarray) -> float:
    return float(np.max(np.abs(value.astype("float64")), initial=0.0))


def _difference(first: np.ndarray, other: np.ndarray) -> float:
    return float(np.max(np.abs(first.astype("float64") - other.astype("float64"))))
