"""The writer of SavedModels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tensorflow.python.saved_model import save


def wrap_writer(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap(writer)` in the place of the function that `tf.saved_model.save` ends in.

    The writer takes the object and the folder, and what else `tf.saved_model.save` does.
    """
    original = save.save_and_return_nodes
    save.save_and_return_nodes = functools.wraps(original)(wrap(original))
