"""What the strategies of a space cost: its network (Rhino §4.2).

Here is the product of `relu(x @ kernel)`, 64 rows times 1024 by 1024, on two slow devices (its
strategies are those of `space`). A node costs what its ops take, and what reducing their results
takes, if they are not kept as they are made:

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
from collections.abc import Collection, Sequence

import numpy as np

from tfpar.cost.collectives import collective_seconds, seconds_per_byte
from tfpar.cost.pricer import Pricer
from tfpar.cost.terms import Terms
from tfpar.cost.update import update_seconds
from tfpar.ir.graph import Op, Tensor
from tfpar.ir.roles import BACKWARD, When
from tfpar.ir.traits import REFERENCES
from tfpar.propagation.partitioned import Reshard
from tfpar.search.rhino.axis_strategy import AxisStrategy
from tfpar.search.rhino.network import Moves, Network, Node
from tfpar.search.rhino.space import Space
from tfpar.spec import Mesh, Replicate, Spec, SpecError, replicated


class Gradients(enum.Enum):
    """How a network counts the collectives of gradients: each by itself, where the evaluator packs
    them in buckets, and hides buckets behind the backward pass."""

    HIDDEN = "many buckets: latency does not matter, and the backward pass hides them"
    EXPOSED = "few buckets: they are full when no backward pass is left to hide them"
    ALONE = "each is a collective of its own, with its latency; nothing hides it"


class Costs:
    """What the strategies of `space` cost, and moving tensors between them.

    Args:
        surcharge_s: seconds that each collective counts beside what it takes (`search.simplest`).
    """

    def __init__(
        self, space: Space, gradients: Gradients = Gradients.HIDDEN, surcharge_s: float = 0.0
    ) -> None:
        self.space, self.surcharge_s = space, surcharge_s
        self.gradients = gradients
        self.pricer = Pricer(space.mesh, space.problem.cluster, space.model.roles)
        self._moved: dict[tuple[object, ...], tuple[float, float]] = {}

    def network(self) -> Network:
        """What the strategies cost, and moving tensors between them."""
        nodes = []
        for number, ops in enumerate(self.space.nodes):
            self.space.deadline.check()
            costs = [
                self._strategy_cost(ops, strategy) for strategy in self.space.strategies[number]
            ]
            seconds, late = (np.array([c[i] for c in costs]) for i in range(2))
            nodes.append(Node(ops[0].name, seconds, late))
        return Network(nodes, self._all_moves())

    def _strategy_cost(self, ops: Sequence[Op], strategy: AxisStrategy) -> tuple[float, float]:
        """(seconds, late seconds) of all `ops` of a node."""
        terms = self.pricer.zero()
        seconds = 0.0
        for op in ops:
            if op in self.space.variables:
                seconds += self._update_seconds(op, strategy)
                continue
            if op in self.space.fed:
                # No op waits for it. But of plans that are equal, that is better which feeds a rank
                # only its part.
                (spec,) = self.space.specs(op, strategy, "kept")
                read = self.pricer.local_bytes(op.outputs[0], spec)
                seconds += read / self.space.problem.cluster.device.memory_bandwidth
                continue
            if not op.inputs and op not in self.space.growth.axis_splits:
                continue
            if op in self.space.left_alone or op not in self.space.growth.axis_splits:
                self._add_left_alone(terms, op, strategy)
            else:
                self.pricer.add_op(
                    terms, op, self.space.prepared.rules[op], self.space.decision(op, strategy)
                )
            made, kept = (
                self.space.specs(op, strategy, "made"),
                self.space.specs(op, strategy, "kept"),
            )
            for tensor, source, target in zip(op.outputs, made, kept, strict=True):
                if source != target:  # along this axis, or one before
                    try:
                        self.pricer.add_reshard(terms, Reshard(tensor, source, target))
                    except SpecError:
                        return np.inf, 0.0
        more, late = self._seconds_and_late(terms)
        return seconds + more, late

    def _add_left_alone(self, terms: Terms, op: Op, strategy: AxisStrategy) -> None:
        """Add what an op costs that is left to propagation: about as much as under data parallelism
        or on one rank, divided among the ranks that share its work along the axes before."""
        decision = self.space.data_parallel[op]
        split = strategy.needs == tuple(spec[0] for spec in decision.strategy.in_specs)
        single = Pricer(
            Mesh(("data",), (self.space.parts,)), self.space.problem.cluster, self.space.model.roles
        )
        part = single.zero()
        single.add_op(part, op, self.space.prepared.rules[op], decision)
        times = 1.0 if split else float(self.space.parts)
        before = self.space.before.get(op, ())
        for along, parts in zip(before, self.space.mesh.shape, strict=False):
            if any(not isinstance(p, Replicate) for p in along.needs):
                times /= parts
        for phase, seconds in enumerate(part.compute):
            terms.compute[phase] += times * seconds

    def _update_seconds(self, op: Op, strategy: AxisStrategy) -> float:
        variable = self.space.variables[op]
        if self.space.problem.state_ratio is None or not variable.trainable:
            return 0.0
        (spec,) = self.space.specs(op, strategy, "kept")
        stored = self.pricer.stored_bytes(variable, spec, self.space.problem.state_ratio)
        ratio, cluster = self.space.problem.state_ratio, self.space.problem.cluster
        return update_seconds(stored.updated, ratio, cluster) + stored.copies_s

    def _seconds_and_late(self, terms: Terms) -> tuple[float, float]:
        """(seconds, late seconds) of terms."""
        seconds = float(terms.compute.sum())
        seconds += float(terms.communication.sum())
        seconds += self.surcharge_s * terms.count
        mesh, cluster = self.space.mesh, self.space.problem.cluster
        late = -cluster.overlap * float(terms.compute[BACKWARD])
        for when in (When.BESIDE, When.AFTER):
            for kind, axes, num_bytes in terms.packed(when):
                if self.gradients is Gradients.ALONE:
                    alone = collective_seconds(kind, axes, num_bytes, mesh, cluster)
                    seconds += self.surcharge_s + alone
                    continue
                taken = num_bytes * seconds_per_byte(kind, axes, mesh, cluster)
                if self.gradients is Gradients.HIDDEN and when is When.BESIDE:
                    late += taken
                else:
                    seconds += taken
        return seconds, late

    def _all_moves(self) -> list[Moves]:
        found: dict[tuple[object, ...], list[np.ndarray]] = {}
        described: dict[tuple[object, ...], Moves] = {}
        outputs = set(self.space.graph.outputs)
        for op in self.space.graph.ops:
            if op not in self.space.place:
                continue
            self.space.deadline.check()
            for tensor in op.outputs:
                readers = self.space.prepared.consumers.get(tensor, ())
                moves = self._moves(op, tensor, readers, tensor in outputs)
                if moves is None:
                    continue
                key = (
                    moves.source,
                    moves.made.tobytes(),
                    moves.seconds.shape,
                    tuple((n, needs.tobytes()) for n, needs in moves.readers),
                )
                found.setdefault(key, []).append(np.stack([moves.seconds, moves.late]))
                described[key] = moves
        return [
            dataclasses.replace(
                described[key], seconds=sum(m[0] for m in tables), late=sum(m[1] for m in tables)
            )
            for key, tables in found.items()
        ]

    def _moves(
        self, op: Op, tensor: Tensor, readers: Collection[Op], is_output: bool
    ) -> Moves | None:
        states: dict[Spec, int] = {}
        source = self.space.place[op]
        made = [
            states.setdefault(self.space.specs(op, strategy, "kept")[tensor.index], len(states))
            for strategy in self.space.strategies[source]
        ]
        needed: dict[Spec, int] = {}
        reading: dict[tuple[int, bytes], tuple[int, np.ndarray]] = {}
        for reader in readers:
            if reader not in self.space.place:
                continue
            node = self.space.place[reader]
            for position, read in enumerate(reader.inputs):
                if read is tensor:
                    needs = np.array(
                        [
                            needed.setdefault(
                                self.space.specs(reader, strategy, "needs")[position], len(needed)
                            )
                            for strategy in self.space.strategies[node]
                        ]
                    )
                    reading.setdefault((node, needs.tobytes()), (node, needs))
        if is_output:
            # An output of the graph is wanted whole: its maker stands for whoever reads it.
            whole = needed.setdefault(replicated(self.space.mesh.num_axes), len(needed))
            reading[source, b"output"] = source, np.full(len(made), whole)
        costs = [[self._move(tensor, p, q) for q in needed] for p in states]
        table = np.array(costs).reshape(len(states), len(needed), 2)
        if not reading or not table.any():
            return None
        return Moves(source, np.array(made), tuple(reading.values()), table[..., 0], table[..., 1])

    def _move(self, tensor: Tensor, source: Spec, target: Spec) -> tuple[float, float]:
        """(seconds, late seconds) of moving `tensor`; infinite where it cannot be."""
        if source == target:
            return 0.0, 0.0
        if tensor.dtype in REFERENCES:
            return np.inf, 0.0
        roles = self.space.model.roles
        key = (
            tuple(tensor.shape or ()),
            tensor.dtype,
            roles.wire_dtypes.get(tensor),
            source,
            target,
            roles.phase[tensor.op],
            tensor in roles.deferrable,
            roles.times.get(tensor.op, 1),
        )
        if key not in self._moved:
            terms = self.pricer.zero()
            try:
                self.pricer.add_reshard(terms, Reshard(tensor, source, target))
                self._moved[key] = self._seconds_and_late(terms)
            except SpecError:
                self._moved[key] = np.inf, 0.0
        return self._moved[key]


def with_split(space: Space, network: Network, names: Collection[str]) -> Network:
    """`network` in which the variables of these names have to be split (§4.4); those that cannot be
    stay as they are."""
    nodes = list(network.nodes)
    for number, ops in enumerate(space.nodes):
        if any(op in space.variables and space.variables[op].name in names for op in ops):
            whole = [
                isinstance(strategy.kept[0], Replicate) for strategy in space.strategies[number]
            ]
            if not all(whole):
                seconds = np.where(whole, np.inf, nodes[number].seconds)
                nodes[number] = dataclasses.replace(nodes[number], seconds=seconds)
    return Network(nodes, network.moves)
