"""Consistency of ranks: the same model, options and pipeline, which is checked, and one seed.

Ranks compare before the first of them plans for all: a plan for the one model may not even be
possible for the other.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfpar.pipeline import AUTO, Schedule
from tfpar.pipeline.generators import name_of
from tfpar.pipeline.recompute import RecomputeOf
from tfpar.pipeline.statistics import BatchStatisticsOf
from tfpar.tf.distributed.world import World
from tfpar.tf.interop.keras_internals import random_generator
from tfpar.tf.interop.runtime import global_seed


def agree_on_model(
    world: World,
    step: str,
    weights: Mapping[str, str],
    batch: Sequence[str],
    trained: Sequence[str] = (),
) -> None:
    """Check that every rank has captured a step of the same variables and inputs.

    Args:
        step: what it is called: `train step`.
        weights: dtype and shape of each variable, by its path, in the order of their use.
        batch: dtype and shape of each tensor that the step is fed.
        trained: the paths of the variables that are trained.

    Raises:
        RuntimeMismatchError: on every rank; names two ranks and the layer, or the input, in which
            they differ, with both shapes.
    """
    told = {"weights": [*weights.items()], "batch": [*batch], "trained": [*trained]}
    world.agree(f"the {step}", told, _of_models)


def _of_models(told: list[dict[str, Any]]) -> str:
    rank, other = first_differing(told)
    weights, others = dict(told[0]["weights"]), dict(other["weights"])
    frozen = _of_frozen(told[0]["trained"], other["trained"], {*weights} & {*others}, rank)
    if frozen:
        return (
            f"{frozen}. Set `trainable` alike on every rank before `compile`: what one rank sets, "
            f"the others do not get."
        )
    if weights != others:
        return (
            f"{_of_weights(weights, others, rank)}. Every rank has to build the same model; do the "
            f"processes run the same script with the same arguments?"
        )
    if told[0]["batch"] != other["batch"]:
        return (
            f"it gets {', '.join(told[0]['batch'])} on rank 0 and {', '.join(other['batch'])} on "
            f"rank {rank}. Every rank has to get batches of the same shape: global ones, of which "
            f"it takes its part by itself."
        )
    return (
        f"it uses the same weights in another order on rank {rank} than on rank 0. Every rank has "
        f"to build the same model; do the processes run the same script with the same arguments?"
    )


def _of_frozen(
    trained: Sequence[str], others: Sequence[str], known: Collection[str], rank: int
) -> str:
    """The variable, which both ranks have, that one of them trains; nothing if there is none."""
    for here, names, rest in ((0, trained, others), (rank, others, trained)):
        found = [name for name in names if name not in rest and name in known]
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            there = rank if here == 0 else 0
            return f"{found[0]!r}{more} is trained on rank {here} and not on rank {there}"
    return ""


def _of_weights(weights: Mapping[str, str], others: Mapping[str, str], rank: int) -> str:
    """The weights that differ of the first layer of which any does."""
    differing = [path for path in {**weights, **others} if weights.get(path) != others.get(path)]
    layer = differing[0].rpartition("/")[0]
    shown = [path for path in differing if path.rpartition("/")[0] == layer]
    found = [
        f"{path.rpartition('/')[2]} is {weights.get(path, 'missing')} on rank 0 and "
        f"{others.get(path, 'missing')} on rank {rank}"
        for path in shown
    ]
    more = len(differing) - len(shown)
    rest = f" (and {more} more elsewhere)" if more else ""
    return f"in {layer!r}, {'; '.join(found)}{rest}"


# --- differences ----------------------------------------------------------------------------

T = TypeVar("T")


def first_differing(told: Sequence[T]) -> tuple[int, T]:
    """The first rank that says something else than rank 0, and what it says."""
    return next((rank, said) for rank, said in enumerate(told) if said != told[0])


def differing_fields(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> list[str]:
    """The fields in which `rank` differs from rank 0, with both values; both have all fields."""
    return [
        f"{name}={value} on rank 0 and {other[name]} on rank {rank}"
        for name, value in first.items()
        if value != other[name]
    ]


# --- options --------------------------------------------------------------------------------
# The first rank plans for all, and each compiles what it was given: without this, an option that
# one rank alone was given shows as a program that differs, or not at all.


def agree_on_options(world: World, asked: Mapping[str, str]) -> None:
    """Check that every rank was given these options, by name and as text.

    Raises:
        RuntimeMismatchError: on every rank; names two ranks, the options in which they differ, and
            what each was given.
    """
    world.agree("their options", dict(asked), _of_options)


def _of_options(told: list[dict[str, str]]) -> str:
    rank, other = first_differing(told)
    return (
        f"{', '.join(differing_fields(told[0], other, rank))}. Give every rank the same arguments "
        f"of auto_parallel; do the processes run the same script with the same arguments?"
    )


# --- pipelines ------------------------------------------------------------------------------
# The first rank plans for all. Without this a rank that was started with another schedule would
# build the plan of the first with microbatches of its own.

_TASKS = "tasks"


def agree_on_pipeline(
    world: World,
    schedule: Schedule,
    recompute: RecomputeOf,
    batch_statistics: BatchStatisticsOf = "exact",
    *,
    decided: bool = True,
    picked: bool = False,
) -> None:
    """Check that every rank asks for this pipeline, which may be one of one stage.

    Args:
        recompute, batch_statistics: see `pipeline.Pipeline`.
        decided: False with `pipeline="auto"`: the first rank's plan says what it is.
        picked: another schedule of these tasks may be picked when the step is planned.

    Raises:
        RuntimeMismatchError: on every rank; names two ranks and what they differ in.
    """
    asked = {
        "stages": schedule.num_stages,
        "sets of ranks": schedule.num_actors,
        "microbatches": schedule.num_microbatches,
        "schedule": AUTO if picked else name_of(schedule),
        "recompute": recompute,
        "batch_statistics": batch_statistics,
        "pipeline": "given" if decided else "auto",
        _TASKS: [[str(task) for task in order] for order in schedule.orders],
    }
    world.agree("their pipelines", asked, _of_pipelines)


def _of_pipelines(told: list[dict[str, Any]]) -> str:
    """Describe how the pipeline of the first rank that differs from rank 0 differs."""
    first, (rank, other) = told[0], first_differing(told)
    one, two = ({k: repr(v) for k, v in said.items() if k != _TASKS} for said in (first, other))
    differing = differing_fields(one, two, rank)
    if not differing:
        pairs = zip(first[_TASKS], other[_TASKS], strict=True)
        actor, lines = next((a, pair) for a, pair in enumerate(pairs) if pair[0] != pair[1])
        tasks = itertools.zip_longest(*lines, fillvalue="nothing")
        here, there = next(pair for pair in tasks if pair[0] != pair[1])
        differing = [f"set of ranks {actor} runs {here} on rank 0 where rank {rank} has {there}"]
    return (
        f"{', '.join(differing)}. Give every rank the same pipeline= or plan=; do the processes "
        f"run the same script with the same arguments?"
    )


# --- seeds ----------------------------------------------------------------------------------
# Ranks draw the same numbers, and so shuffle and initialise equally.


def share_seeds(world: World) -> None:
    """Set the global random generators of every rank to the state of the first rank's.

    Those of Python, NumPy, TensorFlow and Keras. TensorFlow gets a global seed if it has none.
    """
    told = world.first("sharing the random state", _states)
    if world.rank:
        version, numbers, gauss = told["python"]
        random.setstate((version, tuple(numbers), gauss))
        name, keys, *rest = told["numpy"]
        np.random.set_state((name, np.array(keys, np.uint32), *rest))
        generator = random_generator()
        if generator is not None and told["keras"] is not None:
            generator.state.assign(told["keras"])
    if global_seed() != told["tensorflow"]:
        tf.random.set_seed(told["tensorflow"])


def _states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    seed = global_seed()
    generator = random_generator()
    tensorflow = random.randrange(2**31) if seed is None else seed
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "tensorflow": tensorflow,
        "keras": None if generator is None else generator.state.numpy().tolist(),
    }
