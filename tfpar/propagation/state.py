"""State of one pass over a graph: a value that each step of propagation reads and adds to.

Tensors get their specs in the order of the graph. Two kinds of tensors wait, *open*, until a reader
says which spec it needs: weights that the plan leaves open, and draws of random numbers. Each of
these is a *root*; ops that only relabel it (a read, a cast, a transpose) wait with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tfpar.ir.graph import Op, Tensor, Variable
from tfpar.propagation.decide import FREE
from tfpar.propagation.lists import is_loose
from tfpar.propagation.partitioned_graph import Anchors, PartitionedGraph
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.spec import Mesh, Spec, replicated_spec

if TYPE_CHECKING:
    from tfpar.propagation.memo_trie import MemoTrie

Root = Variable | Op
"""A weight that the plan leaves open, or an op that draws random numbers."""


class Within(Protocol):
    """`engine.propagate`, for the graphs within a graph: bodies of loops, decompositions of ops."""

    def __call__(
        self,
        prepared: PreparedGraph,
        mesh: Mesh,
        anchors: Anchors,
        /,
        *,
        confined: bool = False,
        zeros: frozenset[Tensor] = frozenset(),
    ) -> PartitionedGraph: ...


@dataclasses.dataclass(eq=False)
class PropagationState:
    """One pass, at some op of the graph.

    What is given, and stays as it is:

    Attributes:
        anchors: what the plan fixes.
        within: propagates a graph that an op of this one holds.
        confined: the graph is a body, where nothing may cross ranks.
        zeros: tensors that are zero everywhere, and new lists.
        whole: (op, mesh axis) of those that must not split along the axis.
        followers: by weight, its optimizer slots whose specs nothing else decides, each with the
            weight's dim for every dim of the slot.
        answers: of strategies; see `memo_trie`.

    What is found on the way:

    Attributes:
        specs: of the tensors so far; FREE for those that are open.
        waiting: the open roots, in the order in which they were opened; each with the ops that
            relabel it.
        root_of: the root of each open tensor. (Of tensors settled since, it is no more than what
            they came of.)
        moved: (tensor, spec) of the reshards made: one serves all readers.
        result: what is recorded so far.
    """

    prepared: PreparedGraph
    mesh: Mesh
    anchors: Anchors
    within: Within
    confined: bool = False
    zeros: frozenset[Tensor] = frozenset()
    whole: frozenset[tuple[Op, int]] = frozenset()
    followers: dict[Variable, list[tuple[Variable, Sequence[int | None]]]] = dataclasses.field(
        default_factory=dict
    )
    specs: dict[Tensor, Spec | None] = dataclasses.field(default_factory=dict)
    waiting: dict[Root, list[Op]] = dataclasses.field(default_factory=dict)
    root_of: dict[Tensor, Root] = dataclasses.field(default_factory=dict)
    moved: set[tuple[Tensor, Spec]] = dataclasses.field(default_factory=set)
    result: PartitionedGraph = dataclasses.field(init=False)
    answers: dict[Hashable, MemoTrie[Any]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.result = PartitionedGraph(self.prepared, self.mesh)
        answers = self.prepared.caches.answers
        self.answers = answers.setdefault((self.mesh, self.anchors.data_axes), {})

    def part(
        self, specs: dict[Tensor, Spec | None], opened: Iterable[Variable]
    ) -> PropagationState:
        """Return a state for a pass over some of the ops, in which nothing is done yet.

        Args:
            specs: the specs that the part finds, and to which it adds its own.
            opened: the weights that are open when it begins.
        """
        roots = list(opened)
        return PropagationState(
            self.prepared,
            self.mesh,
            self.anchors,
            self.within,
            self.confined,
            self.zeros,
            self.whole,
            self.followers,
            specs,
            {v: [] for v in roots},
            {v.handle: v for v in roots},
        )

    def spec(self, tensor: Tensor) -> Spec:
        """Return the spec in which `tensor`, which is not open, is kept."""
        spec = self.specs[tensor]
        assert spec is not None
        return spec

    @property
    def replicated(self) -> Spec:
        return replicated_spec(self.mesh.num_axes)

    def is_open(self, tensor: Tensor) -> bool:
        """Whether `tensor` waits for a reader."""
        return self.specs.get(tensor, 0) is FREE

    def is_loose(self, tensor: Tensor) -> bool:
        """Whether `tensor` is zero everywhere, or a list that can be made in another spec."""
        return is_loose(tensor, self.prepared.rules, self.zeros)

    def anchor_of(self, tensor: Tensor) -> Spec | None:
        """Return the spec that the plan gives `tensor` by its name."""
        return self.anchors.tensors.get(tensor.name) if self.anchors.tensors else None

    def whole_axes(self, op: Op) -> tuple[int, ...]:
        """Return the mesh axes along which `op` must not split."""
        return tuple(sorted(a for o, a in self.whole if o is op)) if self.whole else ()
