"""Cost networks: the ILP, with and without merged chains, finds the least of all choices."""

from __future__ import annotations

import itertools

import numpy as np
import pulp
import pytest

from tests.cases import seeds
from tfpar.planning.deadline import Deadline
from tfpar.planning.intra_op.rhino.cones import eliminate_chains
from tfpar.planning.intra_op.rhino.cost_network import (
    CostNetwork,
    DecisionNode,
    ReshardCosts,
    join,
)
from tfpar.planning.intra_op.rhino.ilp import (
    FixedCharge,
    NoSolution,
    Solution,
    _Program,
    relaxed_seconds,
    solve_nearly,
)
from tfpar.planning.intra_op.rhino.ilp import solve_network as solve
from tfpar.planning.solver import RELATIVE_GAP

SEEDS = range(25)


def node(seconds, late=0.0, name="op"):
    seconds = np.array(seconds, "float64")
    return DecisionNode(
        name, seconds, np.broadcast_to(np.array(late, "float64"), seconds.shape).copy()
    )


def moves(source, made, readers, seconds, late=0.0):
    seconds = np.array(seconds, "float64")
    late = np.broadcast_to(np.array(late, "float64"), seconds.shape)
    return ReshardCosts(
        source, np.array(made), tuple((n, np.array(q)) for n, q in readers), seconds, late
    )


def between(one, other, seconds, late=0.0):
    """What two nodes cost together, by their choices."""
    rows, columns = np.shape(seconds)
    return moves(one, range(rows), [(other, range(columns))], seconds, late)


def least(network):
    """The least cost of all choices, one after another."""
    picks = itertools.product(*(range(n.size) for n in network.nodes))
    return min(network.cost(p) for p in picks)


def drawn(seed, nodes=6, most_readers=3, barred=0.1, chain=False):
    """A network of small numbers, so that many choices cost nearly the same."""
    rng = np.random.default_rng(seed)

    def seconds(*shape):
        found = rng.integers(0, 8, shape).astype("float64")
        found[rng.random(shape) < barred] = np.inf
        return found

    sizes = rng.integers(1, 4, nodes)
    found = [
        DecisionNode(
            f"op{i}", np.append(rng.integers(0, 8), seconds(n - 1)), rng.integers(-6, 7, n) * 1.0
        )
        for i, n in enumerate(sizes)
    ]
    tensors = []
    for source in range(nodes - chain):
        others = (
            [source + 1] if chain else rng.integers(0, nodes, rng.integers(1, most_readers + 1))
        )
        states = rng.integers(1, 4, 2)
        needs = {(int(r), tuple(map(int, rng.integers(0, states[1], sizes[r])))) for r in others}
        table = seconds(*states)
        late = np.where(np.isfinite(table), rng.integers(0, 5, states), 0) * 1.0
        made = rng.integers(0, states[0], sizes[source])
        tensors.append(moves(source, made, sorted(needs), table, late))
    return CostNetwork(found, tensors)


def solved(network) -> Solution | None:
    try:
        return solve(network)
    except NoSolution as error:
        assert not error.timed_out
        return None


@pytest.mark.parametrize("seed", seeds(10, 25))
def test_the_program_finds_the_least_of_all_choices(seed):
    network = drawn(seed)
    found, best = solved(network), least(network)
    if np.isinf(best):
        assert found is None
    else:
        assert found.seconds == network.cost(found.picks) == pytest.approx(best)
        assert found.gap <= RELATIVE_GAP


@pytest.mark.parametrize("seed", seeds(10, 25))
@pytest.mark.parametrize("shape", ["chains", "mixed"])
def test_merging_chains_loses_nothing(seed, shape):
    network = drawn(seed, most_readers=2) if shape == "mixed" else drawn(seed, chain=True)
    roots, best = eliminate_chains(network), least(network)
    found = solved(roots.network)
    if np.isinf(best):
        assert found is None
    else:
        assert network.cost(roots.all_picks(found.picks)) == pytest.approx(best)


