"""Of plans that predictions cannot tell apart, the simplest: where all that a search has found is
compared.

Predictions order plans; how far two of them are apart is known only to within
`Problem.uncertainty`. What comes so near to the fastest plan may as well be the faster one, and a
plan with fewer collectives has less in it that no model foresees: ranks that wait for each other.
So the one with the fewest collectives is taken, of these the one that splits fewest weights. Ranks
that share work in a training step have some collective: a plan with none is taken if it is the
fastest, and not for being simple.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from tfpar.cost.evaluate import Cost, evaluate
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import Anchors
from tfpar.search.folded_model import FoldedModel
from tfpar.search.problem import Layout, Problem, input_spec
from tfpar.spec import Mesh, TfparError, replicated


class Candidate(Protocol):
    """A plan as a search finds it."""

    @property
    def cost(self) -> Cost:
        """Of a step."""
        ...

    @property
    def num_split(self) -> int:
        """How many weights are split, those that are given left out."""
        ...


C = TypeVar("C", bound=Candidate)


def fastest(found: Sequence[C], problem: Problem) -> C:
    """The fastest that fits; where none does, the one that stores least."""
    return min(found, key=lambda f: (_excess(f, problem), f.cost.seconds, f.num_split))


def simplest(found: Sequence[C], problem: Problem) -> C:
    """The simplest of those that fit and may be the fastest; see the module."""
    best = fastest(found, problem)
    if _excess(best, problem):
        return best
    limit = (1.0 + problem.uncertainty) * best.cost.seconds
    near = [f for f in found if not _excess(f, problem) and f.cost.seconds <= limit]
    if best.cost.collectives:  # who asks for ranks wants them used, if one device is not faster
        near = [f for f in near if f.cost.collectives]
    return min(near, key=lambda f: (f.cost.collectives, f.num_split, f.cost.seconds))


def surcharge(best: Candidate, problem: Problem) -> float:
    """Seconds by which to count each collective dearer, to find simpler plans near `best`; 0 where
    there is nothing to look for.

    With C collectives and a step of S seconds it is `uncertainty * S / C`. What costs least with it
    is no further behind than S (1 + uncertainty), and has no more collectives.
    """
    if _excess(best, problem) or not best.cost.collectives:
        return 0.0
    return problem.uncertainty * best.cost.seconds / best.cost.collectives


@dataclasses.dataclass(frozen=True, eq=False)
class Baseline:
    """A plan that needs no search.

    Attributes:
        anchors: of the folded graph.
    """

    layout: Layout
    anchors: Anchors
    cost: Cost


def baselines(problem: Problem, model: FoldedModel) -> Iterator[Baseline]:
    """Nothing split, and data parallelism; under constraints, what they ask for and no more."""
    mesh, graph = problem.layouts[0].mesh, model.prepared.graph
    alone = Layout(Mesh(("model", "data"), (mesh.size, 1)), (), ())
    copies = model.folded.copies
    batched = {copies[t.op].outputs[t.index] for t in problem.batched if t.op in copies}
    for layout in (problem.layouts[0], *([alone] if len(problem.layouts) > 1 else [])):
        whole = replicated(layout.mesh.num_axes)
        given = {name: fixed.spec for name, fixed in problem.fixed.items()}
        anchors = Anchors(
            variables={
                **{v.name: whole for v in graph.variables if v.trainable and len(v.shape) > 1},
                **{v.name: given[v.name] for v in graph.variables if v.name in given},
            },
            inputs=[input_spec(t in batched, layout.mesh, layout.batch_axes) for t in graph.inputs],
            tensors={name: fixed.spec for name, fixed in problem.tensors.items()},
            outputs=[whole] * len(graph.outputs),
        )
        try:
            laid = propagate(model.prepared, layout.mesh, anchors)
        except TfparError:  # constraints may leave some op no way to run so
            continue
        lying = {v.name: spec for v, spec in laid.variable_specs.items()}
        cost = evaluate(laid, problem.cluster, model.roles, problem.state_ratio)
        yield Baseline(layout, dataclasses.replace(anchors, variables=lying), cost)


def _excess(found: Candidate, problem: Problem) -> float:
    return max(0.0, found.cost.memory_bytes - problem.cluster.device.memory_bytes)
