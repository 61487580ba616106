"""Memoization of propagation strategies, keyed by the specs that they read.

A strategy (`consumer_spec`, `open_weights`, `generated_dims`, `own_splits`) reads the specs of
tensors one by one; which tensor it reads next depends only on the specs read before. So the reads
of all runs form a trie: walking it with the specs of a new plan ends at a stored answer (hit), or
leaves the trie (miss), and on a miss the strategy runs.

    read w: S(1) -> read x: R    -> answer
                         x: S(0) -> answer
            R    -> answer
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

from tfpar.ir.graph import Tensor
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.propagation.state import PropagationState
from tfpar.propagation.view import View
from tfpar.spec import Mesh, Spec

T = TypeVar("T")


class TrieNode(Generic[T]):
    """A step of the trie: which tensor is read next, and what followed each thing read there."""

    __slots__ = ("children", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.children: dict[Any, TrieNode[T] | T] = {}


class MemoTrie(Generic[T]):
    """Answers, by what was read on the way to them."""

    __slots__ = ("root",)

    def __init__(self) -> None:
        self.root: TrieNode[T] | T | None = None

    def follow(self, specs: Mapping[Tensor, Spec | None]) -> T | None:
        """Return the answer that was given where `specs` said the same; None if there is none."""
        node = self.root
        while type(node) is TrieNode:
            node = node.children.get(specs.get(node.tensor))
        return cast("T | None", node)

    def note(self, read: Mapping[Tensor, Any], answer: T) -> None:
        """Store that reading `read`, in this order, led to `answer`."""
        steps = list(read.items())
        if not steps:
            self.root = answer
            return
        if self.root is None:
            self.root = TrieNode(steps[0][0])
        node: TrieNode[T] | T = self.root
        for i, (tensor, value) in enumerate(steps):
            assert isinstance(node, TrieNode) and node.tensor is tensor
            if i + 1 == len(steps):
                node.children[value] = answer
            else:
                node = node.children.setdefault(value, TrieNode(steps[i + 1][0]))


class _Noted(Mapping[Tensor, "Spec | None"]):
    """`specs`, of which is noted what is read."""

    def __init__(self, specs: Mapping[Tensor, Spec | None]) -> None:
        self.specs = specs
        self.read: dict[Tensor, Spec | None] = {}

    def __getitem__(self, tensor: Tensor) -> Spec | None:
        self.read[tensor] = spec = self.specs[tensor]
        return spec

    def get(self, tensor: Tensor, default: Any = None) -> Any:
        spec = self.specs.get(tensor)
        self.read.setdefault(tensor, spec)
        return default if spec is None else spec

    def __iter__(self) -> Iterator[Tensor]:
        raise TypeError("A strategy asks for the specs of tensors that it knows.")

    def __len__(self) -> int:
        return len(self.specs)


class _Looking:
    """A view that notes what is looked at."""

    def __init__(self, view: View) -> None:
        self.prepared: PreparedGraph = view.prepared
        self.mesh: Mesh = view.mesh
        self.specs = _Noted(view.specs)
        self.anchor_of = view.anchor_of


def memoize_strategy(state: PropagationState, key: Hashable, look: Callable[[View], T]) -> T:
    """Return the answer of `look` for `state`, from the memo or by calling it.

    Args:
        key: what its answer depends on beside the graph, the mesh, the specs that it reads, and
            the axes along which the plan splits data.
    """
    if state.anchors.tensors:  # few plans name tensors, and each names others
        return look(state)
    readings = state.answers.get(key)
    if readings is None:
        readings = state.answers[key] = MemoTrie()
    answer = readings.follow(state.specs)
    if answer is None:
        view = _Looking(state)
        answer = look(view)
        readings.note(view.specs.read, answer)
    return cast(T, answer)
