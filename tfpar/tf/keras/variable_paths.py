"""Paths of a Keras model's variables by the layers that hold them, independent of their names."""

from __future__ import annotations

from collections.abc import Iterator

import keras


def variable_paths(model: keras.Model) -> dict[int, str]:
    """Map `id` of each weight and seed to its path in the model, `net/encoder/a/kernel`.

    What several layers share is where the first of them has it.
    """
    found: dict[int, str] = {}
    seen: set[int] = set()

    def visit(layer: keras.Layer, place: str) -> None:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        for variable in _own(layer):
            found.setdefault(id(variable), f"{place}/{variable.name}")
        for inner in layer._layers:
            visit(inner, f"{place}/{inner.name}")

    visit(model, model.name)
    return found


def _own(layer: keras.Layer) -> Iterator[keras.Variable]:
    """The variables of a layer that no layer in it holds."""
    yield from layer._trainable_variables
    yield from layer._non_trainable_variables
    for generator in layer._seed_generators:
        yield generator.state
