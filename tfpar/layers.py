"""Layers with the specs of their weights: two-dimensional tensor parallelism by hand.

ATP's Fig. 9 in Keras, on a mesh of two axes:

    with tap.auto_parallel({"d1": 2, "d2": 2}, planner=None):
        model = keras.Sequential([
            keras.Input((256,)),
            tap.layers.Dense(1024, "gelu", spec=[tap.Shard(1), tap.Shard(0)]),  # column-first
            tap.layers.Dense(256, spec=[tap.Shard(0), tap.Shard(1)]),           # row-first
        ])

Everything else follows from these kernels, as it does from `tap.shard`. A layer of one's own does
the same with `lay` in its `build`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from tfpar.constraints.layer_specs import check_fits, mark, read_spec
from tfpar.scopes import enclosing
from tfpar.spec import Placement
from tfpar.spec.arguments import argument_error


def lay(weight: keras.Variable, spec: Iterable[Placement | str]) -> keras.Variable:
    """Give `weight` the spec that it has on whatever mesh its model runs; returns the weight.

    Args:
        spec: `Shard(dim)` or `Replicate()` for each mesh axis; one that is shorter than the mesh
            is that of the mesh's last axes. It goes before constraints whose pattern matches the
            weight.

    Raises:
        TfparError: something else, a dim that the weight lacks, or more placements than the mesh
            of the enclosing `auto_parallel` has axes.
    """
    if not isinstance(weight, keras.Variable):
        raise argument_error("weight", weight, "a keras.Variable, such as a layer's kernel")
    what = f"Weight {weight.path!r}"
    placements = read_spec(spec, len(weight.shape), what)
    session = enclosing()
    if session is not None:
        check_fits(placements, session.mesh, what)
    mark(weight.value, placements)
    return weight


@keras.saving.register_keras_serializable("tfpar")
class Dense(keras.layers.Dense):
    """`keras.layers.Dense` with the spec of its kernel, `[inputs, units]`.

    `[Shard(1), Shard(0)]` is ATP's column-first tensor parallelism, `[Shard(0), Shard(1)]` its
    row-first one (§3.2). The bias has the spec that the outputs need. Where nothing is parallel it
    is a plain `Dense`.

    Args:
        spec: see `lay`.
        **arguments: as for `keras.layers.Dense`.

    Raises:
        TfparError: see `lay`; the message names the layer.
    """

    def __init__(
        self,
        units: int,
        activation: Any = None,
        *,
        spec: Iterable[Placement | str],
        **arguments: Any,
    ) -> None:
        super().__init__(units, activation, **arguments)
        self.spec = read_spec(spec, 2, f"Layer {self.name!r}")

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        lay(self._kernel, self.spec)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "spec": [str(p) for p in self.spec]}
