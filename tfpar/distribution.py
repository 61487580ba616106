"""`keras.distribution` on TensorFlow: a distribution in force is a request to tfpar.

    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts))
    model = build_model()       # as inside of tap.auto_parallel(mesh, constraints, planner=None)

Keras asks its backend to lay tensors out, and on TensorFlow nothing answers. `install` answers:

    a model, and its variables, that are made    the session of the distribution in force
    distribute_tensor in a model                 a constraint on that tensor (`LAYOUT`)
    list_devices                                 a device for each rank of a job; else Keras's own

Every rank of a job is given the whole of each batch. So Keras is told that one process feeds data,
and its distributions leave datasets as they are.
"""

from __future__ import annotations

import functools
import json
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tfpar import scopes
from tfpar.constraints import Constraint
from tfpar.constraints.keras_distribution import read_device_mesh, read_distribution
from tfpar.constraints.tensor_layouts import LAYOUT
from tfpar.options import Keywords, Options, settings_of, takes
from tfpar.plans import Plan
from tfpar.settings import ConstraintsLike, MeshLike, Settings
from tfpar.spec import ArgumentError, Mesh, Replicate, Shard, Spec
from tfpar.tf.distributed.world import joined_world, this_world
from tfpar.tf.interop.keras_internals import (
    Distribution,
    TensorFlowVariable,
    backend_distribution,
)
from tfpar.tf.keras import adapter
from tfpar.tf.session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack

_sessions: weakref.WeakKeyDictionary[Distribution, Session] = weakref.WeakKeyDictionary()


class AutoParallel(Distribution):
    """A `keras.distribution.Distribution` whose layouts tfpar finds.

        keras.distribution.set_distribution(tap.AutoParallel())
        model = build_model()

    Models that are made while it is in force are as those made inside of `tap.auto_parallel` with
    the same arguments.

    Args:
        mesh, constraints, options, keywords: as of `auto_parallel`.

    Raises:
        As `auto_parallel`.
    """

    @takes(Keywords)
    def __init__(
        self,
        mesh: MeshLike | None = None,
        constraints: ConstraintsLike = (),
        *,
        options: Options | None = None,
        **keywords: Unpack[Keywords],
    ) -> None:
        self.settings = settings_of(mesh, constraints, options, keywords)
        super().__init__(None)

    @property
    def plan(self) -> Plan | None:
        """The plan that its models run by; None until it is searched."""
        session = _sessions.get(self)
        return None if session is None else session.base

    @property
    def device_mesh(self) -> keras.distribution.DeviceMesh | None:
        """The mesh of the plan; until there is one, what was asked for; None: all ranks."""
        mesh = self.settings.mesh if self.plan is None else self.plan.mesh
        if mesh is None:
            return None
        kind = "gpu" if tf.config.list_physical_devices("GPU") else "cpu"
        devices = [f"{kind}:{rank}" for rank in range(mesh.size)]
        return keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names, devices)

    @property
    def num_model_replicas(self) -> int:
        """Number of parts of a batch; 1 until there is a plan."""
        plan = self.plan
        if plan is None:
            return 1
        return plan.mesh.group_size(tuple(plan.mesh.axis(name) for name in plan.batch_axes))

    def get_data_layout(self, data_shape: Sequence[int]) -> keras.distribution.TensorLayout:
        """Return how a batch is laid out: whole until there is a plan, and where the plan splits it
        over several axes, which Keras has no layout for."""
        axes = () if self.plan is None else self.plan.batch_axes
        first = axes[0] if len(axes) == 1 else None
        return self._layout([first, *[None] * len(data_shape)][: len(data_shape)])

    def get_variable_layout(self, variable: keras.Variable) -> keras.distribution.TensorLayout:
        """Return how the plan lays a variable out; whole until there is one."""
        if self.plan is not None:
            layout = self.plan.to_layout_map(self.device_mesh)[variable.path]
            if layout is not None:
                return layout
        return self._layout([None] * len(variable.shape))

    def get_tensor_layout(self, path: str) -> None:
        """Return None: activations are laid out by the plan."""

    def _layout(self, axes: Sequence[str | None]) -> keras.distribution.TensorLayout:
        return keras.distribution.TensorLayout(axes, self.device_mesh)


def settings_in_force(
    mesh: MeshLike | None,
    constraints: ConstraintsLike,
    options: Options | None,
    keywords: Keywords,
) -> Settings:
    """Read the arguments of a call beside the distribution in force, if there is one: what they
    leave out is the distribution's, and what they say has to be the same.

    Raises:
        ArgumentError: they ask for something else; or as `settings_of`.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None and mesh is None and not constraints:
        _check_no_other(distribution)
        return settings_of(distribution, (), options, keywords)
    settings = settings_of(mesh, constraints, options, keywords)
    if distribution is not None:
        _check_agreed(distribution, settings.mesh, settings.constraints)
    return settings


def _check_no_other(distribution: Distribution) -> None:
    """Refuse a block beside a distribution that is one of its own."""
    if isinstance(distribution, AutoParallel):
        raise ArgumentError(
            "A tap.AutoParallel is the distribution in force (keras.distribution), and is a "
            "request of its own. Give it the arguments, and leave out auto_parallel."
        )


def _check_agreed(
    distribution: Distribution, mesh: Mesh | None, constraints: Sequence[Constraint]
) -> None:
    """Refuse a mesh and constraints that differ from those of the distribution in force."""
    _check_no_other(distribution)
    asked = read_distribution(distribution)
    if mesh not in (None, asked.mesh) or {*constraints} != {*asked.constraints}:
        raise ArgumentError(
            f"Two requests differ: the distribution in force (keras.distribution) has the mesh "
            f"{asked.mesh} with {_listed(asked.constraints)}, auto_parallel is asked for the mesh "
            f"{mesh} with {_listed(constraints)}. Give the latter no mesh and no constraints, or "
            f"end the distribution: keras.distribution.set_distribution(None)."
        )


def _listed(constraints: Sequence[Constraint]) -> str:
    return ", ".join(map(str, constraints)) or "no constraints"


def session_in_force(around: Session | None) -> Session | None:
    """Return the session of what is built here.

    Args:
        around: that of the block around it; without one it is that of the distribution in force,
            the same for the same one.

    Raises:
        ArgumentError: both are there, and differ.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return around
    if around is not None:
        _check_agreed(distribution, around.mesh, around.options.constraints)
        return around
    session = _sessions.get(distribution)
    if session is None:
        auto = isinstance(distribution, AutoParallel)
        settings = distribution.settings if auto else settings_of(distribution, (), None, {})
        session = _sessions[distribution] = Session.of(settings)
    return session


