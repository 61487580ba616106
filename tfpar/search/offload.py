"""What of a step lies in host memory between its uses (see `ir.passes.offload_slots`)."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.constraints.patterns import compile_pattern, some
from tfpar.ir.graph import Gradient, Graph
from tfpar.ir.passes.offload_slots import offload_slots
from tfpar.plans.offload import Offload, Offloaded
from tfpar.propagation.prepared import prepare
from tfpar.spec import SpecError


def chosen(
    asked: Offload,
    graph: Graph,
    gradients: Sequence[Gradient] = (),
    state_ratio: float | None = None,
) -> Offloaded:
    """The names of what a user asks to have offloaded.

    Args:
        state_ratio: bytes of slots per byte of weight; None where the graph holds the slots.

    Raises:
        SpecError: a pattern that matches nothing.
    """
    return Offloaded(_chosen_weights(asked.optimizer, with_slots(graph, state_ratio)))


def with_slots(graph: Graph, state_ratio: float | None) -> list[str]:
    """The names of weights that have optimizer slots; arguments as of `chosen`."""
    if state_ratio is None:
        having = {*slots_of(graph).values()}
        return [v.name for v in graph.variables if v.name in having]
    return [v.name for v in graph.variables if v.trainable and state_ratio]


def _chosen_weights(asked: bool | Sequence[str], weights: Sequence[str]) -> tuple[str, ...]:
    if isinstance(asked, bool):
        return tuple(weights) if asked else ()
    found: dict[str, None] = {}
    for pattern in asked:
        names = [*filter(compile_pattern(pattern).fullmatch, weights)]
        if not names:
            there = f"There are {some(weights)}" if weights else "No weight has any"
            raise SpecError(
                f"offload=tap.Offload(optimizer={pattern!r}) matches no weight that has optimizer "
                f"slots. {there}."
            )
        found.update(dict.fromkeys(names))
    return tuple(found)


def slots_of(graph: Graph) -> dict[str, str]:
    """The optimizer slots of a graph that holds the optimizer: the weight of each, by name."""
    return {slot.name: weight.name for slot, (weight, _) in prepare(graph).followed.items()}


def offloaded(graph: Graph, names: Offloaded, gradients: Sequence[Gradient] = ()) -> Graph:
    """A copy of `graph` of which what is named lies in host memory.

    Raises:
        PlanError: an op needs a slot on the device.
    """
    slots = {s: w for s, w in slots_of(graph).items() if w in names.slots}
    return offload_slots(graph, names.slots, slots, gradients)
