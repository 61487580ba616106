"""Memo of propagated segments, keyed by the specs that they read from outside.

Propagating through a segment reads some specs from outside of it, one after the other; runs that
read the same give the same (`propagation.memo_trie`). Here a tensor without a spec yet has its
own place in the trie, and a segment reads what segments before it made.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from tfpar.cost.terms import Terms
from tfpar.ir.graph import Op, Tensor, Variable
from tfpar.propagation.memo_trie import MemoTrie, TrieNode
from tfpar.spec import Spec

Change = tuple[Tensor, Spec, Spec]
"""A reshard as (tensor, from, to)."""


class Absent(enum.Enum):
    """The type of `ABSENT`."""

    ABSENT = enum.auto()

    __hash__ = object.__hash__  # of one member: by identity, which is quicker than by name


ABSENT = Absent.ABSENT
"""In place of the spec of a tensor that is not laid yet."""

Seen = Spec | None | Absent
"""A spec, FREE (None) for an open tensor, or ABSENT."""


@dataclasses.dataclass(frozen=True, eq=False)
class FragmentOutcome:
    """Outcome of propagating a segment that reads certain specs from outside.

    Attributes:
        writes: specs of tensors that other segments read, and of weights it settled.
        terms: the price of what is the segment's own.
        reshards: of tensors that other segments may reshard too, each with its price.
        idle: (weight, mesh axis, op): split weights gathered for an op that all ranks along the
            axis then compute in full.
        error: the reason for which propagation cannot go on, or empty.
        steps: what changes when it takes another outcome's place, as far as that was asked.
    """

    writes: Mapping[Tensor, Spec | None]
    terms: Terms
    reshards: tuple[tuple[Change, Terms], ...] = ()
    idle: tuple[tuple[Variable, int, Op], ...] = ()
    error: str = ""
    steps: dict[FragmentOutcome | None, OutcomeDelta] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class OutcomeDelta:
    """From one outcome of a segment to another: what changes.

    Attributes:
        terms: the increase of the segment's own cost.
        wants: reshards that only the later outcome asks for.
        drops: reshards that only the earlier one asked for.
        lays: tensors that have another spec, or get it from this segment now.
        leaves: tensors that no longer get a spec from this segment.
    """

    terms: Terms
    wants: Sequence[tuple[Change, Terms]]
    drops: Sequence[tuple[Change, Terms]]
    lays: Sequence[tuple[Tensor, Spec | None]]
    leaves: Sequence[Tensor]


def step_between(
    before: FragmentOutcome, after: FragmentOutcome, variable_of: Mapping[Tensor, Variable]
) -> OutcomeDelta:
    """Return the difference that it makes when `after` takes the place of `before`."""
    had, has = dict(before.reshards), dict(after.reshards)
    # Weights are laid by whichever segment reads them first: always said anew.
    lays = [
        (tensor, spec)
        for tensor, spec in after.writes.items()
        if tensor in variable_of or tensor not in before.writes or before.writes[tensor] != spec
    ]
    leaves = [tensor for tensor in before.writes if tensor not in after.writes]
    return OutcomeDelta(
        after.terms - before.terms,
        [(change, price) for change, price in has.items() if change not in had],
        [(change, price) for change, price in had.items() if change not in has],
        lays,
        leaves,
    )


class FragmentMemo(MemoTrie[FragmentOutcome]):
    """The outcomes of one segment, by what was read from outside of it."""

    __slots__ = ()

    def find(
        self, at: int, made: Mapping[Tensor, tuple[int, Seen]], initial: Mapping[Tensor, Seen]
    ) -> FragmentOutcome | None:
        """Look up the outcome of segment `at` in these surroundings; None if it never ran in them.

        Args:
            made: by tensor, the segment that settled its spec, and the spec.
            initial: the specs before the first segment.
        """
        node = self.root
        while type(node) is TrieNode:  # the innermost loop of a search
            tensor = node.tensor
            entry = made.get(tensor)
            if entry is None or entry[0] >= at:
                node = node.children.get(initial.get(tensor, ABSENT))
            else:
                node = node.children.get(entry[1])
        return node if isinstance(node, FragmentOutcome) else None
