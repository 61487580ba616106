"""Recomputation: selection of blocks that are run again in the backward pass (see
`ir.passes.recompute`).

Candidates are the instances of shared subgraphs (TAP §IV-C): the layers of a transformer. They are
called after their weights, whose paths are the same in every process; other parts of a model are
called after their scopes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping, Sequence

from tfpar.constraints.patterns import compile_pattern, some, without_call_counts
from tfpar.ir.constants import Constants
from tfpar.ir.graph import Gradient, Graph, Op
from tfpar.ir.graph_nodes import GraphNode, cluster
from tfpar.ir.passes.recompute import find_costly, recompute
from tfpar.ir.passes.rereads import find_fed
from tfpar.ir.planning_graph import planning_graph
from tfpar.ir.roles import FORWARD, Roles
from tfpar.ir.shared_subgraphs import Signatures, prune_graph, repeated_blocks
from tfpar.planning.problem import Problem
from tfpar.spec import PlanError, SpecError

_SELECTIVE = "/selective"


def is_selective(name: str) -> bool:
    """Whether a block called so is recomputed but for its products with weights."""
    return name.endswith(_SELECTIVE)


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks and scopes of a step that can be recomputed.

    Attributes:
        repeats: names of equal blocks, in the order in which they run.
        ops: forward ops of these blocks, by name.
        scopes: of other parts, by the scopes of their ops without the numbers of calls.
    """

    repeats: Sequence[Sequence[str]]
    ops: Mapping[str, Sequence[Op]]
    scopes: Mapping[str, Sequence[Op]]

    @classmethod
    def of(cls, graph: Graph, gradients: Sequence[Gradient] = ()) -> Blocks:
        """Return the blocks of a step whose `gradients` are marked (or whose updates are cut
        off)."""
        searched = planning_graph(graph, gradients).graph
        roles = Roles.of(searched)
        nodes = cluster(searched, roles)
        signatures = Signatures(Constants(searched), roles)
        found: dict[str, Sequence[Op]] = {}
        names: list[list[str]] = []
        used: dict[str, int] = {}
        paths = [v.name for v in searched.variables if v.trainable]
        for repeat in repeated_blocks(nodes, prune_graph(nodes, signatures), signatures):
            names.append([])
            for block in repeat.instances:
                name = _name(block, paths)
                used[name] = used.get(name, 0) + 1
                if used[name] > 1:  # weights that several blocks share
                    name = f"{name}#{used[name]}"
                names[-1].append(name)
                found[name] = [op for node in block for op in signatures.forward(node)]
        scopes: dict[str, list[Op]] = {}
        for op in searched.ops:
            if roles.phase[op] == FORWARD and op.inputs:
                for scope in _scopes(op):
                    scopes.setdefault(scope, []).append(op)
        return cls(names, found, scopes)

    def recomputed(self, asked: bool | Sequence[str]) -> tuple[str, ...]:
        """Return the names of the blocks that a user asks to recompute, as `chosen`. A pattern that
        matches no block may match blocks that are recomputed selectively."""
        return self._chosen(asked, "recompute=", self.selective)

    def chosen(self, asked: bool | Sequence[str], option: str) -> tuple[str, ...]:
        """Return the names of the blocks that a user asks for.

        Args:
            asked: all blocks that repeat (True), none, or those whose names, or their ends, match
                regular expressions. One that matches no block may match scopes.
            option: what was written before a pattern, in messages.

        Raises:
            SpecError: it matches neither.
        """
        return self._chosen(asked, option)

    def _chosen(
        self, asked: bool | Sequence[str], option: str, others: Sequence[str] = ()
    ) -> tuple[str, ...]:
        if isinstance(asked, bool):
            return tuple(self.ops) if asked else ()
        found: dict[str, None] = {}
        for pattern in asked:
            matches = compile_pattern(pattern).fullmatch
            names = (
                [n for n in self.ops if matches(n)]
                or [n for n in others if matches(n)]
                or _outermost(filter(matches, self.scopes))
            )
            if not names:
                raise SpecError(
                    f"{option}{pattern!r} matches no block of the model and no scope. "
                    f"{_there_are(tuple(self.ops))}"
                )
            found.update(dict.fromkeys(names))
        return tuple(found)

    @property
    def selective(self) -> list[str]:
        """Names of the blocks as ones that are recomputed selectively."""
        return [f"{name}{_SELECTIVE}" for name in self.ops]

    def kept(self, names: Sequence[str], graph: Graph) -> set[Op]:
        """Return the ops of the blocks called so that are not run again."""
        chosen = [n.removesuffix(_SELECTIVE) for n in names if is_selective(n)]
        ops = {op for name in chosen for op in self.ops.get(name, ())}
        return find_costly(ops, find_fed(graph)) if ops else set()

    def named(self, names: Sequence[str], told: str) -> list[Sequence[Op]]:
        """Return the ops of the blocks called so; one within another goes with that.

        Args:
            told: the plan's treatment of a block `{}`, in messages.

        Raises:
            PlanError: no such block.
        """
        found: list[Sequence[Op]] = []
        taken: set[Op] = set()
        for name in names:
            ops = self.ops.get(name.removesuffix(_SELECTIVE)) or self.scopes.get(name)
            if ops is None:
                raise PlanError(
                    f"The plan {told.format(repr(name))}, and the model has no such block. "
                    f"{_there_are(tuple(self.ops))} Make a new plan."
                )
            found.append([op for op in ops if op not in taken])
            taken.update(ops)
        return found


