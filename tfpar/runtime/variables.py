"""Variables that are whole from outside and sharded inside.

A `ParallelVariable` goes through up to three states: *pending* (a shape and an
initializer, no memory), *whole* (an ordinary variable on one device) and *sharded*
(shards with the ranks, the whole value nowhere). Reading gives the whole value and
assigning takes it in every state; a captured step sees only the handle. Where the ranks are
processes, each stores its own shard, and all of them read together.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import func_graph as func_graph_lib
from tensorflow.python.framework import ops
from tensorflow.python.ops import resource_variable_ops

from tfpar.initial.shard import Stored, shard_values
from tfpar.runtime.ranks import Ranks
from tfpar.spec import Mesh, Replicate, Shard, Spec, local_indices, local_shape

if TYPE_CHECKING:
    from tfpar.distributed.world import World

_capturing: contextvars.ContextVar[bool] = contextvars.ContextVar("capturing", default=False)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """While a step is captured, variables are read and written through their handles."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


class ParallelVariable(resource_variable_ops.UninitializedVariable):
    """A `tf.Variable` whose value may be pending, whole or sharded.

    Attributes:
        on_outside_read: told (reader, name) of what trains or computes with the weight on one
            device: a function or a gradient tape that is not part of a captured step.

    Args:
        initial_value: callable that makes the initial value, or None when the value
            is assigned before it is read.
        shape, dtype, trainable, name: as for `tf.Variable`.
    """

    def __init__(
        self, *, shape, dtype, trainable=True, name=None,
        initial_value: Callable[[], Any] | None = None, **kwargs,
    ) -> None:  # fmt: skip
        with tf.init_scope():
            if tf.executing_eagerly():
                # TensorFlow makes a kernel for each name of a handle, half a millisecond each:
                # all handles are made under one name, and variables named by themselves.
                with ops.name_scope(name, "Variable", skip_on_eager=False) as scope:
                    own_name = ops.name_from_scope_name(scope)
                with ops.name_scope("", skip_on_eager=False):
                    super().__init__(shape=shape, dtype=dtype, trainable=trainable, **kwargs)
                self._handle_name = self.handle._name = f"{own_name}:0"
            else:
                super().__init__(shape=shape, dtype=dtype, trainable=trainable, name=name, **kwargs)
        self._pending = initial_value
        self._stored: dict[int, tf.Variable] | None = None
        self._layout: tuple[Mesh, Spec] | None = None
        self._aside: dict[int, tf.Variable] = {}  # the shards, while `whole`
        self._holders: tuple[int, ...] = ()
        self._ranks: Ranks | None = None
        self._key = 0

    on_outside_read: Callable[[str, str], None] | None = None

    @classmethod
    def adopt(cls, variable: tf.Variable) -> ParallelVariable:
        """Make a plain resource variable a `ParallelVariable` where it stands.

        Whoever holds it (a Keras weight, a module, the user) keeps the same object, whole from
        outside.
        """
        if not isinstance(variable, cls):
            variable.__class__ = cls
            variable._pending = variable._stored = variable._layout = variable._ranks = None
            variable._holders, variable._aside = (), {}
            variable._key = 0
        return variable

    # --- states ------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        return self._stored is not None

    @property
    def is_whole(self) -> bool:
        """Whether the value lies behind the handle, as that of an ordinary variable."""
        return self._stored is None and self._pending is None

    @property
    def world(self) -> World | None:
        """The processes among which the variable is split; None where ranks share one."""
        return None if self._ranks is None else self._ranks.world

    @property
    def layout(self) -> tuple[Mesh, Spec] | None:
        """Mesh and spec while sharded."""
        return self._layout

    @property
    def shards(self) -> dict[int, tf.Variable]:
        """The variable that each rank of this process uses; empty unless sharded."""
        if self._stored is None or self._ranks is None:
            return {}
        return {rank: self._stored[self._holders[rank]] for rank in self._ranks.local}

    @property
    def holders(self) -> tuple[int, ...]:
        """For each rank, the rank in whose memory its shard lies; empty unless sharded."""
        return self._holders

    def shard(
        self, mesh: Mesh, spec: Spec, ranks: Ranks, holders: Sequence[int] | None = None
    ) -> None:
        """Store the shards as `spec` says, and let the whole value go.

        No-op where the variable is laid like this already.

        Args:
            holders: for each rank, the rank whose shard it uses; its own if None.
        """
        holders = tuple(range(mesh.size) if holders is None else holders)
        if self._layout == (mesh, spec) and self._holders == holders and self._ranks is ranks:
            return
        with tf.init_scope():
            stored = {}
            for rank, value in self._values(mesh, spec, sorted({holders[r] for r in ranks.local})):
                with tf.device(ranks.devices[rank]):
                    stored[rank] = _plain_variable(value)
                del value
            self._release()
        if ranks.world is not None and not self._key:
            self._key = ranks.world.lead.register(self)
        self._layout, self._stored, self._pending = (mesh, spec), stored, None
        self._holders, self._ranks = holders, ranks

    def _values(
        self, mesh: Mesh, spec: Spec, ranks: Sequence[int]
    ) -> Iterator[tuple[int, tf.Tensor]]:
        """The shard of each of `ranks`."""
        if self._pending is not None:
            shards = shard_values(self._pending, self.shape, self.dtype, spec, mesh, ranks)
            yield from zip(ranks, shards, strict=True)
            return
        value = self._current()
        for rank in ranks:
            yield rank, cut(value, spec, mesh, rank)

    def gather(self) -> None:
        """Back to an ordinary whole variable, on purpose."""
        self.on_outside_read = None
        if self._stored is not None:
            with tf.init_scope():
                value = self._assembled()
                self._release()
                self._stored = self._layout = self._ranks = None
                self._holders = ()
                _store(self, value)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Behind the handle is the whole value inside; afterwards all is as it was.

        Where ranks are processes, the one that leads has it, and the others help.
        """
        told, self.on_outside_read = self.on_outside_read, None
        try:
            with self._held_whole():
                yield
        finally:
            self.on_outside_read = told

    @contextlib.contextmanager
    def _held_whole(self) -> Iterator[None]:
        if self.is_whole:
            yield
            return
        with tf.init_scope():
            value = self._assembled() if self._pending is None else self._pending()
            kept = self._pending, self._stored, self._layout, self._holders, self._ranks
            self._pending = self._stored = self._layout = self._ranks = None
            self._holders, self._aside = (), kept[1] or {}
            _store(self, tf.cast(value, self.dtype))
            del value
        try:
            yield
        finally:
            self._aside = {}
            with tf.init_scope():
                _store(self, _freed(self.dtype))
            self._pending, self._stored, self._layout, self._holders, self._ranks = kept

    def materialize(self) -> None:
        """Run the pending initializer."""
        if self._pending is not None:
            with tf.init_scope():
                self._take_whole(self._pending())

    def _take_whole(self, value: Any) -> None:
        """Be whole from now on; the memory behind the handle may have been let go of."""
        value = tf.cast(value, self.dtype)
        self.shape.assert_is_compatible_with(value.shape)
        self._pending = None
        _store(self, value)

    def _current(self) -> tf.Tensor:
        return super()._read_variable_op() if self._stored is None else self._assembled()

    def assign_stored(self, stored: Stored) -> None:
        """Take a value that lies in a file: each rank reads its shards, now or once it has any."""
        self.shape.assert_is_compatible_with(stored.shape)
        if self._stored is None:
            with tf.init_scope():
                self._release()
            self._pending = stored
            return
        assert self._layout is not None
        mesh, spec = self._layout
        ranks = sorted(self._stored)
        values = shard_values(stored, self.shape, self.dtype, spec, mesh, ranks)
        for rank, value in zip(ranks, values, strict=True):
            self._stored[rank].assign(value)

    def _release(self) -> None:
        """Let go of the memory of what is stored; handles stay.

        A function of the user's that was traced before would read them: it finds not-a-number.
        """
        kept = [self] if self._pending is None else []
        for stored in kept if self._stored is None else self._stored.values():
            _store(stored, _freed(self.dtype))

    def _assembled(self) -> tf.Tensor:
        """The whole value; where ranks are processes, all of them call this together."""
        assert self._layout is not None and self._ranks is not None
        mesh, spec = self._layout
        shards = {rank: shard.read_value() for rank, shard in self.shards.items()}
        world = self._ranks.world
        if world is None:
            return join([shards[r] for r in range(mesh.size)], self.shape.as_list(), spec, mesh)
        (own,) = shards.values()
        axes = tuple(a for a, placement in enumerate(spec) if isinstance(placement, Shard))
        if not axes:
            return own
        world.lead.ask(self._key, "_assembled")
        group = next(g for g in mesh.groups(axes) if world.rank in g)
        with world.at(f"gathering {self.name}"):
            world.transport.connect([g for g in mesh.groups(axes) if len(g) > 1])
            gathered = world.exchange.all_gather(own, group)
        # Ranks of other groups hold what their counterparts of this one do.
        at = {tuple(mesh.coordinates(r)[a] for a in axes): v
              for r, v in zip(group, gathered, strict=True)}  # fmt: skip
        pieces = [at[tuple(mesh.coordinates(r)[a] for a in axes)] for r in range(mesh.size)]
        return join(pieces, self.shape.as_list(), spec, mesh)

    def _whole(self) -> tf.Tensor:
        """The assembled value, as a read of this variable to gradient tapes."""
        resource_variable_ops.variable_accessed(self)
        with record.stop_recording():
            value = self._assembled()
            if not tf.executing_eagerly():
                value = _as_read(value, self.handle)
        record.record_operation(
            "ReadVariableOp", [value], [self.handle], backward_function=lambda gradient: [gradient],
            forward_function=lambda tangent: [tangent],
        )  # fmt: skip
        return value

    def _tell_of_read(self) -> None:
        if self.on_outside_read is None or not self.trainable or _capturing.get():
            return
        if _in_graph() and not _in_scratch_graph():
            function = tf.compat.v1.get_default_graph().name
            self.on_outside_read(f"The function {function!r}", self.name.partition(":")[0])
        elif not _in_graph() and record.could_possibly_record():
            self.on_outside_read("A tf.GradientTape", self.name.partition(":")[0])

    def _is_plain(self) -> bool:
        """Whether the handle is the place to read and write."""
        if _capturing.get() or _in_scratch_graph():
            return True
        if self._stored is not None:
            return False
        if self._pending is not None:
            self.materialize()
        return True

    # --- tf.Variable -------------------------------------------------------------

    def _read_variable_op(self, no_copy=False):
        self._tell_of_read()
        if self._is_plain():
            return super()._read_variable_op(no_copy=no_copy)
        return self._whole()

    def is_initialized(self, name=None):
        if self._is_plain():
            return super().is_initialized(name)
        return tf.constant(True)

    def sparse_read(self, indices, name=None):
        self._tell_of_read()
        if self._is_plain():
            return super().sparse_read(indices, name)
        return tf.gather(self._whole(), indices, name=name)

    def gather_nd(self, indices, name=None):
        self._tell_of_read()
        if self._is_plain():
            return super().gather_nd(indices, name)
        return tf.gather_nd(self._whole(), indices, name=name)

    def assign(self, value, use_locking=None, name=None, read_value=True):
        if self._stored is None or _capturing.get():
            if self._pending is None or _in_graph():
                return super().assign(value, use_locking, name, read_value)
            self._take_whole(tf.convert_to_tensor(value, self.dtype))
            return self if read_value else None
        assert self._layout is not None
        mesh, spec = self._layout
        value = tf.convert_to_tensor(value, self.dtype)
        self.shape.assert_is_compatible_with(value.shape)
        for rank, shard in self._stored.items():
            shard.assign(cut(value, spec, mesh, rank))
        return self if read_value else None

    def assign_add(self, delta, use_locking=None, name=None, read_value=True):
        if self._is_plain():
            return super().assign_add(delta, use_locking, name, read_value)
        return self.assign(self._assembled() + tf.cast(delta, self.dtype), read_value=read_value)

    def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
        if self._is_plain():
            return super().assign_sub(delta, use_locking, name, read_value)
        return self.assign(self._assembled() - tf.cast(delta, self.dtype), read_value=read_value)

    def _strided_slice_assign(self, *args, **kwargs):
        return self._through_whole("_strided_slice_assign", *args, **kwargs)

    def _through_whole(self, method: str, *args, **kwargs):
        """Run a method of a plain variable on the whole value and store the result."""
        if self._is_plain():
            return getattr(super(), method)(*args, **kwargs)
        whole = _plain_variable(self._assembled())
        getattr(whole, method)(*args, **kwargs)
        return self.assign(whole.read_value())

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        """In a SavedModel also the shards: functions traced while sharded read them."""
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            stored = self._stored or self._aside
            children.update({f"shard_{rank}": shard for rank, shard in stored.items()})
        return children

    def _restore_from_tensors(self, restored_tensors):
        if self._is_plain():
            self._pending = None
            return super()._restore_from_tensors(restored_tensors)
        (value,) = restored_tensors.values()
        return self.assign(value)


def _plain_variable(value: tf.Tensor) -> tf.Variable:
    """An ordinary variable, past any creator scope that is active."""
    variable = resource_variable_ops.UninitializedVariable(
        shape=value.shape, dtype=value.dtype, trainable=False
    )
    variable.assign(value)
    return variable


def _as_read(value: tf.Tensor, handle: tf.Tensor) -> tf.Tensor:
    """`value`, whose gradient goes to `handle`: for tapes that watch a function from outside."""
    with tf.compat.v1.get_default_graph().gradient_override_map({"IdentityN": "TfparRead"}):
        value, _ = tf.identity_n([value, handle])
    return value


@tf.RegisterGradient("TfparRead")
def _gradient_of_read(op: tf.Operation, gradient: tf.Tensor, _: Any) -> list[tf.Tensor | None]:
    return [None, gradient]


def _delegate(method: str) -> None:
    def call(self, *args, **kwargs):
        return self._through_whole(method, *args, **kwargs)

    call.__name__ = method
    setattr(ParallelVariable, method, call)


for _method in (
    "scatter_sub", "scatter_add", "scatter_max", "scatter_min", "scatter_mul", "scatter_div",
    "scatter_update", "batch_scatter_update", "scatter_nd_sub", "scatter_nd_add",
    "scatter_nd_update", "scatter_nd_max", "scatter_nd_min",
):  # fmt: skip
    _delegate(_method)


def _in_graph() -> bool:
    return isinstance(tf.compat.v1.get_default_graph(), func_graph_lib.FuncGraph)


def _in_scratch_graph() -> bool:
    """Whether Keras infers shapes: nothing will run."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, func_graph_lib.FuncGraph):
        if graph.name.startswith("scratch_graph"):
            return True
        graph = graph.outer_graph
    return False


