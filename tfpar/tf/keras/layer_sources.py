"""Layers of a Keras model, each with its source line in the user's program: `model.py:42`."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import weakref
from types import FrameType

import keras

from tfpar.ir.step import ModelLayer
from tfpar.scopes import enclosing

_LIBRARIES = tuple(
    {
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep,
        *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
    }
)

_sources: weakref.WeakKeyDictionary[keras.Layer, str] = weakref.WeakKeyDictionary()


def install_sources() -> None:
    """Note where layers are made within an `auto_parallel` block; once."""
    original = keras.Layer.__new__

    @functools.wraps(original)
    def new(cls, *args, **kwargs):
        layer = original(cls, *args, **kwargs)
        if enclosing() is not None:
            _sources[layer] = _source(sys._getframe(1))
        return layer

    keras.Layer.__new__ = staticmethod(new)


def layers_of(model: keras.Model) -> tuple[ModelLayer, ...]:
    """The model and its layers, as far as they are built."""
    return tuple(
        ModelLayer(layer.path, type(layer).__name__, _sources.get(layer, ""))
        for layer in model._flatten_layers()
        if layer.path is not None
    )


def _source(frame: FrameType | None) -> str:
    """The innermost line that is neither a library's nor ours; empty if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, "<frozen")):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
