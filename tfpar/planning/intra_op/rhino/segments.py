"""Segments between critical nodes, and the dynamic program over them (Rhino §4.3.1, §4.3.2).

The backbone of a graph are the ops on its longest paths, counted in ops: those for which the
earliest step at which they can run is also the latest. Those of them that compute much are
*critical nodes*, and cut the graph into segments. Here nodes 2 and 5 are critical:

    depth    0     1     2     3         4     5
    node     0 --> 1 --> 2 --> 3, 4 -------> 5 --> 6

    segments(...)   [0, 1] to 2,   [3, 4] to 5,   [6] to the end

`top_level` goes through the segments in order. For each choice of the critical node at the end of
a segment it finds the cheapest decisions of the nodes within, from the best found for each choice
of the critical node before. A small segment is a table (`tables`), a large one an integer program
(`ilp`).

The paper's segments are nearly linear, and so are a model's forward and backward pass. But some
tensors pass a critical node by: residuals, and activations that the backward pass reads. Their cost
is that of what was decided on the way here, which is not revised at once. Likewise late work, which
hides behind the backward pass only as a whole, is counted at a fixed part `exposed` of its time.
Both are given up for speed, and won back in part afterwards: pairs of neighbouring segments are
decided again together, and so are groups of nodes that have to agree on the spec of a weight
(`neighbourhoods`), which may be far apart.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from tfpar.ir.graph import Graph, Op
from tfpar.planning.deadline import Deadline
from tfpar.planning.intra_op.rhino.cones import eliminate_chains
from tfpar.planning.intra_op.rhino.cost_network import CostNetwork, DecisionNode, ReshardCosts
from tfpar.planning.intra_op.rhino.ilp import NoSolution, solve_network
from tfpar.planning.intra_op.rhino.tables import TooLarge, solve_by_elimination


def critical_ops(graph: Graph, is_intensive: Callable[[Op], bool]) -> list[Op]:
    """Return the compute-intensive ops of the backbone, in the order in which they run."""
    earliest = depths(graph)
    latest: dict[Op, int] = {}
    readers = graph.consumers()
    end = max(earliest.values(), default=0)
    for op in reversed(graph.ops):
        after = (latest[r] for t in op.outputs for r in readers.get(t, ()))
        latest[op] = min(after, default=end + 1) - 1
    return [op for op in graph.ops if earliest[op] == latest[op] and is_intensive(op)]


def depths(graph: Graph) -> dict[Op, int]:
    """Return the earliest step at which each op can run, counted in ops."""
    found: dict[Op, int] = {}
    for op in graph.ops:
        found[op] = 1 + max((found[t.op] for t in op.inputs), default=-1)
    return found


def depths_when_read(graph: Graph) -> dict[Op, int]:
    """Return `depths`, but weights, and what is made of weights alone, come just before they are
    first read.

    By `depths` all weights are in the first segment, where nothing says yet what their placement
    will cost. Neither of the two is better for all models, so both are tried.
    """
    found, readers = depths(graph), graph.consumers()
    fed = {t.op for t in graph.inputs}
    for op in graph.ops:
        if any(t.op in fed for t in op.inputs):
            fed.add(op)
    for op in reversed(graph.ops):
        if op not in fed:
            reads = (found[r] for t in op.outputs for r in readers.get(t, ()))
            found[op] = min(reads, default=found[op] + 1) - 1
    return found


MAX_SWEEPS = 4
"""Largest number of further sweeps over the segments (empirical: two sweeps settle models)."""

MAX_GROUP = 16
"""Largest number of nodes that are decided again together around a weight (empirical)."""

HALVINGS = 3
"""Number of halvings of the range in which `exposed`, the part of late work that counts, is sought
(empirical)."""

EQUAL_COST_RATIO = 1e-9
"""Costs that differ by less than this part of themselves are equal."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """The nodes behind one critical node and before another.

    Attributes:
        inside: the nodes between; end: the critical node that they lead to, if there is one.
    """

    inside: tuple[int, ...]
    end: int | None

    def ends(self) -> tuple[int, ...]:
        return () if self.end is None else (self.end,)


def segments(depth: Sequence[int], critical: Collection[int]) -> list[Segment]:
    """Return the segments of nodes, in order.

    Args:
        depth: of each node; nodes are cut where that of a critical node is.
        critical: the critical nodes.
    """
    pivots = sorted(critical, key=lambda node: depth[node])
    found: list[list[int]] = [[] for _ in range(len(pivots) + 1)]
    bounds = [depth[node] for node in pivots]
    for node, at in enumerate(depth):
        if node not in critical:
            found[int(np.searchsorted(bounds, at))].append(node)
    ends = [*pivots, None]
    return [Segment(tuple(inside), end) for inside, end in zip(found, ends, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Path:
    """Decisions up to some critical node (-1 elsewhere), and what they cost."""

    picks: tuple[int, ...]
    seconds: float


def neighbourhoods(
    network: CostNetwork, weights: Iterable[int], intensive: Collection[int]
) -> list[list[int]]:
    """Find for each of the nodes `weights` the nodes that have to agree on its spec.

    They are those around it up to ops that are `intensive`, at most `MAX_GROUP`, the nearest first:
    the variable, what reads and casts it, its products, its gradient and its update.
    """
    beside: list[set[int]] = [set() for _ in network.nodes]
    for moves in network.moves:
        nodes = moves.nodes()
        for node in nodes:
            beside[node] |= nodes
    found = []
    for weight in weights:
        near = [weight]
        for node in near:  # grows on the way
            if len(near) >= MAX_GROUP:
                break
            if node not in intensive:
                near += sorted(beside[node].difference(near))
        found.append(sorted(near[:MAX_GROUP]))
    return found


def solve_by_segments(
    network: CostNetwork,
    cuts: Sequence[Sequence[Segment]],
    start: Sequence[int],
    deadline: Deadline | None = None,
    together: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Choices of all nodes, by `top_level`, with the best value for `exposed`.

    If late work counts too little, too much is chosen to hide it all; if it counts too much, work
    that would have hidden is avoided. The value sought is about the least with which all that was
    chosen hides. It lies between 0 and 1, and is found by halving.

    Args, errors: as of `top_level`.
    """
    tried = [list(start)]

    def all_hides(part: float) -> bool:
        """Whether nothing is left over where `part` of late work counts."""
        best = min(tried, key=network.cost)
        found = top_level(network, cuts, part, best, deadline, together)
        tried.append(found)
        return network.seconds_and_late(found)[1] <= 0

    low, high = 0.0, 1.0
    if not all_hides(low) and all_hides(high):
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if all_hides(middle) else (middle, high)
    return min(tried, key=network.cost)


