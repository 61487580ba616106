"""One seed for all: ranks draw the same numbers, so that they shuffle and initialise alike."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager import context

from tfpar.distributed.world import World

_GENERATOR = "global_seed_generator"  # of keras.random, made at its first use


def share_seeds(world: World) -> None:
    """Every rank goes on from where the first one's global random generators are.

    Those of Python, NumPy, TensorFlow and Keras. TensorFlow gets a global seed if it has none.
    """
    told = world.first("sharing the random state", _states)
    if world.rank:
        version, numbers, gauss = told["python"]
        random.setstate((version, tuple(numbers), gauss))
        name, keys, *rest = told["numpy"]
        np.random.set_state((name, np.array(keys, np.uint32), *rest))
        generator = global_state.get_global_attribute(_GENERATOR)
        if generator is not None and told["keras"] is not None:
            generator.state.assign(told["keras"])
    if context.global_seed() != told["tensorflow"]:
        tf.random.set_seed(told["tensorflow"])


def _states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    seed = context.global_seed()
    generator = global_state.get_global_attribute(_GENERATOR)
    tensorflow = random.randrange(2**31) if seed is None else seed
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "tensorflow": tensorflow,
        "keras": None if generator is None else generator.state.numpy().tolist(),
    }
