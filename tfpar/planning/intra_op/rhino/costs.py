"""Costs of the strategies of a space, as a cost network (Rhino §4.2).

Here is the product of `relu(x @ kernel)`, 64 rows times 1024 by 1024, on two slow devices (its
strategies are those of `axis_space`). A node costs what its ops take, and what reducing their
results takes, if they are not kept as they are made:

    MatMul     R,R -> R  134.2 ms    S(0),R -> S(0)  67.1 ms    S(1),S(0) -> P(sum)  67.1 ms    ...

A tensor costs what moving it takes, by how its maker keeps it (rows) and how a reader wants it:

    MatMul to Relu, us     R     S(0)    S(1)
    R                      0      0       0
    S(0)                 132      0      67
    P(sum)               264    132     132
    S(1)                 132     67       0

The terms are the evaluator's (`cost.terms`), but for one: packed collectives of gradients, which
the backward pass hides in part, are no sum over nodes. `Gradients` says what stands for them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Sequence

import numpy as np

from tfpar.cost.collectives import collective_seconds, seconds_per_byte
from tfpar.cost.pricer import Pricer
from tfpar.cost.terms import BUCKET_SIZES, Terms
from tfpar.ir.graph import Op, Tensor
from tfpar.ir.roles import BACKWARD, When
from tfpar.ir.traits import REFERENCES
from tfpar.planning.intra_op.rhino.axis_space import AxisStrategySpace
from tfpar.planning.intra_op.rhino.axis_strategy import AxisStrategy
from tfpar.planning.intra_op.rhino.cost_network import CostNetwork, DecisionNode, ReshardCosts
from tfpar.propagation.partitioned_graph import Reshard
from tfpar.spec import Mesh, Replicate, Spec, SpecError, replicated_spec


class Gradients(enum.Enum):
    """Model of the collectives of gradients in a network, which counts each by itself, where the
    evaluator packs them in buckets, and hides buckets behind the backward pass."""

    HIDDEN = "many buckets: latency does not matter, and the backward pass hides them"
    EXPOSED = "few buckets: they are full when no backward pass is left to hide them"
    ALONE = "each is a collective of its own, with its latency; nothing hides it"


def gradient_models(space: AxisStrategySpace) -> list[Gradients]:
    """List the models that may be right of a step, the likeliest first: few gradients are full in
    one bucket, so that nothing hides them."""
    times = space.model.roles.times
    weights = [v for v in space.graph.variables if v.trainable]
    num_bytes = sum(v.num_bytes * times.get(v.handle.op, 1) for v in weights)
    models = list(Gradients)
    return models[1:] if num_bytes <= BUCKET_SIZES[0] else models


_Way = tuple[int, np.ndarray, tuple[tuple[int, np.ndarray], ...]]
"""Of a tensor the source, what it is made as, and the readers, as of `ReshardCosts`."""

STAYS, CANNOT = 0, 1
"""The numbers of two moves: of what need not be moved, and of what cannot be."""


class Costs:
    """Costs of the strategies of `axis_space`, and of resharding tensors between them.

    All of it is computed once, as terms: every network of the space is made of these.
    """

    def __init__(self, space: AxisStrategySpace) -> None:
        self.space = space
        self.pricer = self._make_pricer(space.mesh)
        self._distinct = [self.pricer.zero()] * 2  # the terms of moves, by their numbers
        self._moved: dict[tuple[object, ...], dict[tuple[Spec, Spec], int]] = {}
        nodes = zip(space.nodes, space.strategies, strict=True)
        self._nodes = [self._strategy_terms(*node) for node in nodes]
        self._moves = self._all_moves()

    def _make_pricer(self, mesh: Mesh) -> Pricer:
        return Pricer(mesh, self.space.problem.cluster, self.space.model.roles)

    def network(
        self, gradients: Gradients = Gradients.HIDDEN, surcharge_s: float = 0.0
    ) -> CostNetwork:
        """Build the cost network of the strategies and the resharding between them.

        Args:
            surcharge_s: seconds that each collective counts beside what it takes
                (`planning.intra_op.tie_breaking`).
        """
        sizes = [len(terms) for terms, _ in self._nodes]
        terms = np.array([t.vector for of_node, _ in self._nodes for t in of_node])
        seconds, late = self._seconds_and_late(terms, gradients, surcharge_s)
        seconds += np.concatenate([more for _, more in self._nodes])
        late[np.isinf(seconds)] = 0.0
        parts = (np.split(costs, np.cumsum(sizes)[:-1]) for costs in (seconds, late))
        nodes = [
            DecisionNode(ops[0].name, *costs)
            for ops, *costs in zip(self.space.nodes, *parts, strict=True)
        ]
        terms = np.array([t.vector for t in self._distinct])
        seconds, late = self._seconds_and_late(terms, gradients, surcharge_s)
        seconds[CANNOT] = np.inf
        moves = [
            ReshardCosts(
                source,
                made,
                readers,
                sum(seconds[table] for table in tables),
                sum(late[table] for table in tables),
            )
            for (source, made, readers), tables in self._moves
        ]
        return CostNetwork(nodes, moves)

    # --- nodes -------------------------------------------------------------------

    def _strategy_terms(
        self, ops: Sequence[Op], strategies: Sequence[AxisStrategy]
    ) -> tuple[list[Terms], np.ndarray]:
        """For each strategy of a node the terms of its ops, and what seconds they take beside:
        infinite for one that is barred."""
        self.space.deadline.check()
        terms = [self.pricer.zero() for _ in strategies]
        seconds = np.zeros(len(strategies))
        for at, strategy in enumerate(strategies):
            for op in ops:
                try:
                    seconds[at] += self._add_strategy(terms[at], op, strategy)
                except SpecError:
                    seconds[at] = np.inf
        return terms, seconds

    def _add_strategy(self, terms: Terms, op: Op, strategy: AxisStrategy) -> float:
        """Add the terms of `op`; returns seconds beside.

        Raises:
            SpecError: it cannot run so.
        """
        space = self.space
        if op in space.variables:
            return self._update_seconds(op, strategy)
        if op in space.fed:
            return self._feeding_seconds(op, strategy)
        if not op.inputs and op not in space.growth.axis_splits:
            return 0.0
        if op in space.left_alone or op not in space.growth.axis_splits:
            self._add_left_alone(terms, op, strategy)
        else:
            self.pricer.add_op(terms, op, space.prepared.rules[op], space.decision(op, strategy))
        made, kept = space.specs(op, strategy, "made"), space.specs(op, strategy, "kept")
        for tensor, source, target in zip(op.outputs, made, kept, strict=True):
            if source != target:  # along this axis, or one before
                self.pricer.add_reshard(terms, Reshard(tensor, source, target))
        return 0.0

    def _feeding_seconds(self, op: Op, strategy: AxisStrategy) -> float:
        """Price the feeding of a batch: no op waits for it, but of plans that are equal, that is
        better which feeds a rank only its part."""
        (spec,) = self.space.specs(op, strategy, "kept")
        read = self.pricer.local_bytes(op.outputs[0], spec)
        return read / self.space.problem.cluster.device.memory_bandwidth

    def _add_left_alone(self, terms: Terms, op: Op, strategy: AxisStrategy) -> None:
        """Add what an op costs that is left to propagation: about as much as under data parallelism
        or on one rank, divided among the ranks that share its work along the axes before."""
        decision = self.space.data_parallel[op]
        split = strategy.needs == tuple(spec[0] for spec in decision.strategy.in_specs)
        single = self._make_pricer(Mesh(("data",), (self.space.parts,)))
        part = single.zero()
        single.add_op(part, op, self.space.prepared.rules[op], decision)
        times = 1.0 if split else self._parts_alone()
        before = self.space.before.get(op, ())
        for along, parts in zip(before, self.space.mesh.shape, strict=False):
            if any(not isinstance(p, Replicate) for p in along.needs):
                times /= parts
        for phase, seconds in enumerate(part.compute):
            terms.compute[phase] += times * seconds

    def _parts_alone(self) -> float:
        """Count the parts that an op that is left alone computes on each rank where it is whole."""
        return float(self.space.parts)

    def _update_seconds(self, op: Op, strategy: AxisStrategy) -> float:
        variable = self.space.variables[op]
        if self.space.problem.step.state_ratio is None or not variable.trainable:
            return 0.0
        (spec,) = self.space.specs(op, strategy, "kept")
        ratio = self.space.problem.step.state_ratio
        stored = self.pricer.stored_bytes(variable, spec, ratio)
        return self.pricer.update_seconds(stored.updated, ratio) + stored.copies_s

    def _seconds_and_late(
        self, terms: np.ndarray, gradients: Gradients, surcharge_s: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, late seconds) of terms, one in each row.

        Both are sums of the terms, each times its price: prices are written as terms themselves.
        """
        mesh, cluster = self.space.mesh, self.space.problem.cluster
        present, at_once, later = (self.pricer.zero() for _ in range(3))
        at_once.compute[:] = at_once.communication[:] = 1.0
        at_once.count = surcharge_s
        later.compute[BACKWARD] = -cluster.overlap
        present.vector += terms.sum(axis=0)
        alone = np.zeros(len(terms))
        for when in (When.BESIDE, When.AFTER):
            for kind, axes, _ in present.packed(when):
                if gradients is Gradients.ALONE:
                    one = self.pricer.zero()
                    one.pack(when, kind, axes, 1.0)
                    num_bytes = terms @ one.vector
                    for size in np.unique(num_bytes[num_bytes > 0]):
                        taken = collective_seconds(kind, axes, float(size), mesh, cluster)
                        alone[num_bytes == size] += surcharge_s + taken
                    continue
                hidden = gradients is Gradients.HIDDEN and when is When.BESIDE
                price = seconds_per_byte(kind, axes, mesh, cluster)
                (later if hidden else at_once).pack(when, kind, axes, price)
        return terms @ at_once.vector + alone, terms @ later.vector

    # --- moves -------------------------------------------------------------------

    def _all_moves(self) -> list[tuple[_Way, list[np.ndarray]]]:
        """The ways that tensors go, each with the table of every tensor that goes so."""
        found: dict[tuple[object, ...], tuple[_Way, list[np.ndarray]]] = {}
        outputs = set(self.space.graph.outputs)
        for op in self.space.graph.ops:
            if op not in self.space.place:
                continue
            self.space.deadline.check()
            for tensor in op.outputs:
                readers = self.space.prepared.consumers.get(tensor, ())
                moves = self._way_and_table(op, tensor, readers, tensor in outputs)
                if moves is None:
                    continue
                (source, made, read), table = moves
                key = source, made.tobytes(), table.shape, tuple((n, q.tobytes()) for n, q in read)
                found.setdefault(key, (moves[0], []))[1].append(table)
        return list(found.values())

    def _way_and_table(
        self, op: Op, tensor: Tensor, readers: Collection[Op], is_output: bool
    ) -> tuple[_Way, np.ndarray] | None:
        """The way of a tensor, and the numbers of the moves between its states (rows) and those
        that it is needed in; None if nobody reads it, or nothing ever moves."""
        space = self.space
        states: dict[Spec, int] = {}
        source = space.place[op]
        made = [
            states.setdefault(specs[tensor.index], len(states))
            for specs in space.specs_of(op, "kept")
        ]
        needed: dict[Spec, int] = {}
        reading: dict[tuple[int, bytes], tuple[int, np.ndarray]] = {}
        for reader in readers:
            if reader not in space.place:
                continue
            node = space.place[reader]
            for position, read in enumerate(reader.inputs):
                if read is tensor:
                    needs = np.array(
                        [
                            needed.setdefault(specs[position], len(needed))
                            for specs in space.specs_of(reader, "needs")
                        ]
                    )
                    reading.setdefault((node, needs.tobytes()), (node, needs))
        if is_output:
            # An output of the graph is wanted whole: its maker stands for whoever reads it.
            whole = needed.setdefault(replicated_spec(space.mesh.num_axes), len(needed))
            reading[source, b"output"] = source, np.full(len(made), whole)
        if not reading:
            return None
        moved = self._moves_of(tensor)
        table = np.array([[moved(p, q) for q in needed] for p in states])
        if not table.any():
            return None
        return (source, np.array(made), tuple(reading.values())), table

    def _moves_of(self, tensor: Tensor) -> Callable[[Spec, Spec], int]:
        """The number of the move of `tensor` from one spec to another, by these."""
        roles = self.space.model.roles
        alike = (
            tuple(tensor.shape or ()),
            tensor.dtype,
            roles.wire_dtypes.get(tensor),
            roles.phase[tensor.op],
            tensor in roles.deferrable,
            roles.times.get(tensor.op, 1),
            roles.stays_within(tensor),
        )
        known = self._moved.setdefault(alike, {})

        def number(source: Spec, target: Spec) -> int:
            if source == target:
                return STAYS
            at = known.get((source, target))
            if at is None:
                at = known[source, target] = self._move(tensor, source, target)
            return at

        return number

    def _move(self, tensor: Tensor, source: Spec, target: Spec) -> int:
        if tensor.dtype in REFERENCES:
            return CANNOT
        terms = self.pricer.zero()
        try:
            self.pricer.add_reshard(terms, Reshard(tensor, source, target))
        except SpecError:
            return CANNOT
        if not terms.vector.any():
            return STAYS
        self._distinct.append(terms)
        return len(self._distinct) - 1


def with_split(
    space: AxisStrategySpace, network: CostNetwork, names: Collection[str]
) -> CostNetwork:
    """Return `network` with the variables of these names forced to be split (§4.4); those that
    cannot be stay as they are."""
    if not names:
        return network
    nodes = list(network.nodes)
    for number, ops in enumerate(space.nodes):
        if any(op in space.variables and space.variables[op].name in names for op in ops):
            whole = [
                isinstance(strategy.kept[0], Replicate) for strategy in space.strategies[number]
            ]
            if not all(whole):
                seconds = np.where(whole, np.inf, nodes[number].seconds)
                nodes[number] = dataclasses.replace(nodes[number], seconds=seconds)
    return CostNetwork(nodes, network.moves)