def top_level(
    network: CostNetwork,
    cuts: Sequence[Sequence[Segment]],
    exposed: float,
    start: Sequence[int],
    deadline: Deadline | None = None,
    together: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Choices of all nodes: the best of those found by dynamic programming and `start`, improved.

    To improve is to decide two neighbouring segments again while all others stay, then the next
    two, then each group of `together`, and again until nothing changes. What is best is so with
    `exposed` of the late work counted.

    Args:
        cuts: the nodes in segments, cut in one way or in several.
        exposed: the part of late work that counts.
        start: choices that are known.
        together: nodes that are improved together, several times over.
        deadline: when to stop, with what is found by then; by default there is none.

    Raises:
        NoSolution: every result has an infinite cost: earlier decisions ruled out all later ones.
    """
    run = _TopLevel(network, exposed, deadline or Deadline())
    starts = [picks for picks in (*map(run.through, cuts), list(start)) if picks is not None]
    best = min(starts, key=run.network.cost)
    pairs = [(*a.inside, *b.inside, *a.ends()) for way in cuts for a, b in itertools.pairwise(way)]
    areas = [area for area in dict.fromkeys((*map(tuple, together), *pairs)) if area]
    found = run.improved(best, areas)
    if not np.isfinite(run.network.cost(found)):
        raise NoSolution(False)
    return found


class _TopLevel:
    def __init__(self, network: CostNetwork, exposed: float, deadline: Deadline) -> None:
        self.deadline = deadline
        zero = np.zeros
        nodes = [
            DecisionNode(n.name, n.seconds + exposed * n.late, zero(n.size)) for n in network.nodes
        ]
        moved = [
            dataclasses.replace(m, seconds=m.seconds + exposed * m.late, late=zero(m.late.shape))
            for m in network.moves
        ]
        self.network = CostNetwork(nodes, moved)
        self.known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.of_node: list[list[ReshardCosts]] = [[] for _ in nodes]
        for moves in moved:
            for node in moves.nodes():
                self.of_node[node].append(moves)

    def through(self, cuts: Sequence[Segment]) -> list[int] | None:
        """The choices of the best way through all segments, or None if none was found, in time."""
        paths = [_Path((-1,) * len(self.network.nodes), 0.0)]
        for segment in cuts:
            reached: dict[int, _Path] = {}
            for path in paths:
                if self.deadline.over():
                    return None
                for end, found in self._extended(segment, path, path is paths[0]):
                    if end not in reached or found.seconds < reached[end].seconds:
                        reached[end] = found
            if not reached:
                return None
            paths = sorted(reached.values(), key=lambda path: path.seconds)
        return list(paths[0].picks)

    def improved(self, picks: list[int], areas: Sequence[Sequence[int]]) -> list[int]:
        """`picks`, with the nodes of each area decided again; see `top_level`."""
        scopes = [self._scope(free) for free in areas]
        for _ in range(MAX_SWEEPS):
            before = list(picks)
            for free, scope in zip(areas, scopes, strict=True):
                if self.deadline.over():
                    return picks
                seen = (*free, -1, *(picks[node] for node in scope))
                if seen not in self.known:
                    self.known[seen] = self._found_again(free, picks)
                for node, pick in zip(free, self.known[seen], strict=True):
                    picks[node] = pick
            if picks == before:
                break
        return picks

    def _scope(self, free: Sequence[int]) -> list[int]:
        """The nodes `free` and their neighbours: no other choices matter to what they cost."""
        moves = (m for node in free for m in self.of_node[node])
        return sorted({*free, *(node for m in moves for node in m.nodes())})

    def _found_again(self, free: Sequence[int], picks: Sequence[int]) -> tuple[int, ...]:
        """The best choices of the nodes `free`, others being as in `picks`. They stay as they are
        if nothing is better, or if it would take too large a table to find out."""
        now = tuple(picks[node] for node in free)
        around = list(picks)
        for node in free:
            around[node] = -1
        network = self._program(free, around)
        try:
            seconds, best = min(solve_by_elimination(network, len(free) - 1))
        except TooLarge:
            return now
        return best if seconds < network.cost(now) * (1 - EQUAL_COST_RATIO) else now

    def _extended(self, segment: Segment, path: _Path, each: bool) -> Iterator[tuple[int, _Path]]:
        """The best decisions of the segment behind `path`, by the choice of the node at its end.

        Args:
            each: there has to be one for each choice; where programs are needed, only the best
                otherwise.
        """
        free = [*segment.inside, *segment.ends()]
        if not free:
            yield 0, path
            return
        network = self._program(free, path.picks)
        for seconds, picks in _best_for_each(
            network, each and segment.end is not None, self.deadline
        ):
            if np.isfinite(seconds):
                whole = list(path.picks)
                for node, pick in zip(free, picks, strict=True):
                    whole[node] = pick
                yield picks[-1], _Path(tuple(whole), path.seconds + seconds)

    def _program(self, free: Sequence[int], picks: Sequence[int]) -> CostNetwork:
        """The network of `free`, with others as picked (-1: not yet there)."""
        place = {node: i for i, node in enumerate(free)}
        seconds = [self.network.nodes[node].seconds.copy() for node in free]
        moves = {id(m): m for node in free for m in self.of_node[node]}
        left: list[ReshardCosts] = []
        for m in moves.values():
            self._reduce(m, place, picks, seconds, left)
        nodes = [
            DecisionNode(self.network.nodes[n].name, s, np.zeros(len(s)))
            for n, s in zip(free, seconds, strict=True)
        ]
        return CostNetwork(nodes, left)

    def _reduce(
        self,
        moves: ReshardCosts,
        place: Mapping[int, int],
        picks: Sequence[int],
        seconds: list[np.ndarray],
        left: list[ReshardCosts],
    ) -> None:
        """Charge what `moves` cost, some of its nodes being decided already.

        If one free node is left, the cost becomes its own (`seconds`); if several are, it goes on
        being a cost of moving, between these (`left`). What an earlier segment has paid is not
        paid again, and what a later one makes is paid there.
        """
        readers = tuple((place[n], needs) for n, needs in moves.readers if n in place)
        settled = sorted({int(q[picks[n]]) for n, q in moves.readers if picks[n] >= 0})
        table = moves.seconds.copy()
        table[:, settled] = np.where(np.isfinite(table[:, settled]), 0.0, np.inf)
        if moves.source in place:
            source = place[moves.source]
            seconds[source] += moves.seconds[:, settled].sum(axis=1)[moves.made]
            if readers:
                left.append(
                    dataclasses.replace(moves, source=source, readers=readers, seconds=table)
                )
        elif picks[moves.source] >= 0:
            row = table[int(moves.made[picks[moves.source]])]
            if len(readers) == 1:
                node, needs = readers[0]
                seconds[node] += row[needs]
            else:
                left.append(_from_outside(row, readers, len(seconds[readers[0][0]])))


def _from_outside(
    row: np.ndarray, readers: tuple[tuple[int, np.ndarray], ...], choices: int
) -> ReshardCosts:
    """Return the costs that several readers share of a tensor whose state is decided already.

    A `ReshardCosts` needs a source: the first reader is put there, with the same state for all
    choices.
    """
    made = np.zeros(choices, dtype=int)
    return ReshardCosts(readers[0][0], made, readers, row[None, :], np.zeros((1, len(row))))


def _best_for_each(
    network: CostNetwork, each: bool, deadline: Deadline
) -> list[tuple[float, tuple[int, ...]]]:
    """For each choice of the last node, the least that the network costs, and the picks.

    Where that takes integer programs, only the best of all, unless `each` is asked for.
    """
    last = len(network.nodes) - 1
    try:
        return solve_by_elimination(network, last)
    except TooLarge:
        choices = range(network.nodes[last].size) if each else (None,)
        return [_solved(network, last, choice, deadline) for choice in choices]


def _solved(
    network: CostNetwork, last: int, choice: int | None, deadline: Deadline
) -> tuple[float, tuple[int, ...]]:
    """The best picks by an integer program, the last node's being `choice` if that is given."""
    nodes = list(network.nodes)
    if choice is not None:
        only = np.where(np.arange(nodes[last].size) == choice, nodes[last].seconds, np.inf)
        nodes[last] = dataclasses.replace(nodes[last], seconds=only)
    narrowed = CostNetwork(nodes, network.moves)
    roots = eliminate_chains(narrowed)
    try:
        picks = tuple(
            roots.all_picks(solve_network(roots.network, deadline).picks if roots.nodes else ())
        )
    except NoSolution:
        return np.inf, ()
    return narrowed.cost(picks), picks
