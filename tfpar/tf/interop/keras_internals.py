"""Keras's own classes and modules, as far as tfpar reads, wraps or replaces them.

Used with Keras 3.8 to 3.15.
"""

from __future__ import annotations

from typing import Any

from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow import distribution_lib as backend_distribution
from keras.src.backend.tensorflow.core import Variable as TensorFlowVariable
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.distribution.distribution_lib import Distribution
from keras.src.legacy.saving import legacy_h5_format
from keras.src.models import cloning
from keras.src.saving import saving_lib
from keras.src.trainers.trainer import Trainer
from keras.src.utils.io_utils import print_msg

__all__ = [
    "Distribution",
    "TensorFlowTrainer",
    "TensorFlowVariable",
    "Trainer",
    "backend_distribution",
    "cloning",
    "in_stateless_scope",
    "legacy_h5_format",
    "print_msg",
    "random_generator",
    "saving_lib",
]


def random_generator() -> Any | None:
    """The seed generator of `keras.random`, which is made at its first use; None before."""
    return global_state.get_global_attribute("global_seed_generator")
