"""Tie-breaking: the simplest of the plans that predictions cannot tell apart is taken.

Predictions order plans; how far two of them are apart is known only to within
`Objective.uncertainty`. What comes so near to the fastest plan may as well be the faster one, and a
plan with fewer collectives has less in it that no model foresees: ranks that wait for each other.
So the one with the fewest collectives is taken, of these the one that splits fewest weights. Ranks
that share work in a training step have some collective: a plan with none is taken if it is the
fastest, and not for being simple; and one that is slower than that is not taken either.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tfpar.cost.evaluation import evaluate
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.folding.folded_plan import FoldedPlan, count_split
from tfpar.planning.meshes import idle_mesh
from tfpar.planning.problem import Problem
from tfpar.propagation.engine import propagate
from tfpar.spec import TfparError, replicated_spec

F = TypeVar("F", bound=FoldedPlan)


def fastest(found: Sequence[F], problem: Problem) -> F:
    """Return the fastest that fits; where none does, the one that stores least."""
    return min(found, key=lambda f: (problem.excess_in_parts(f.cost), f.cost.seconds, f.num_split))


def pick_simplest(found: Sequence[F], problem: Problem) -> F:
    """Pick the simplest of those that fit and may be the fastest; see the module."""
    best = fastest(found, problem)
    if problem.excess_in_parts(best.cost):
        return best
    limit = (1.0 + problem.aim.objective.uncertainty) * best.cost.seconds
    near = [f for f in found if not problem.excess_in_parts(f.cost) and f.cost.seconds <= limit]
    if best.cost.collectives:  # who asks for ranks wants them used, if one device is not faster
        unshared_s = (f.cost.seconds for f in near if not f.cost.collectives)
        limit = min(unshared_s, default=math.inf)
        near = [f for f in near if f.cost.collectives and f.cost.seconds <= limit]
    return min(near, key=lambda f: (f.cost.collectives, f.num_split, f.cost.seconds))


def collective_penalty(best: FoldedPlan, problem: Problem) -> float:
    """Return the penalty on each collective, in seconds, that finds simpler plans near `best`; 0
    where there is nothing to look for.

    With C collectives and a step of S seconds it is `uncertainty * S / C`. What costs least with it
    is no further behind than S (1 + uncertainty), and has no more collectives.
    """
    if problem.excess_in_parts(best.cost) or not best.cost.collectives:
        return 0.0
    return problem.aim.objective.uncertainty * best.cost.seconds / best.cost.collectives


def baselines(problem: Problem, model: FoldedModel) -> Iterator[FoldedPlan]:
    """Nothing split, and data parallelism; under constraints, what they ask for and no more.

    All variables lie in it as propagation has it. On a mesh whose experts are to be split there is
    none.
    """
    given = {name: fixed.spec for name, fixed in problem.given.variables.items()}
    for logical in (problem.meshes[0], idle_mesh(problem.meshes)):
        if logical is None or logical.expert_axes:
            continue
        whole = replicated_spec(logical.mesh.num_axes)
        variables = model.prepared.graph.variables
        laid = {v.name: whole for v in variables if v.trainable and len(v.shape) > 1}
        laid |= {v.name: given[v.name] for v in variables if v.name in given}
        anchors = model.anchors(problem, logical, laid)
        try:
            partitioned = propagate(model.prepared, logical.mesh, anchors)
        except TfparError:  # constraints may leave some op no way to run so
            continue
        specs = {v.name: spec for v, spec in partitioned.variable_specs.items()}
        yield FoldedPlan(
            logical.mesh,
            logical.batch_names,
            dataclasses.replace(anchors, variables=specs),
            evaluate(partitioned, problem.cluster, model.roles, problem.step.state_ratio),
            count_split(specs, given),
        )