def test_the_networks_drawn_are_of_all_kinds():
    """Some have no solution, some hide work, in some chains are merged: the tests above say
    something of each."""
    networks = [drawn(seed) for seed in SEEDS]
    best = [least(n) for n in networks]
    assert any(np.isinf(b) for b in best) and sum(map(np.isfinite, best)) > len(SEEDS) / 2
    solvable = [n for n, b in zip(networks, best, strict=True) if b < np.inf]
    found = [n.seconds_and_late(solve(n).picks) for n in solvable]
    assert any(late > 0 for _, late in found) and any(late < 0 for _, late in found)
    merged = [drawn(seed, most_readers=2) for seed in SEEDS]
    left = [(len(eliminate_chains(n).nodes), len(n.nodes)) for n in merged]
    assert any(kept < size for kept, size in left) and any(kept > 1 for kept, _ in left)


def test_a_chain_without_late_work_is_one_root():
    rng = np.random.default_rng(0)
    nodes = [node(rng.random(4)) for _ in range(9)]
    network = CostNetwork(nodes, [between(i, i + 1, rng.random((4, 4))) for i in range(8)])
    roots = eliminate_chains(network)
    assert len(roots.nodes) <= 1
    best = solve(network)
    picks = solve(roots.network).picks
    assert roots.all_picks(picks) == list(best.picks)


def test_a_chain_stays_where_it_matters_what_hides():
    """Which choice in the middle is best hangs on what the rest of the network has to hide."""
    middle = node([0.0, 2.0], [5.0, 0.0])
    for hidden, best in ((0.0, 1), (-5.0, 0)):
        ends = node([0.0], hidden), node([0.0])
        tables = [between(0, 1, [[1.0, 1.0]]), between(1, 2, [[1.0], [1.0]])]
        network = CostNetwork([ends[0], middle, ends[1]], tables)
        roots = eliminate_chains(network)
        assert roots.all_picks(solve(roots.network).picks)[1] == best == solve(network).picks[1]


def test_what_hides_work_hides_that_of_others():
    """Of nodes that no tensor joins, one hides what another has to hide."""
    network = CostNetwork([node([0.0], -10.0), node([1.0, 0.0], [0.0, 5.0])], [])
    assert solve(network).picks == (0, 1)
    roots = eliminate_chains(network)
    assert roots.all_picks(solve(roots.network).picks) == [0, 1]


# --- what costs -----------------------------------------------------------------------


def test_a_tensor_is_moved_once_for_all_that_need_it_alike():
    move = [[0.0, 3.0], [3.0, 0.0]]
    readers = [(1, [0, 1]), (2, [0, 1])]
    pays = node([0.0, 1e6])
    # The readers would pay 2 each to take the tensor as it lies: both, 4, against one move.
    network = CostNetwork(
        [pays, node([2.0, 0.0]), node([2.0, 0.0])], [moves(0, [0, 1], readers, move)]
    )
    assert solve(network).picks == (0, 1, 1)
    assert solve(network).seconds == pytest.approx(3.0)
    # Where one of them cannot follow, it is cheaper not to move it for the other.
    network = CostNetwork(
        [pays, node([2.0, 0.0]), node([2.0, np.inf])], [moves(0, [0, 1], readers, move)]
    )
    assert solve(network).picks == (0, 0, 0)
    # Moved to different states, it is moved twice.
    apart = [(1, [0, 1]), (2, [0, 2])]
    network = CostNetwork(
        [node([0.0]), node([np.inf, 0.0]), node([np.inf, 0.0])],
        [moves(0, [0], apart, [[0.0, 3.0, 3.0]])],
    )
    assert solve(network).seconds == pytest.approx(6.0)


def test_a_barred_choice_or_move_is_not_made():
    barred = CostNetwork([node([np.inf, 5.0])], [])
    assert solve(barred).picks == (1,)
    table = [[np.inf, np.inf], [9.0, np.inf]]
    barred = CostNetwork([node([0.0, 5.0]), node([5.0, 0.0])], [between(0, 1, table)])
    roots = eliminate_chains(barred)
    for found in (solve(barred).picks, roots.all_picks(solve(roots.network).picks)):
        assert tuple(found) == (1, 0)


def test_a_node_pays_for_what_it_reads_of_its_own():
    """Its twin's tensor: of ops that run alike, one reads what another makes."""
    network = CostNetwork(
        [node([0.0, 1.0])], [moves(0, [0, 1], [(0, [1, 1])], [[0.0, 4.0], [4.0, 0.0]])]
    )
    assert solve(network).picks == (1,)
    roots = eliminate_chains(network)
    assert roots.all_picks(solve(roots.network).picks) == [1]


