"""Step time of a pipeline in closed form: equation 4 of auto3d, an estimate without simulation."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Seconds = TypeVar("Seconds", float, NDArray[np.float64])
"""Of one step, or of several, an entry each."""


def pipeline_seconds(
    microbatches: int,
    slowest_s: Seconds,
    computed_s: Seconds,
    sent_s: float = 0.0,
    virtual: int = 1,
) -> Seconds:
    """Estimate the seconds of a step by auto3d, §4.3, equation 4.

    With t_i seconds of a microbatch in stage i and c_i on the way to the next, K stages take for M
    microbatches

        T = (M - 1) max_i t_i + sum_i t_i + sum_i c_i

    where a transfer hides behind what its ends compute. With v virtual stages an actor takes T_a,
    the sum of those of its t_i, and fills and drains the pipeline with one of them:

        T = (M - 1 / v) max_a T_a + sum_i t_i / v + what is sent while it is filled and drained

    which is (M v + K / v - 1) t for equal stages (Narayanan et al. 2021, §2.2).

    Args:
        slowest_s: of a microbatch on the slowest actor; on a link, if that takes longer and is to
            be passed by one microbatch at a time as a stage is.
        computed_s: of a microbatch in all stages.
        sent_s: of a microbatch between stages, as far as no stage computes meanwhile.
        virtual: stages of an actor.
    """
    return (microbatches - 1 / virtual) * slowest_s + computed_s / virtual + sent_s
