"""`ModelLayer`: what is known of a layer of the model whose step was captured."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelLayer:
    """A layer, or the model itself.

    Attributes:
        path: its name in those of the layers around it, as Keras gives it: `block_0/attention`.
        class_name: `Dense`.
        source: the line of the user's program that makes it, `model.py:42`; empty where that is
            not known.
    """

    path: str
    class_name: str
    source: str = ""