def install() -> None:
    """Answer for Keras's TensorFlow backend, and be told of models; idempotent.

    Raises:
        TfparError: Keras runs on another backend than TensorFlow.
    """
    adapter.install()
    if scopes.session_in_force is session_in_force:
        return
    scopes.install_threads()
    scopes.session_in_force = session_in_force
    _install_variables()
    backend_distribution.list_devices = _listing(backend_distribution.list_devices)
    answers: dict[str, Callable[..., Any]] = {
        "get_device_count": lambda device_type=None: len(
            backend_distribution.list_devices(device_type)
        ),
        "initialize": initialize,
        "num_processes": lambda: 1,
        "process_id": lambda: 0,
        "distribute_value": distribute_tensor,
        "distribute_tensor": distribute_tensor,
        "relayout": distribute_tensor,
        "_to_backend_mesh": read_device_mesh,
        "_to_backend_layout": _spec_of,
    }
    for name, answer in answers.items():
        setattr(backend_distribution, name, answer)


def _install_variables() -> None:
    """Create Keras's variables in the session of the distribution in force."""
    original = TensorFlowVariable._initialize

    @functools.wraps(original)
    def initialize_variable(self: Any, value: Any) -> None:
        session = None if scopes.active.get() else scopes.enclosing()
        if session is None or isinstance(value, tf.Variable):
            original(self, value)
            return
        with tf.variable_creator_scope(session.create_variable):
            original(self, value)

    TensorFlowVariable._initialize = initialize_variable


def _listing(
    own_devices: Callable[[str | None], list[str]],
) -> Callable[[str | None], list[str]]:
    """Make `list_devices`: the ranks of the job; without one, what Keras lists."""

    @functools.wraps(own_devices)
    def list_devices(device_type: str | None = None) -> list[str]:
        world = this_world()
        if world is None:
            return own_devices(device_type)
        kind = "gpu" if "gpu" in world.device.lower() else "cpu"
        if device_type is not None and device_type.lower() != kind:
            return []
        return [f"{kind}:{rank}" for rank in range(world.size)]

    return list_devices


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Join the job, as `keras.distribution.initialize` asks: that of the launcher, or of these
    addresses, over TensorFlow's collectives.

    Args:
        job_addresses: of all processes, `"10.0.0.1:1234,10.0.0.2:2345"`, in the order of their
            ids.

    Raises:
        ArgumentError: addresses that are not one for each process, or no id.
        TfparError: as of joining a job.
    """
    if job_addresses is None:
        this_world()
    else:
        workers = job_addresses.split(",")
        if process_id is None or not 0 <= process_id < len(workers):
            raise ArgumentError(
                f"keras.distribution.initialize: process_id is one of 0..{len(workers) - 1}, the "
                f"place of this process among job_addresses; it is {process_id}."
            )
        if num_processes not in (None, len(workers)):
            raise ArgumentError(
                f"keras.distribution.initialize: job_addresses has {len(workers)} addresses, and "
                f"num_processes is {num_processes}. Give the address of each process, not of the "
                f"first alone."
            )
        if joined_world() is None:
            task = {"type": "worker", "index": process_id}
            os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        world = this_world()
        joined = (0, 1) if world is None else (world.rank, world.size)
        if joined != (process_id, len(workers)):
            raise ArgumentError(
                f"keras.distribution.initialize asks for process {process_id} of {len(workers)}, "
                f"but this process is rank {joined[0]} of {joined[1]}, as its launcher says or an "
                f"earlier call. Leave out job_addresses, or the launcher."
            )


def distribute_tensor(tensor: Any, layout: keras.distribution.TensorLayout) -> Any:
    """Return `tensor`, with a note for planning of how it is to be laid out.

    A value outside of a step is returned as it is.
    """
    if not tf.is_symbolic_tensor(tensor):
        return tensor
    noted = tf.identity(tensor, name="distribute_tensor")
    axes = ",".join(axis or "" for axis in layout.axes)
    noted.op._set_attr(LAYOUT, attr_value_pb2.AttrValue(s=axes.encode()))
    return noted


def _spec_of(layout: keras.distribution.TensorLayout) -> Spec:
    """Return the spec that a Keras layout is.

    Raises:
        ValueError: it has no mesh yet, as Keras's backends have it.
    """
    if layout.device_mesh is None:
        raise ValueError("Cannot create sharding when device mesh is not set for TensorLayout.")
    dims = {axis: dim for dim, axis in enumerate(layout.axes) if axis is not None}
    names = read_device_mesh(layout.device_mesh).axis_names
    return tuple(Shard(dims[name]) if name in dims else Replicate() for name in names)


if keras.backend.backend() == "tensorflow":
    install()
