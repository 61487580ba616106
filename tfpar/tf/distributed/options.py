"""Check that all ranks were given the same options.

The first rank plans for all, and each compiles what it was given: without this, an option that one
rank alone was given shows as a program that differs, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfpar.tf.distributed.differences import differing_fields, first_differing
from tfpar.tf.distributed.world import World


def agree_on_options(world: World, asked: Mapping[str, str]) -> None:
    """Check that every rank was given these options, by name and as text.

    Raises:
        RuntimeMismatchError: on every rank; names two ranks, the options in which they differ, and
            what each was given.
    """
    world.agree("their options", dict(asked), _difference)


def _difference(told: list[dict[str, str]]) -> str:
    rank, other = first_differing(told)
    return (
        f"{', '.join(differing_fields(told[0], other, rank))}. Give every rank the same arguments "
        f"of auto_parallel; do the processes run the same script with the same arguments?"
    )
