"""Seed that all ranks share: they draw the same numbers, and so shuffle and initialise equally."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.tf.distributed.world import World
from tfpar.tf.interop.keras_internals import random_generator
from tfpar.tf.interop.runtime import global_seed


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
