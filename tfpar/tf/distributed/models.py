"""Check that all ranks built the same model, and got batches of the same shape.

Ranks compare before the first of them plans for all: a plan for the one model may not even be
possible for the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tfpar.tf.distributed.differences import first_differing
from tfpar.tf.distributed.world import World


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
    world.agree(f"the {step}", told, _difference)


def _difference(told: list[dict[str, Any]]) -> str:
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
