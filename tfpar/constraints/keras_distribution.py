"""Meshes and constraints that objects of `keras.distribution` ask for.

    ModelParallel(layout_map=..., batch_dim_name="data")    its mesh, batch("data") and the map
    DataParallel(device_mesh)                               its mesh, and batch of its first axis

They are known by their classes where Keras is loaded; it is not loaded for their sake.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

from tfpar.constraints.constraint_types import (
    Constraint,
    batch,
    constraints_of,
    from_layout_map,
)
from tfpar.spec import ArgumentError, Mesh, SpecError


@dataclasses.dataclass(frozen=True)
class LayoutRequest:
    """A mesh and constraints that are asked for together.

    Attributes:
        mesh: None: whatever it is.
        lays_out_all: what the constraints do not name is to be whole, as a `Distribution` has it.
    """

    mesh: Mesh | None = None
    constraints: tuple[Constraint, ...] = ()
    lays_out_all: bool = False


def read_mesh(value: Any) -> LayoutRequest:
    """Read what is given as a mesh: one of tfpar's or of Keras's, a layout map or a distribution.

    Raises:
        TfparError: as `Mesh.of`, `read_distribution` and `read_device_mesh`.
    """
    asked = _read_object(value)
    return asked or LayoutRequest(None if value is None else Mesh.of(value))


def read_constraints(value: Any) -> LayoutRequest:
    """Read what is given as constraints: those of tfpar, a layout map or a distribution.

    The mesh of a layout map counts where none is given: it cannot be made without one.

    Raises:
        TfparError: as `constraints_of`, `read_distribution` and `read_device_mesh`.
    """
    asked = None if _is_of(value, "DeviceMesh") else _read_object(value)
    return asked or LayoutRequest(constraints=constraints_of("constraints", value))


def _read_object(value: Any) -> LayoutRequest | None:
    """Read an object of `keras.distribution`; None for anything else."""
    if _is_of(value, "Distribution"):
        return read_distribution(value)
    if _is_of(value, "DeviceMesh"):
        return LayoutRequest(read_device_mesh(value))
    if _is_of(value, "LayoutMap"):
        own = value.device_mesh
        return LayoutRequest(None if own is None else read_device_mesh(own), from_layout_map(value))
    return None


def read_distribution(distribution: Any) -> LayoutRequest:
    """Return what a `keras.distribution.Distribution` asks for.

    Raises:
        ArgumentError: it is of another class than Keras's own two, which say how they lay out
            tensors; names it.
        SpecError: as of `read_device_mesh`.
    """
    if not (_is_of(distribution, "ModelParallel") or _is_of(distribution, "DataParallel")):
        raise ArgumentError(
            f"tfpar reads keras.distribution.DataParallel and ModelParallel, and has "
            f"tap.AutoParallel, which finds a plan; it cannot tell what a "
            f"{type(distribution).__name__} asks for. Use one of these, or a mesh and constraints."
        )
    constraints: tuple[Constraint, ...] = (batch(distribution.batch_dim_name),)
    if _is_of(distribution, "ModelParallel"):
        constraints += from_layout_map(distribution._layout_map)
    return LayoutRequest(read_device_mesh(distribution.device_mesh), constraints, lays_out_all=True)


def read_device_mesh(value: Any) -> Mesh:
    """Return the mesh that a `keras.distribution.DeviceMesh` is.

    Raises:
        SpecError: its devices are not in the order of their numbers, in which ranks are.
    """
    devices = [str(device) for device in value.devices.flatten()]
    numbers = [int(found[0]) for d in devices if (found := re.search(r"\d+$", d))]
    if numbers != sorted(numbers):
        raise SpecError(
            f"The devices of a DeviceMesh have to be in the order of their numbers, in which the "
            f"ranks of a mesh are; these are {devices}. Give them in order, or other axes."
        )
    return Mesh(tuple(value.axis_names), tuple(value.shape))


def _is_of(value: Any, name: str) -> bool:
    """Whether `value` is of a class of `keras.distribution`, or of the base of its distributions,
    which Keras does not export."""
    module = sys.modules.get("keras.distribution")
    if name == "Distribution":
        kind = getattr(getattr(module, "DataParallel", None), "__base__", None)
    else:
        kind = getattr(module, name, None)
    return kind is not None and isinstance(value, kind)