def test_late_work_costs_only_what_nothing_hides():
    late = node([0.0, 3.0], [5.0, 0.0])
    assert solve(CostNetwork([late], [])).picks == (1,)  # 3 s are less than 5
    for hides, seconds, pick in ((-4.0, 1.0, 0), (-9.0, 0.0, 0), (-1.0, 3.0, 1)):
        found = solve(CostNetwork([late, node([0.0], hides)], []))
        assert found.seconds == pytest.approx(seconds) and found.picks[0] == pick


@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e5])
def test_times_of_any_order_are_told_apart(scale):
    """Solvers' tolerances are absolute."""
    rng = np.random.default_rng(3)
    nodes = [node(scale * (1 + 1e-3 * rng.random(3))) for _ in range(5)]
    tables = [
        between(i, j, scale * 1e-3 * rng.random((3, 3)))
        for i, j in itertools.combinations(range(5), 2)
    ]
    network = CostNetwork(nodes, tables)
    assert solve(network).seconds == pytest.approx(least(network), rel=2e-6)
    hides = node([scale], -scale * 0.99)
    late = node(scale * np.array([1.0, 1.002]), scale * np.array([1.0, 0.99]))
    assert solve(CostNetwork([hides, late], [])).picks == (0, 1)


# --- what is near enough --------------------------------------------------------------


def test_what_is_nearly_best_is_the_best_where_the_relaxation_is_integer():
    for seed in SEEDS:
        network = drawn(seed)
        best = least(network)
        if np.isinf(best):
            continue
        found = solve_nearly(network)
        costs = [network.cost(solution.picks) for solution in found]
        assert costs == [solution.seconds for solution in found] and min(costs) >= best - 1e-9
        if len(found) == 1:
            assert costs == [pytest.approx(best)]


def test_the_relaxation_is_a_mixture_of_what_is_best_beside_it():
    """Two ways of a whole model: one has more to hide, and one more that hides. A relaxation that
    takes a part of each costs less than both, which come out."""
    model = node([1.0, 5.5, 9.0], [6.0, 0.0, -6.0])
    network = CostNetwork([model, node([0.0])], [])
    found = solve_nearly(network)
    assert sorted(solution.picks[0] for solution in found) == [0, 2]
    assert solve(network).picks[0] == 1


# --- what may go wrong ------------------------------------------------------------------


@pytest.mark.parametrize("merges", [False, True])
def test_where_nothing_is_allowed_there_is_no_solution(merges):
    nothing = CostNetwork([node([1.0]), node([np.inf, np.inf])], [])
    no_way = CostNetwork([node([1.0, 1.0]), node([1.0])], [between(0, 1, [[np.inf], [np.inf]])])
    for network in (nothing, no_way):
        with pytest.raises(NoSolution) as error:
            solve(eliminate_chains(network).network if merges else network)
        assert not error.value.timed_out


def hard(nodes=36, choices=5):
    """Every pair of nodes has a table of its own: the relaxation says little."""
    rng = np.random.default_rng(0)
    pairs = itertools.combinations(range(nodes), 2)
    tables = [between(i, j, rng.random((choices, choices))) for i, j in pairs]
    return CostNetwork([node(rng.random(choices)) for _ in range(nodes)], tables)


@pytest.mark.slow
def test_where_time_is_up_the_best_so_far_comes_with_its_gap():
    network = hard()
    with pytest.raises(NoSolution) as error:
        solve(network, Deadline(1e-3))
    assert error.value.timed_out
    found = solve(network, Deadline(3.0))
    assert found.gap > RELATIVE_GAP
    assert found.seconds == pytest.approx(network.cost(found.picks))
    rng = np.random.default_rng(1)
    chance = min(network.cost(rng.integers(0, 5, 36)) for _ in range(50))
    assert found.seconds * (1 - found.gap) <= chance


