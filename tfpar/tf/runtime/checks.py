"""Checks after a program's first step: variables are placed as planned, and copies are equal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfpar.spec import RuntimeMismatchError, format_spec
from tfpar.tf.runtime.copies import Copies, PlacedVariable


def check_placement(placed: Sequence[PlacedVariable]) -> None:
    """Check that every variable is placed where the plan says.

    Raises:
        RuntimeMismatchError: names the first variable and rank that differ.
    """
    for variable, spec, mesh, ranks in placed:
        lain_on = None if variable.ranks is None else variable.ranks.members
        if variable.layout != (mesh, spec) or lain_on != ranks.members:
            raise RuntimeMismatchError(
                f"Variable {variable.name!r} is laid as {variable.layout} on the ranks {lain_on}, "
                f"not as the plan's {format_spec(spec)} on {mesh}, the ranks {ranks.members}."
            )
        for rank, shard in variable.shards.items():
            device = ranks.devices[variable.holders[rank]]
            if not shard.device.endswith(device.rpartition("/")[2]):
                raise RuntimeMismatchError(
                    f"The shard of variable {variable.name!r} for rank {ranks.members[rank]} lies "
                    f"on {shard.device}, not on {device}."
                )


def check_copies(placed: Sequence[PlacedVariable]) -> None:
    """Check that ranks of this process agree on what they hold copies of.

    Raises:
        RuntimeMismatchError: names the first variable and two ranks that differ.
    """
    copies = [Copies(one) for one in placed]
    weights = [next(iter(copy.shards.values())) for copy in copies if copy.is_weight]
    largest: float | None = None  # takes long for a large model, and copies mostly are the same
    for copy in copies:
        shards = copy.shards
        for ranks in copy.pairs():
            first, other = (np.asarray(shards[rank].read_value()) for rank in ranks)
            if np.array_equal(first, other, equal_nan=first.dtype.kind in "fc"):
                continue
            if largest is None:
                values = (np.asarray(weight.read_value()) for weight in weights)
                largest = max(map(_largest, values), default=0.0)
            apart = _largest(first.astype("float64") - other.astype("float64"))
            advice = "Please report it with the model."
            if not copy.judge(ranks, apart, _largest(first), largest, advice):
                break


def _largest(value: np.ndarray) -> float:
    return float(np.max(np.abs(value.astype("float64")), initial=0.0))