def _store(variable: tf.Variable, value: tf.Tensor) -> None:
    """Put `value` behind the variable's handle, whatever shape lies there now."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)


def _freed(dtype: tf.DType) -> tf.Tensor:
    """What lies behind a handle whose value is elsewhere."""
    if dtype.is_floating or dtype.is_complex:
        return tf.cast(float("nan"), dtype)
    return tf.zeros([0], dtype)


def cut(value: tf.Tensor, spec: Spec, mesh: Mesh, rank: int) -> tf.Tensor:
    """The shard of `value` that `rank` stores; padding repeats the last entry."""
    for dim in sorted({p.dim for p in spec if isinstance(p, Shard)}):
        length = value.shape[dim]
        at = local_indices(length, dim, spec, mesh, mesh.coordinates(rank))
        if (at[1:] - at[:-1] == 1).all() and (at >= 0).all():
            begin = [0] * len(value.shape)
            size = value.shape.as_list()
            begin[dim], size[dim] = int(at[0]), len(at)
            value = tf.slice(value, begin, size)
        else:
            at[at < 0] = length - 1
            value = tf.gather(value, at, axis=dim)
    return value


def join(shards: Sequence[tf.Tensor], shape: Sequence[int], spec: Spec, mesh: Mesh) -> tf.Tensor:
    """The whole value from the shard of every rank; inverse of `cut`."""
    pieces = list(shards)
    for axis in reversed(range(mesh.num_axes)):
        parts, placement = mesh.shape[axis], spec[axis]
        groups = [pieces[i : i + parts] for i in range(0, len(pieces), parts)]
        if not isinstance(placement, Shard):
            pieces = [g[0] for g in groups]
            continue
        whole = list(
            local_shape(shape, (*spec[:axis], *[Replicate()] * (mesh.num_axes - axis)), mesh)
        )
        pieces = [_join_axis(g, placement, whole) for g in groups]
    return pieces[0]


def _join_axis(parts: Sequence[tf.Tensor], shard: Shard, shape: list[int]) -> tf.Tensor:
    outer, split, unit = shard.view(shape[shard.dim])
    head, tail = shape[: shard.dim], shape[shard.dim + 1 :]
    viewed = [tf.reshape(p, [*head, outer, -1, *tail]) for p in parts]
    joined = tf.concat(viewed, axis=shard.dim + 1)
    length = split * unit
    if joined.shape[shard.dim + 1] != length:
        size = [*head, outer, length, *tail]
        joined = tf.slice(joined, [0] * len(size), size)
    return tf.reshape(joined, shape)