def recompute_blocks(
    graph: Graph, names: Sequence[str], gradients: Sequence[Gradient] = ()
) -> Graph:
    """Return a copy of `graph` that computes the blocks called so again in the backward pass.

    Raises:
        PlanError: no such block.
    """
    told = "computes {} again in the backward pass"
    blocks = Blocks.of(graph, gradients)
    roles = Roles.of(graph, [t for g in gradients for t in g.tensors])
    return recompute(graph, blocks.named(names, told), roles, blocks.kept(names, graph))


def recomputed_problem(problem: Problem, names: tuple[str, ...]) -> Problem:
    """Return the problem of planning the step so. It keeps its fingerprint: that of the step."""
    if not names:
        return problem
    known = problem.memo.of(RecomputedProblems)
    if names not in known:
        known[names] = _recomputed_problem(problem, names)
    return known[names].with_settings_of(problem)


def _recomputed_problem(problem: Problem, names: tuple[str, ...]) -> Problem:
    known, key = problem.step.graph_memo.of(RecomputedGraphs), (problem.step.graph, names)
    if key not in known:
        known[key] = recompute_blocks(problem.step.graph, names)
    return with_changed_graph(problem, known[key])


class RecomputedProblems(dict[tuple[str, ...], Problem]):
    """Problems whose graphs recompute blocks, by the names of these."""


class RecomputedGraphs(dict[tuple[Graph, tuple[str, ...]], Graph]):
    """Graphs that recompute blocks, by graph and the names of these."""


def with_changed_graph(problem: Problem, graph: Graph) -> Problem:
    """Return the problem of planning a changed copy of its graph, whose ops keep their names."""
    ops = {op.name: op for op in graph.ops}
    return problem.with_step(
        graph=graph,
        batched=frozenset(ops[t.op.name].outputs[t.index] for t in problem.step.batched),
        zero_cost_ops=frozenset(ops[op.name] for op in problem.step.zero_cost_ops),
    )


# --- names -----------------------------------------------------------------------------


def _name(block: Sequence[GraphNode], paths: Sequence[str]) -> str:
    """Return the common prefix of a block's weights that no others have; else its first layer."""
    own = list(dict.fromkeys(w.name for node in block for w in node.weights))
    shared = os.path.commonprefix([f"{path.rpartition('/')[0]}/" for path in own]).rstrip("/_")
    others = (p for p in paths if p not in own and p.startswith(shared))
    if shared and not any(p[len(shared)] in "/_" for p in others):
        return shared
    return own[0].rpartition("/")[0] or own[0]


def _scopes(op: Op) -> Iterator[str]:
    """The name scopes around an op, without the numbers of calls."""
    parts = without_call_counts(op.scope).split("/")
    return ("/".join(parts[:i]) for i in range(1, len(parts) + 1))


def _outermost(scopes: Iterator[str]) -> list[str]:
    found: list[str] = []
    for scope in sorted(scopes):
        if not any(scope.startswith(f"{outer}/") for outer in found):
            found.append(scope)
    return found


def _there_are(names: Collection[str]) -> str:
    return f"There are {some(tuple(names))}." if names else "No block of it repeats."
