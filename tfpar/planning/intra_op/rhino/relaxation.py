"""Least seconds of a step on a mesh, whatever is decided: relaxations of integer programs.

There is a program for each mesh axis (`ilp`), and they are one: what hides gradients of one hides
those of all. That of the first prices a step where all that is
decided along the others is as good as it can be (`relaxed_costs`). Those of the others price what
their axes add to that (`further_axes`): work that they do not divide, and what is sent along them.
No plan that runs every op in one of its ways, on this mesh, takes less than their sum.

It is the bound that a branch and bound over meshes needs (Land and Doig 1960): a mesh whose bound
is not below the best plan found need not be searched.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from tfpar.cost.host import waiting_for_host
from tfpar.planning.deadline import Deadline
from tfpar.planning.intra_op.rhino.axis_space import AxisStrategySpace
from tfpar.planning.intra_op.rhino.cost_network import CostNetwork, join
from tfpar.planning.intra_op.rhino.costs import gradient_models
from tfpar.planning.intra_op.rhino.further_axes import AddedCosts
from tfpar.planning.intra_op.rhino.ilp import FixedCharge, relaxed_seconds
from tfpar.planning.intra_op.rhino.relaxed_costs import RelaxedCosts


def least_seconds(spaces: Sequence[AxisStrategySpace], deadline: Deadline) -> float:
    """Bound a step on a mesh from below, whatever is decided.

    Args:
        spaces: of the first mesh axes that have several ranks, each where nothing is split along
            the others; along those that are not among them all is as good as it can be.

    Returns:
        The seconds; 0 if they were not found in time.
    """
    first = spaces[0]
    cluster, gradients = first.problem.cluster, gradient_models(first)[0]
    costs = [RelaxedCosts(first)]
    if not cluster.one_memory:  # there work that is not divided is done once for all
        costs += map(AddedCosts, spaces[1:])
    networks = [of_axis.network(gradients) for of_axis in costs]
    charges = _joined([of_axis.starts() for of_axis in costs], networks)
    running = relaxed_seconds(join(networks), deadline, charges)
    if not running:
        return 0.0
    return running + waiting_for_host(costs[0].least_dispatch_s(), running) + cluster.step_s


def _joined(
    charges: Sequence[Mapping[Hashable, FixedCharge]], networks: Sequence[CostNetwork]
) -> list[FixedCharge]:
    """Return the charges of networks that are joined: those of one key are one, the least."""
    found: dict[Hashable, FixedCharge] = {}
    nodes = moves = 0
    for of_network, network in zip(charges, networks, strict=True):
        for key, charge in of_network.items():
            known = found.get(key, FixedCharge(charge.seconds))
            by_nodes = {nodes + node: spends for node, spends in charge.by_nodes.items()}
            by_moves = {moves + move: spends for move, spends in charge.by_moves.items()}
            found[key] = FixedCharge(
                min(known.seconds, charge.seconds),
                known.by_nodes | by_nodes,
                known.by_moves | by_moves,
            )
        nodes, moves = nodes + len(network.nodes), moves + len(network.moves)
    return list(found.values())