@pytest.fixture
def cbc(monkeypatch):
    """Solvers as where HiGHS is missing; those that were asked for, by name."""
    asked = {}

    def only_cbc(name, **options):
        found = asked[name] = get(name, **options)
        if name == "HiGHS":
            monkeypatch.setattr(found, "available", lambda: False)
        return found

    get = pulp.getSolver
    monkeypatch.setattr(pulp, "getSolver", only_cbc)
    return asked


def test_without_highs_there_is_cbc(cbc):
    for seed in range(4):
        network = drawn(seed)
        found, best = solved(network), least(network)
        assert best == np.inf if found is None else found.seconds == pytest.approx(best)
        assert found is None or found.gap == 0.0
    assert set(cbc) == {"HiGHS", "PULP_CBC_CMD"}
    with pytest.raises(NoSolution) as error:
        solve(CostNetwork([node([1.0, 1.0]), node([1.0])], [between(0, 1, [[np.inf], [np.inf]])]))
    assert not error.value.timed_out


def test_cbc_may_find_nothing_in_time(cbc, monkeypatch):
    def stopped(solver, problem):
        return problem.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)

    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", stopped)
    deadline = Deadline()
    with pytest.raises(NoSolution) as error:
        solve(drawn(0), deadline)
    assert error.value.timed_out and deadline.cut_short


def test_without_any_solver_it_is_said_what_to_install(monkeypatch):
    class Missing:
        def available(self):
            return False

    monkeypatch.setattr(pulp, "getSolver", lambda *_, **__: Missing())
    with pytest.raises(RuntimeError, match="pip install highspy"):
        solve(CostNetwork([node([1.0])], []))


def test_what_several_readers_may_share_has_a_variable_of_its_own():
    """Of a tensor that two ops read, each product is a reader's, and what is moved is once."""
    late = node([0.0, 1.0], [1.0, 0.0])
    tensor = moves(0, [0, 1], [(1, [0, 1]), (2, [0, 1])], [[0.0, 3.0], [3.0, 0.0]])
    program = _Program(CostNetwork([late, node([0.0, 0.0]), node([0.0, 0.0])], [tensor])).stated()
    choices, products, once, exposed = 6, 2 * 4, 2, 1
    assert len(program.cost) == choices + products + once + exposed
    assert program.integer.sum() == choices
    assert (program.cost[choices : choices + products] == 0).all(), "they share what it costs"
    one, marginals = 3, 2 * (2 + 2)
    assert len(program.least) == one + marginals + 2 * once + exposed
    alone = moves(0, [0, 1], [(1, [0, 1])], [[0.0, 3.0], [3.0, 0.0]])
    program = _Program(CostNetwork([late, node([0.0, 0.0])], [alone])).stated()
    assert len(program.cost) == 4 + 4 + exposed, "a reader by itself pays for its products"


def test_a_fixed_charge_is_spent_once_by_all_that_spend_it():
    """Two nodes and a move between them may each spend it; to do without costs 3 in all."""
    network = CostNetwork(
        [node([1, 0]), node([1, 0])], [between(0, 1, [[1, np.inf], [np.inf, 0.5]])]
    )
    spends = np.array([False, True])
    moved = np.array([[False, False], [False, True]])

    def bound(seconds, by_moves):
        charge = FixedCharge(seconds, {0: spends, 1: spends}, by_moves)
        return relaxed_seconds(network, Deadline(), [charge])

    assert bound(0.0, {0: moved}) == pytest.approx(0.5)
    assert bound(2.0, {0: moved}) == pytest.approx(2.5)
    assert bound(4.0, {}) == pytest.approx(3.0)
    only_moves = FixedCharge(1.0, {}, {0: moved})
    assert relaxed_seconds(network, Deadline(), [only_moves]) == pytest.approx(1.5)


@pytest.mark.parametrize("seed", seeds(3, 25))
def test_late_work_hides_behind_what_hides_that_of_others_that_are_joined(seed):
    networks = [drawn(seed, nodes=3), drawn(100 + seed, nodes=3)]
    joined = join(networks)
    size = len(networks[0].nodes)
    for picks in itertools.product(*(range(n.size) for n in joined.nodes)):
        both = (
            networks[0].seconds_and_late(picks[:size]),
            networks[1].seconds_and_late(picks[size:]),
        )
        seconds, late = map(sum, zip(*both, strict=True))
        assert joined.cost(picks) == pytest.approx(seconds + max(0.0, late))
