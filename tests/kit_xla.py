"""The acceptance kit with models that XLA compiles.

The plain runs are not compiled. So a case fails here whose numbers XLA changes on one device too:
after three steps, `app_resnet50` has other weights in plain Keras with `jit_compile=True` than
without it, and on a mesh it is off by as much, to ten digits. The kit cannot see on which devices
compiled functions run.

PYTHONPATH=. python ../shared/acceptance/run.py --api tests.kit_xla --any-device ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras

import tfpar

_compile = keras.Model.compile


def _compile_by_xla(model: keras.Model, *arguments: Any, **keywords: Any) -> None:
    _compile(model, *arguments, **{**keywords, "jit_compile": True})


@contextlib.contextmanager
def auto_parallel(*arguments: Any, **keywords: Any) -> Iterator[Any]:
    """`tfpar.auto_parallel`, in which models compile with `jit_compile=True`."""
    with (
        mock.patch.object(keras.Model, "compile", _compile_by_xla),
        tfpar.auto_parallel(*arguments, **keywords) as session,
    ):
        yield session


def __getattr__(name: str) -> Any:
    return getattr(tfpar, name)
