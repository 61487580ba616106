"""Warnings on a compiled step, given once for each op or op type."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tfpar.ir.graph import Op
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.rules import has_rule
from tfpar.spec import TfparError

logger = logging.getLogger("tfpar")

_NO_RULE = {
    False: "No op rule for {}",
    True: "No op rule for these uses (sizes that are not static, or rare attributes) of {}",
}


class Warnings:
    """Warnings on one step, whatever shapes it is compiled for.

    Args:
        strict: what costs speed is an error.
    """

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._told: set[str] = set()

    def fallbacks(self, prepared: PreparedGraph) -> None:
        """Warn of op types without a rule, or uses of them, which run replicated.

        Raises:
            TfparError: there are some, and the step is strict.
        """
        fallbacks = prepared.all_fallbacks()
        types = sorted({op.type for op in fallbacks} - self._told)
        if not types:
            return
        self._told.update(types)
        for known in (False, True):
            told = [t for t in types if has_rule(t) == known]
            if not told:
                continue
            first = next(op.name for op in fallbacks if op.type in told)
            if self._strict:
                raise TfparError(
                    f"{_NO_RULE[known].format(', '.join(told))} (first: {first!r}), and "
                    f"strict=True. Register a rule with tap.register_rule, or drop strict to run "
                    f"them replicated."
                )
            logger.warning(
                "%s; they run replicated (inputs gathered, every rank computes); first: %s. "
                "tap.coverage(model) lists them.",
                _NO_RULE[known].format(", ".join(told)),
                first,
            )

    def replicated_regions(self, partitioned: PartitionedGraph) -> None:
        """Loops, branches and calls that run whole."""
        regions = [(o, a) for o, a in partitioned.replicated_regions if o.name not in self._told]
        if not regions:
            return
        op, axis = regions[0]
        logger.warning(
            "Loops, branches and calls whose bodies would need collectives run whole (inputs "
            "gathered, every rank computes): %s along mesh axis %r%s.",
            op.name,
            partitioned.mesh.axis_names[axis],
            f", and {len(regions) - 1} more" if len(regions) > 1 else "",
        )
        self._told.update(op.name for op, _ in regions)

    def uncompiled(self, ops: Iterable[Op]) -> None:
        """Warn of ops that XLA cannot compile, where it is to compile the step."""
        first: dict[str, str] = {}
        for op in ops:
            if op.type not in self._told:
                first.setdefault(op.type, op.name)
        if first:
            logger.warning(
                "XLA does not compile %s; they run between what it compiles; first: %s.",
                ", ".join(sorted(first)),
                next(iter(first.values())),
            )
        self._told.update(first)

    def unpiped(self, op: Op) -> None:
        """An op that keeps a step from running in the pipeline that was found for it."""
        logger.warning(
            "%s %r has an effect, which each microbatch of the pipeline that was found would have: "
            "the step is planned anew without one.",
            op.type,
            op.name,
        )

    def unshared(self, name: str) -> None:
        """Warn of an op that keeps ranks from having unequal shares of the batch.

        Raises:
            TfparError: the step is strict.
        """
        what = f"{name!r} does not split in the unequal shares of the batch that the plan gives"
        if self._strict:
            raise TfparError(f"{what}, and strict=True. Make a new plan, or drop strict.")
        if name not in self._told:
            logger.warning("%s; all ranks get the same.", what)
        self._told.add(name)

    def unchunked(self, op: Op, chunks: int) -> None:
        """An op that keeps a step from running in chunks.

        Raises:
            TfparError: the step is strict.
        """
        what = f"{op.type} {op.name!r} has an effect, which {chunks} chunks would each have"
        if self._strict:
            raise TfparError(f"{what}, and strict=True. Leave out chunks=, or drop strict.")
        if op.name not in self._told:
            logger.warning("%s; the batch is computed in one.", what)
        self._told.add(op.name)
