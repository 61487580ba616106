"""The weights of a plan as a `keras.distribution.LayoutMap`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tfpar.observability.report.variables import variable_specs
from tfpar.spec import Mesh, PlanError, Replicate, Shard, Spec
from tfpar.spec.arguments import argument_error

if TYPE_CHECKING:
    import keras

    from tfpar.plans import Plan
    from tfpar.propagation.partitioned_graph import PartitionedGraph

_A_DEVICE_MESH = "a keras.distribution.DeviceMesh with the axes of the plan"


def layout_map(
    plan: Plan, partitioned: PartitionedGraph | None, device_mesh: Any = None
) -> keras.distribution.LayoutMap:
    """Make the Keras layout map that `Plan.to_layout_map` returns.

    Raises:
        ArgumentError: `device_mesh` is none of the plan's mesh.
        PlanError: the plan has stages, or something that a layout cannot say.
    """
    if plan.stages is not None:
        raise PlanError(
            f"The plan has {plan.stages.num_stages} stages, and a layout map says how weights are "
            f"split, not in which stage they lie. Make a plan without a pipeline."
        )
    # Whichever backend Keras has: planning itself needs none.
    from keras.distribution import LayoutMap

    mesh = plan.mesh
    layouts = LayoutMap(_device_mesh(mesh) if device_mesh is None else _checked(device_mesh, mesh))
    for name, spec in variable_specs(plan, partitioned).items():
        if spec is not None:
            axes = _axes(name, plan.variables[name].shape, spec, mesh)
            layouts[f"^{re.escape(name)}$"] = axes
    return layouts


def _device_mesh(mesh: Mesh) -> keras.distribution.DeviceMesh:
    """The devices that Keras sees here, in the order of ranks."""
    from keras.distribution import DeviceMesh, list_devices

    devices = list_devices()
    if len(devices) < mesh.size:
        raise PlanError(
            f"The plan is for {mesh.size} ranks ({mesh}), but Keras sees {len(devices)} devices "
            f"here. Give device_mesh=keras.distribution.DeviceMesh({mesh.shape}, "
            f"{list(mesh.axis_names)}, devices)."
        )
    return DeviceMesh(mesh.shape, list(mesh.axis_names), devices[: mesh.size])


def _checked(device_mesh: Any, mesh: Mesh) -> keras.distribution.DeviceMesh:
    from keras.distribution import DeviceMesh

    if not isinstance(device_mesh, DeviceMesh):
        raise argument_error("device_mesh", device_mesh, _A_DEVICE_MESH)
    given = dict(zip(device_mesh.axis_names, device_mesh.shape, strict=True))
    if given != dict(zip(mesh.axis_names, mesh.shape, strict=True)):
        raise argument_error("device_mesh", device_mesh, f"{_A_DEVICE_MESH}, {mesh}")
    return device_mesh


def _axes(name: str, shape: tuple[int, ...], spec: Spec, mesh: Mesh) -> tuple[str | None, ...]:
    """The mesh axis that splits each dim, or None; an axis of a single rank splits nothing.

    Raises:
        PlanError: Keras's layouts, or JAX, have no such split.
    """
    axes: list[str | None] = [None] * len(shape)
    for axis, size, placement in zip(mesh.axis_names, mesh.shape, spec, strict=True):
        if isinstance(placement, Replicate) or size == 1:
            continue
        assert isinstance(placement, Shard), "variables are split or whole"
        dim, have = placement.dim, axes[placement.dim]
        said = f"Variable {name!r} of shape {shape} cannot be in a layout map: the plan splits"
        if placement.stride is not None:
            raise PlanError(
                f"{said} dim {dim} in strides over {axis!r}, and layouts have contiguous blocks. "
                f"Constrain it with tap.shard without a stride, or with tap.replicate."
            )
        if have is not None:
            raise PlanError(
                f"{said} dim {dim} over {have!r} and {axis!r}, and Keras takes one mesh axis for a "
                f"dim. Plan on a mesh that has these as one axis, or constrain the variable."
            )
        if shape[dim] % size:
            raise PlanError(
                f"{said} dim {dim} over {axis!r}, of {size} ranks, and JAX splits evenly alone. "
                f"Constrain it with tap.replicate, or pad it to a multiple of {size}."
            )
        axes[dim] = axis
    return tuple(axes)
