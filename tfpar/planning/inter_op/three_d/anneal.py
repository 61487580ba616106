"""Simulated annealing over degrees, microbatch size and placement (auto3d, Algorithm 1)."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from tfpar.planning.inter_op.three_d.evaluation import Evaluation, StrategySearchResult, lower_bound
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.space import ParallelDegrees, StrategyPoint, StrategySpace
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.planning.problem import Progress

ITERATIONS = 500
"""As in the paper's experiments (§5)."""

DRAWS = 10
"""Number of draws of a neighbour, and then of any point, until one was not priced before."""

SWEEP, RETURNS = 2, 10
"""Half of the iterations at most goes through the degrees; after a tenth without a better
strategy the search returns to the best."""

DESCENTS, LAST = 2, 5
"""Half of the iterations that are left then goes to descents; a fifth more to those at the end."""

NEAR = 1.1
"""How many times as large as of the point that it is next to, at most, the bound of a point is that
is simulated in a descent: what bounds leave out differs little between neighbours."""

MOST_ORDERS = 24
"""In how many orders, at most, kinds of machines follow each other in the beginning."""

HOTTEST = 0.1
"""A step that is a tenth slower is first taken in one of e cases. The paper has 1 second, where
steps take one or two."""


def anneal(
    model: StrategyProblem,
    *,
    seed: int = 0,
    iterations: int = ITERATIONS,
    seconds: float = math.inf,
    starts: Iterable[Strategy3D] = (),
    progress: Progress | None = None,
) -> StrategySearchResult:
    """Find a good strategy where there are too many to price all of them.

    A part of the iterations goes through the degrees, those with the least bound first, on ranks in
    their order, and on kinds of machines one after the other. Another descends from the best of
    these, by one machine or block at a time (`_descend`). From the best by then on neighbours are
    drawn; where they have led nowhere for a while, again from the best point that is known. A
    neighbour is simulated unless its bound is enough to refuse it. At the end the best points are
    descended from, too: what is drawn goes to many places, and hardly to the bottom of any.

    Args:
        seconds: after which the search ends with what it has. The same seed finds the same as long
            as it does not end so.
        starts: strategies that are among those that are compared at the end; their degrees are gone
            through first.
        progress: is called with each point that is priced.

    Raises:
        PlanError: there is no strategy; a MemoryLimitError if none was found that fits.
    """
    deadline = time.monotonic() + seconds

    def over() -> bool:
        return time.monotonic() > deadline

    rng = random.Random(seed)
    space = StrategySpace(model)
    evaluation = Evaluation(space, progress)
    evaluation.add(starts)
    bounds = {degrees: lower_bound(model, degrees) for degrees in space.degrees}
    _begin(space, bounds, evaluation, max(1, iterations // SWEEP), over)
    tried = len(evaluation.found)
    _descend_all(rng, evaluation, bounds, tried + (iterations - tried) // DESCENTS, over)
    state = known = min(evaluation.found, key=evaluation.known)
    cost = best = evaluation.simulate(known)
    idle = 0
    for step in range(len(evaluation.found), iterations):
        if over():
            break
        temperature = HOTTEST * (1 - step / iterations)
        # No placement of the others is better than what is known.
        hopeful = [degrees for degrees in space.degrees if bounds[degrees] < evaluation.best_s]
        if not hopeful:
            break
        near = (_neighbour(rng, space, state, hopeful) for _ in range(DRAWS))
        any_of = (space.sample(rng, rng.choice(hopeful)) for _ in range(DRAWS))
        drawn = itertools.chain(near, any_of)
        point = next((one for one in drawn if one not in evaluation.found), None)
        if point is None:
            continue
        most = _most(rng, cost, temperature)
        new = evaluation.price(point)
        if new <= most and new < evaluation.best_s:
            new = evaluation.simulate(point)
        idle = 0 if new < best else idle + 1
        if new < best:
            known, best = point, new
        if new <= most and new < math.inf:
            state, cost = point, new
        elif idle > iterations // RETURNS:
            state, cost, idle = known, best, 0
    _descend_all(rng, evaluation, bounds, iterations + iterations // LAST, over)
    return evaluation.chosen(over=over)


def _descend_all(
    rng: random.Random,
    evaluation: Evaluation,
    bounds: dict[ParallelDegrees, float],
    most: int,
    over: Callable[[], bool],
) -> None:
    """Descend from the points that are known, the best first, until `most` points are priced."""
    for start in sorted(evaluation.found, key=evaluation.known):
        if len(evaluation.found) >= most or over():
            break
        if bounds[start.degrees] < evaluation.best_s:
            _descend(rng, evaluation, start, most, over)


def _descend(
    rng: random.Random,
    evaluation: Evaluation,
    point: StrategyPoint,
    most: int,
    over: Callable[[], bool],
) -> None:
    """Go from a point to any better neighbour, until there is none."""
    cost = _seconds(evaluation, point)
    better: StrategyPoint | None = point
    while better is not None:
        point, better = better, None
        for other in _placements(rng, evaluation.space, point):
            if other not in evaluation.found and (len(evaluation.found) >= most or over()):
                return
            bound = evaluation.price(other)
            if bound < cost and bound <= NEAR * evaluation.price(point):
                new = _seconds(evaluation, other)
                if new < cost:
                    better, cost = other, new
                    break


def _seconds(evaluation: Evaluation, point: StrategyPoint) -> float:
    """As simulated of what may be the best, else the bound: simulations take long."""
    bound = evaluation.price(point)
    return evaluation.simulate(point) if bound < evaluation.best_s else bound


def _placements(
    rng: random.Random, space: StrategySpace, point: StrategyPoint
) -> Iterator[StrategyPoint]:
    """Yield the points with the same degrees of which one block stands otherwise, and then those of
    which one machine or block of machines is elsewhere or exchanged with another, in any order."""
    for at, stands in enumerate(point.standing):
        yield point._replace(standing=(*point.standing[:at], not stands, *point.standing[at + 1 :]))
    moves = [
        (move, blocks, one, other)
        for size in dict.fromkeys((1, point.degrees.data))
        for blocks in [_blocks(point.order, size)]
        for one, other in itertools.permutations(range(len(blocks)), 2)
        if blocks[one] != blocks[other]
        for move in (_exchanged, _moved)
    ]
    rng.shuffle(moves)
    known = {point.order}
    for move, blocks, one, other in moves:
        order = _joined(move(blocks, one, other))
        if order not in known:
            known.add(order)
            lying = space.lying(point.degrees, order)
            if len(lying.standing) == len(point.standing):
                yield lying._replace(standing=point.standing)
            else:
                yield lying
                yield lying._replace(standing=(True,) * len(lying.standing))


Blocks = list[tuple[int, ...]]
"""Kinds of machines that follow each other, block by block."""


def _blocks(order: tuple[int, ...], size: int) -> Blocks:
    return [order[at : at + size] for at in range(0, len(order), size)]


def _joined(blocks: Blocks) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(blocks))


def _exchanged(blocks: Blocks, one: int, other: int) -> Blocks:
    found = list(blocks)
    found[one], found[other] = found[other], found[one]
    return found


def _moved(blocks: Blocks, one: int, other: int) -> Blocks:
    found = list(blocks)
    found.insert(other, found.pop(one))
    return found


def _begin(
    space: StrategySpace,
    bounds: dict[ParallelDegrees, float],
    evaluation: Evaluation,
    most: int,
    over: Callable[[], bool],
) -> None:
    """Price the first points.

    Degrees with machines in the order of their ranks, and then with kinds of machines one after the
    other, in every order: few stages then have machines of several kinds. Dominoes all lie, or all
    stand.
    """
    given = [priced.strategy for priced in evaluation.ranked()]
    first = [ParallelDegrees(s.data, s.tensor, s.microbatch, s.virtual, s.experts) for s in given]
    ordered = sorted(space.degrees, key=lambda d: (d not in first, bounds[d]))
    cost, tried = math.inf, 0
    orders = dict.fromkeys([space.plain_order, *_by_kind(space)])
    for order, stands in itertools.product(orders, (False, True)):
        for degrees in ordered:
            lying = space.lying(degrees, order)
            point = lying._replace(standing=(stands,) * len(lying.standing))
            if point in evaluation.found:
                continue
            if tried == most or tried and (bounds[degrees] > cost or over()):
                break
            cost = min(cost, evaluation.price(point))
            tried += 1


def _by_kind(space: StrategySpace) -> Iterator[tuple[int, ...]]:
    """Orders in which machines of a kind follow each other."""
    for kinds in itertools.islice(itertools.permutations(range(len(space.kinds))), MOST_ORDERS):
        yield tuple(kind for kind in kinds for _ in space.kinds[kind])


def _most(rng: random.Random, cost: float, temperature: float) -> float:
    """Seconds up to which a point is accepted, with a probability that falls with the temperature.

    Differences are relative, as a step may take milliseconds or minutes.
    """
    return cost * (1 - temperature * math.log(1 - rng.random()))


def _neighbour(
    rng: random.Random,
    space: StrategySpace,
    state: StrategyPoint,
    hopeful: Sequence[ParallelDegrees],
) -> StrategyPoint:
    """A point with other degrees, some of them the same, or with another placement, or both."""
    vary = rng.randrange(6)
    if vary > 2 and len(hopeful) != 1:
        own = state.degrees
        near = [
            degrees
            for degrees in hopeful
            if (vary != 3 or degrees.data == own.data)
            and (vary != 4 or degrees.tensor == own.tensor)
            and degrees != own
        ]
        degrees = rng.choice(near or hopeful or space.degrees)
        return _placed(rng, space, state, degrees, _order(rng, state.order, degrees.data))
    standing = list(state.standing)
    if standing and rng.random() < 0.5:
        turned = rng.randrange(len(standing))
        standing[turned] = not standing[turned]
        return state._replace(standing=tuple(standing))
    order = _order(rng, state.order, state.degrees.data)
    return _placed(rng, space, state, state.degrees, order)


def _placed(
    rng: random.Random,
    space: StrategySpace,
    state: StrategyPoint,
    degrees: ParallelDegrees,
    order: tuple[int, ...],
) -> StrategyPoint:
    """With these degrees and order; dominoes stand as they do, if there are as many blocks."""
    point = space.sample(rng, degrees, order)
    same = len(point.standing) == len(state.standing)
    return point._replace(standing=state.standing) if same else point


def _order(rng: random.Random, order: tuple[int, ...], copies: int) -> tuple[int, ...]:
    """The same, one with two machines or blocks exchanged or one moved, or any.

    As many machines as there are copies are a block in which dominoes may stand: of several blocks,
    moving one leaves the others as they are, where moving single machines would break them up.
    """
    vary = rng.randrange(4)
    if vary == 0 or len(set(order)) == 1:
        return order
    blocks = _blocks(order, rng.choice((1, copies)) if 2 * copies <= len(order) else 1)
    one, other = rng.sample(range(len(blocks)), 2)
    if vary == 1:
        blocks = _exchanged(blocks, one, other)
    elif vary == 2:
        blocks = _moved(blocks, one, other)
    else:
        rng.shuffle(blocks)
    return _joined(blocks)
