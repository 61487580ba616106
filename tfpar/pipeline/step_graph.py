"""The stage graph of a training step: what its stages read of each other, tensor by tensor.

A tensor goes straight from the stage that makes it to each other stage that reads it, once,
whatever reads it there. When it does depends on what makes it:

    once a microbatch   what is computed of a microbatch: activations, gradients of these
    once a step         the value of a weight, what is computed of weights alone, of the whole
                        batch, or in the update; the gradient of a weight, which is summed over
                        microbatches where it is made

Constants and what they lead to are computed wherever they are read, inputs are fed to whoever reads
them, and sizes are known beforehand: these are not sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.roles import BACKWARD, FORWARD, UPDATE, Roles
from tfpar.ir.traits import SIZES
from tfpar.pipeline.graph import Carries
from tfpar.pipeline.stage_graph import Join, StageGraph, StageLink, Tie
from tfpar.pipeline.step_stages import constant_ops
from tfpar.pipeline.tasks import Kind
from tfpar.spec import PlanError


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """Run counts of the ops of a step: once, or once for each microbatch.

    Attributes:
        each: that run once for each microbatch; all others run once a step.
        met: (op, position) of inputs that are there only when all microbatches have been
            through, such as a sum or a mean over the batch.
    """

    each: frozenset[Op]
    met: frozenset[tuple[Op, int]] = frozenset()

    @classmethod
    def without_joins(cls, graph: Graph, roles: Roles) -> Runs:
        """Count runs as if no microbatches joined: all that depends on what the step is fed, but
        for the update, runs for each microbatch, and nothing but the update, and what else reads
        gradients of weights, needs all of them."""
        fed: set[Op] = {t.op for t in graph.inputs}
        for op in graph.ops:
            if any(t.op in fed for t in op.inputs) and roles.phase[op] != UPDATE:
                fed.add(op)
        met = {
            (op, position)
            for op in graph.ops
            for position, tensor in enumerate(op.inputs)
            if tensor in roles.deferrable
        }
        return cls(frozenset(fed - {t.op for t in graph.inputs}), frozenset(met))


class Crossing(NamedTuple):
    """A tensor that one stage makes and another reads.

    Attributes:
        tensor: the handle, where it is the value of a variable.
        carries: activations and gradients go once for each microbatch, all else once a step:
            weights and what is known as the step begins, sums of gradients, what joins make,
            scalars that updates need.
    """

    tensor: Tensor
    source: int
    target: int
    carries: Carries


PER_MICROBATCH: tuple[Carries, ...] = ("activations", "gradients")
"""Edges that carry something once for each microbatch."""


def crossings(graph: Graph, roles: Roles, stage: Mapping[Op, int], runs: Runs) -> list[Crossing]:
    """Find the tensors that stages send each other: each tensor once to a stage that reads it.

    Args:
        stage: of every op, as `stages_of_step` gives it.

    Raises:
        PlanError: the backward pass of a stage reads what that of an earlier one makes.
    """
    constant, handles, waits = (
        constant_ops(graph),
        graph.variable_of(),
        waits_of(graph, roles, runs),
    )
    fed, late = set(graph.inputs), _after_the_forward_pass(graph, roles)
    found: dict[tuple[Tensor, int], Crossing] = {}
    for op in graph.ops:
        for position, tensor in enumerate(op.inputs):
            source, target, maker = stage[tensor.op], stage[op], tensor.op
            if source == target or maker in constant or tensor in fed or op.type in SIZES:
                continue
            value = maker.inputs[0] if maker.type == "ReadVariableOp" else tensor
            if (value, target) in found:
                continue
            phase = roles.phase[maker]
            carries: Carries
            if value in handles:
                carries = "weights"
            elif tensor in roles.deferrable and (op, position) in runs.met:
                carries = "sum"
            elif phase == UPDATE:
                carries = "scalars" if maker in late else "weights"
            elif maker not in runs.each or (op, position) in runs.met:
                before = maker not in runs.each and not waits[maker]
                if phase == FORWARD:
                    carries = "weights" if before else "join"
                else:
                    carries = "sum" if tensor.shape else "scalars"
            elif phase == BACKWARD and source < target and tensor.shape == ():
                carries = "scalars"  # of gradients that it scales: a norm, in a step of the user's
            else:
                carries = "activations" if source < target else "gradients"
                if source < target and phase == BACKWARD:
                    raise PlanError(
                        f"The backward pass of stage {target} reads {tensor.name!r}, which stage "
                        f"{source} makes after it. Put {op.name!r} in stage {source} or before."
                    )
            found[value, target] = Crossing(value, source, target, carries)
    return [*found.values()]


def stage_graph_of(
    graph: Graph,
    roles: Roles,
    stage: Mapping[Op, int],
    num_stages: int,
    *,
    runs: Runs | None = None,
    num_bytes: Callable[[Crossing], float] | None = None,
) -> StageGraph:
    """Return the stage graph of a step.

    Args:
        stage: of every op, as `stages_of_step` gives it.
        runs: how often ops run; None: as `Runs.without_joins` says.
        num_bytes: that cross, of one microbatch if the tensor goes once for each. By default the
            bytes of the whole.

    Raises:
        PlanError: see `crossings`.
    """
    runs = runs or Runs.without_joins(graph, roles)
    sizes = {v.handle: float(v.num_bytes) for v in graph.variables}
    size = num_bytes or (lambda crossing: sizes.get(crossing[0], crossing.tensor.num_bytes))
    sent = crossings(graph, roles, stage, runs)
    links = tuple(_links(sent, size))
    joins = tuple(_joins(graph, roles, stage, runs, links))
    return StageGraph(num_stages, links, joins, tuple(_ties(sent, size)))


def is_synchronized(sent: Iterable[Crossing]) -> bool:
    """Whether updates wait for gradients of other stages: for a global norm, or a check that they
    are finite.

    Args:
        sent: what `crossings` found.
    """
    return any(crossing.carries == "scalars" for crossing in sent)


def _links(sent: list[Crossing], num_bytes: Callable[[Crossing], float]) -> Iterator[StageLink]:
    there = _bytes_between(sent, "activations", num_bytes)
    back = _bytes_between(sent, "gradients", num_bytes, reverse=True)
    for source, target in sorted({*there, *back}):
        forward = there.get((source, target), 0.0)
        yield StageLink(source, target, forward, back.get((source, target)))


def _ties(sent: list[Crossing], num_bytes: Callable[[Crossing], float]) -> Iterator[Tie]:
    """Yield the ties of weights that are read in several stages: values sent as the step begins,
    and sums of gradients."""
    values = _bytes_between(sent, "weights", num_bytes)
    sums = _bytes_between(sent, "sum", num_bytes, reverse=True)
    for owner, reader in sorted({*values, *sums}):
        yield Tie(owner, reader, values.get((owner, reader), 0.0), sums.get((owner, reader)))


def _bytes_between(
    sent: list[Crossing],
    carries: Carries,
    num_bytes: Callable[[Crossing], float],
    reverse: bool = False,
) -> dict[tuple[int, int], float]:
    """Return the bytes of what `carries` names by (source, target), or by (target, source)."""
    found: dict[tuple[int, int], float] = {}
    for crossing in sent:
        if crossing.carries == carries:
            ends = crossing.source, crossing.target
            key = ends[::-1] if reverse else ends
            found[key] = found.get(key, 0.0) + num_bytes(crossing)
    return found


def _after_the_forward_pass(graph: Graph, roles: Roles) -> set[Op]:
    """The backward pass and what depends on it."""
    found: set[Op] = set()
    for op in graph.ops:
        if roles.phase[op] == BACKWARD or any(t.op in found for t in op.inputs):
            found.add(op)
    return found


# --- joins ------------------------------------------------------------------------------------

_Place = tuple[Kind, int]
"""The tasks of one kind at one stage."""

_KINDS: dict[int, Kind] = {FORWARD: "F", BACKWARD: "B"}


def _joins(
    graph: Graph,
    roles: Roles,
    stage: Mapping[Op, int],
    runs: Runs,
    links: tuple[StageLink, ...],
) -> Iterator[Join]:
    """Yield the joins: work that reads of all microbatches before it goes on.

    What depends on inputs alone is computed before the first task, and joins nothing. A task in
    whose midst microbatches join runs up to there, and the join runs the rest of it for all of
    them: so it holds up what reads of the task.
    """
    waits = waits_of(graph, roles, runs)
    joins: dict[tuple[int, frozenset[_Place]], set[_Place]] = {}
    for op in graph.ops:
        if op not in runs.each or not waits[op]:
            continue
        place = _KINDS[roles.phase[op]], stage[op]
        needed = frozenset((_KINDS[roles.phase[maker]], stage[maker]) for maker in waits[op])
        _, where = max(needed, key=lambda place: (place[0] == "B", place[1]))
        held = joins.setdefault((where, needed), set())
        held.update(_after(place, links) if place in needed else (place,))
    for (where, after), before in joins.items():
        if before:
            yield Join(where, tuple(sorted(after)), tuple(sorted(before)))


def waits_of(graph: Graph, roles: Roles, runs: Runs) -> dict[Op, frozenset[Op]]:
    """Find for each op the ops whose results it needs of all microbatches; for one that runs for
    each, without what those before it need.

    What depends on inputs alone, and on no variable, is not among these.
    """
    handles = graph.variable_of()
    trained: set[Op] = set()
    found: dict[Op, frozenset[Op]] = {}
    for op in graph.ops:
        if any(t in handles or t.op in trained for t in op.inputs):
            trained.add(op)
        needed: set[Op] = set()
        for position, tensor in enumerate(op.inputs):
            maker = tensor.op
            if maker not in runs.each:
                needed |= found.get(maker, frozenset())
            elif (op, position) in runs.met and maker in trained:
                if tensor not in roles.deferrable:
                    needed.add(maker)
        found[op] = frozenset(needed)
    return found


def _after(place: _Place, links: tuple[StageLink, ...]) -> Iterator[_Place]:
    """Yield the tasks of the same microbatch that need those of `place`."""
    kind, stage = place
    if kind == "F":
        yield ("B", stage)
        yield from (("F", link.target) for link in links if link.source == stage)
    else:
        gives = (li for li in links if li.target == stage and li.backward_bytes is not None)
        yield from (("B", link.source) for link in gives)


# --- halves of the backward pass ------------------------------------------------------------
# `I`, which other stages wait for, and `W`, the rest.


def find_weight_half(
    graph: Graph, roles: Roles, stage: Mapping[Op, int], runs: Runs
) -> frozenset[Op]:
    """Find the ops of the backward pass that lead to gradients of weights alone, in their own
    stage.

    All others lead to what another stage reads of each microbatch, or to what joins. The first
    stage sends no gradients: all of its backward pass is in this half.

    Args:
        stage: of every op.
    """
    consumers = graph.consumers()
    waited: set[Op] = set()

    def waits(reader: Op, tensor: Tensor) -> bool:
        return roles.phase[reader] == BACKWARD and (
            reader in waited
            or reader not in runs.each
            or stage[reader] != stage[tensor.op]
            or any((reader, at) in runs.met for at, t in enumerate(reader.inputs) if t is tensor)
        )

    for op in reversed(graph.ops):
        if roles.phase[op] == BACKWARD:
            given = (t for t in op.outputs if t not in roles.deferrable)
            if any(waits(reader, t) for t in given for reader in consumers.get(t, ())):
                waited.add(op)
    return frozenset(op for op in runs.each if roles.phase[op] == BACKWARD and op not in waited)
