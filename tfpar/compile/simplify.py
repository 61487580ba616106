"""Passes that simplify a captured step before it is planned, and those that apply the plan to
it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence

from tfpar.compile.effect_order import check_races, races
from tfpar.compile.passes import Observer, Pass, ignore_pass
from tfpar.ir.constants import Constants
from tfpar.ir.graph import Graph
from tfpar.ir.passes.block_sums import split_block_sums
from tfpar.ir.passes.fold_constants import fold_constants
from tfpar.ir.passes.fuse_attention import fuse_attention
from tfpar.ir.passes.inline_calls import inline_calls, split_bundles
from tfpar.ir.passes.order_effects import order_effects
from tfpar.ir.passes.predicate_branches import predicate_branches
from tfpar.ir.passes.trim import trim
from tfpar.ir.step import StepGraph
from tfpar.ir.text import format_step
from tfpar.planning.memory.gathered_weights import Gathered, gather_graph_weights
from tfpar.planning.memory.offload import offload_graph_activations, offload_graph_slots, slots_of
from tfpar.planning.memory.recompute import recompute_blocks
from tfpar.plans.attention import AttentionMode
from tfpar.plans.offload import OffloadPlan
from tfpar.propagation.prepared_graph import PreparedGraph, prepare


@contextlib.contextmanager
def _in_order(doing: str, step: StepGraph) -> Iterator[None]:
    """Have what is done to a step meanwhile keep the order of its effects."""
    allowed = races(step.graph)
    yield
    check_races(doing, step.graph, allowed)


def _trimmed(graph: Graph) -> Graph:
    return trim(graph).graph


def _folded(graph: Graph) -> Graph:
    fold_constants(graph, Constants(graph))
    return graph


def _block_sums(graph: Graph) -> Graph:
    split_block_sums(graph, Constants(graph))
    return graph


SIMPLIFICATIONS = (
    Pass("order effects", order_effects),
    Pass("inline calls", inline_calls),
    Pass("split bundles", split_bundles),
    Pass("trim", _trimmed),
    Pass("predicate branches", predicate_branches),
    Pass("fold constants", _folded),
    Pass("split block sums", _block_sums),
)
"""Passes that every step goes through before it is planned, in this order.

Effects are in order in a captured step; here it is for one that is written by hand, whose order may
hang on a path through ops that are folded or trimmed.

The last two come before the step is cut for planning: the cut shares its ops, and what `prepare`
would put in the place of some in one of the two graphs would not be in the other.
"""


def simplify_step(step: StepGraph, observe: Observer = ignore_pass) -> None:
    """Run the `SIMPLIFICATIONS` on a captured step, in place."""
    text = functools.partial(format_step, step)
    observe("captured", text)
    with _in_order("Simplifying the step", step):
        for each in SIMPLIFICATIONS:
            step.rewrite(each.run)
            observe(each.name, text)


def prepare_step(step: StepGraph) -> PreparedGraph:
    """Simplify a captured step, and look up the rules of its ops."""
    simplify_step(step)
    return prepare(step.graph)


def recompute_step(step: StepGraph, blocks: Sequence[str], observe: Observer = ignore_pass) -> None:
    """Have a simplified step compute these blocks again in the backward pass, in place.

    Raises:
        PlanError: there is no such block.
    """
    if blocks:
        with _in_order("Recomputing", step):
            step.rewrite(lambda graph: recompute_blocks(graph, blocks, step.gradients))
        observe("recompute", functools.partial(format_step, step))


def fuse_attention_step(
    step: StepGraph, attention: AttentionMode, observe: Observer = ignore_pass
) -> None:
    """Have the attentions of a simplified step run so, in place; see `fuse_attention`."""
    if attention == "blockwise":
        with _in_order("Fusing attention", step):
            step.rewrite(fuse_attention)
        observe("fuse attention", functools.partial(format_step, step))


def gather_step(
    step: StepGraph, weights: Mapping[str, Gathered], observe: Observer = ignore_pass
) -> None:
    """Have a simplified step gather these weights, in place; see `gather_graph_weights`."""
    if any(one.gathered is not None or one.scatters_gradient for one in weights.values()):
        with _in_order("Gathering weights", step):
            step.rewrite(lambda graph: gather_graph_weights(graph, weights, step.gradients))
        observe("gather weights", functools.partial(format_step, step))


def offload_step(step: StepGraph, names: OffloadPlan, observe: Observer = ignore_pass) -> None:
    """Offload the named slots and activations of a simplified step to host memory, in place.

    Raises:
        PlanError: there is no such block, or an op needs a slot on the device.
    """
    blocks, weights = names.activations, names.slots
    with _in_order("Offloading", step):
        if blocks:
            step.rewrite(lambda graph: offload_graph_activations(graph, blocks, step.gradients))
        if weights:
            step.rewrite(
                lambda graph: offload_graph_slots(graph, weights, slots_of(graph), step.gradients)
            )
    if names:
        observe("offload", functools.partial(format_step, step))
