"""Variables that are whole from outside and sharded inside.

    v = ParallelVariable(shape=(4, 6), dtype="float32", initial_value=lambda: tf.zeros((4, 6)))
    v.state                             Pending: a shape and an initializer, no memory
    v.shard(mesh, (Shard(0),), ranks)
    v.state                             Sharded: on two ranks, (2, 6) each; the whole nowhere
    v.numpy()                           (4, 6), put together for the occasion
    v.assign_add(tf.ones((4, 6)))       takes the whole, stores each rank's part
    with v.whole():
        v.state                         Whole: behind v's own handle, as in any tf.Variable
    v.state                             Sharded, as before

Keras and the user see a `tf.Variable`: reading gives the whole value and assigning takes it, in
every state (`tf.variables.states`). A step that is captured sees only the handle, whatever the
state. Where the ranks are processes, each stores its own shard, and reading is a collective: all of
them read together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from tfpar.spec import Mesh, Shard, Spec
from tfpar.tf.interop.fingerprints import Traits, traits
from tfpar.tf.interop.variables import (
    UninitializedVariable,
    note_read,
    note_use,
    tapes_may_record,
    without_tapes,
)
from tfpar.tf.variables.calls import Calls
from tfpar.tf.variables.initial.shard import ShardSource, shard_values
from tfpar.tf.variables.states import Pending, Sharded, State, Whole
from tfpar.tf.variables.tracing_context import is_capturing, is_inferring_shapes, is_tracing
from tfpar.tf.variables.values import cut_shard, plain_variable, release, store

if TYPE_CHECKING:
    from tfpar.tf.distributed.world import World
    from tfpar.tf.runtime.ranks import Ranks


class AssignedValue(NamedTuple):
    """Attributes:
    times: how often a value was assigned.
    value: of the last one, where it was cut into shards and is whole nowhere any more.
    """

    times: int = 0
    value: Traits | None = None

    def again(self) -> AssignedValue:
        """Return the record after one more value, of which nothing is kept."""
        return AssignedValue(self.times + 1)

    def cut(self, value: tf.Tensor) -> AssignedValue:
        """Return the record after `value` was cut into shards."""
        return AssignedValue(self.times, traits(value.numpy()))


class ParallelVariable(UninitializedVariable):
    """A `tf.Variable` whose value may be pending, whole or sharded.

    Attributes:
        on_outside_read: called with (reader, name) of what trains or computes with the weight on
            one device: a function or a gradient tape that is not part of a captured step.
        assigned: what it was given from outside of captured steps. Ranks that are processes
            compare it: what one alone is given, the others do not have.

    Args:
        initial_value: callable that makes the initial value, or None when the value
            is assigned before it is read.
        shape, dtype, trainable, name: as for `tf.Variable`.
    """

    _state: State
    _key = 0  # under which the lead of a job knows it; 0 until it was sharded over processes
    _calls: Calls | None = None  # by functions that were traced while it was last sharded

    def __init__(
        self,
        *,
        shape,
        dtype,
        trainable=True,
        name=None,
        initial_value: Callable[[], Any] | None = None,
        **kwargs,
    ) -> None:
        with tf.init_scope():
            if tf.executing_eagerly():
                # TensorFlow makes a kernel for each name of a handle, half a millisecond each:
                # all handles are made under one name, and variables named by themselves.
                with tf.compat.v1.name_scope(name, "Variable") as scope:
                    own_name = scope.removesuffix("/")
                with tf.compat.v1.name_scope(""):
                    super().__init__(shape=shape, dtype=dtype, trainable=trainable, **kwargs)
                self._handle_name = self.handle._name = f"{own_name}:0"
            else:
                super().__init__(shape=shape, dtype=dtype, trainable=trainable, name=name, **kwargs)
        self._state = Whole() if initial_value is None else Pending(initial_value)

    on_outside_read: Callable[[str, str], None] | None = None
    assigned = AssignedValue()

    @classmethod
    def adopt(cls, variable: tf.Variable) -> ParallelVariable:
        """Make a plain resource variable a `ParallelVariable` where it stands.

        Whoever holds it (a Keras weight, a module, the user) keeps the same object, whole from
        outside.
        """
        if not isinstance(variable, cls):
            variable.__class__ = cls
            variable._state = Whole()
        return variable

    # --- states ------------------------------------------------------------------

    @property
    def state(self) -> State:
        """State that holds the value; another object whenever the value moves."""
        return self._state

    @property
    def is_sharded(self) -> bool:
        return isinstance(self._state, Sharded)

    @property
    def is_whole(self) -> bool:
        """Whether the value is behind the handle, as that of an ordinary variable."""
        return isinstance(self._state, Whole)

    @property
    def world(self) -> World | None:
        """The processes among which the variable is split; None where ranks share one."""
        return self._state.ranks.world if isinstance(self._state, Sharded) else None

    @property
    def layout(self) -> tuple[Mesh, Spec] | None:
        """Mesh and spec while sharded."""
        state = self._state
        return (state.mesh, state.spec) if isinstance(state, Sharded) else None

    @property
    def shards(self) -> dict[int, tf.Variable]:
        """The variable that each rank of this process uses; empty unless sharded."""
        return self._state.shards if isinstance(self._state, Sharded) else {}

    @property
    def ranks(self) -> Ranks | None:
        """Ranks among which the variable is sharded, all of a job or some; None unless sharded."""
        return self._state.ranks if isinstance(self._state, Sharded) else None

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks whose memory holds the shard of each rank; empty unless sharded."""
        return self._state.holders if isinstance(self._state, Sharded) else ()

    def shard(
        self, mesh: Mesh, spec: Spec, ranks: Ranks, holders: Sequence[int] | None = None
    ) -> None:
        """Store the shards as `spec` says, and let the whole value go.

        No-op where the variable has this mesh and spec already.

        Args:
            holders: for each rank, the rank whose shard it uses; its own if None.
        """
        holders = tuple(range(mesh.size) if holders is None else holders)
        state = self._state
        if isinstance(state, Sharded) and state.ranks is ranks:
            if (state.mesh, state.spec, state.holders) == (mesh, spec, holders):
                return
        with tf.init_scope():
            stored = {}
            own = sorted({holders[r] for r in ranks.local})
            for rank, value in self._values(mesh, spec, own, ranks.world):
                with tf.device(ranks.devices[rank]):
                    stored[rank] = plain_variable(value)
                del value
            self._release()
        if ranks.world is not None and not self._key:
            self._key = ranks.world.lead.register(self)
        self._state = Sharded(mesh, spec, stored, holders, ranks)

    def _values(
        self, mesh: Mesh, spec: Spec, ranks: Sequence[int], world: World | None
    ) -> Iterator[tuple[int, tf.Tensor]]:
        """The shard of each of `ranks`."""
        if isinstance(self._state, Pending):
            initial = self._state.initial
            shards = shard_values(initial, self.shape, self.dtype, spec, mesh, ranks)
            yield from zip(ranks, shards, strict=True)
            return
        if self.is_sharded:
            value = self._assembled()
        else:
            value = super()._read_variable_op()
            self._note_cut(value, spec, world)
        for rank in ranks:
            yield rank, cut_shard(value, spec, mesh, rank)

    def _note_cut(self, value: tf.Tensor, spec: Spec, world: World | None) -> None:
        """Keep what tells whether the other processes have cut the same `value`, if they have."""
        if world is not None and any(isinstance(placement, Shard) for placement in spec):
            self.assigned = self.assigned.cut(value)

    def gather(self) -> None:
        """Back to an ordinary whole variable, on purpose."""
        self.on_outside_read = None
        if self.is_sharded:
            with tf.init_scope():
                value = self._assembled()
                self._release()
                self._be_whole(value)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within this context the whole value is behind the handle; afterwards all is as it was.

        Where ranks are processes, the leading one gets the value, and the others take part.
        """
        told, self.on_outside_read = self.on_outside_read, None
        try:
            with self._held_whole():
                yield
        finally:
            self.on_outside_read = told

    @contextlib.contextmanager
    def _held_whole(self) -> Iterator[None]:
        before = self._state
        if isinstance(before, Whole):
            yield
            return
        with tf.init_scope():
            if isinstance(before, Sharded):
                self._be_whole(self._assembled())
            else:
                self._be_whole(before.initial())
        try:
            yield
        finally:
            with tf.init_scope():
                release(self)
            self._state = before

    def materialize(self) -> None:
        """Run the pending initializer."""
        if isinstance(self._state, Pending):
            with tf.init_scope():
                self._take_whole(self._state.initial())

    def _take_whole(self, value: Any) -> None:
        """Become whole, with a value of the user's."""
        value = tf.cast(value, self.dtype)
        self.shape.assert_is_compatible_with(value.shape)
        self._be_whole(value)

    def _be_whole(self, value: Any) -> None:
        """Put `value` behind the handle, which may have no memory of its own at the moment."""
        value = tf.cast(value, self.dtype)
        self._state = Whole()
        store(self, value)

    def assign_stored(self, stored: ShardSource) -> None:
        """Assign a value stored in a file: each rank reads its shards, now or once it has any."""
        self.shape.assert_is_compatible_with(stored.shape)
        self.assigned = self.assigned.again()
        state = self._state
        if not isinstance(state, Sharded):
            with tf.init_scope():
                self._release()
            self._state = Pending(stored)
            return
        ranks = sorted(state.stored)
        values = shard_values(stored, self.shape, self.dtype, state.spec, state.mesh, ranks)
        for rank, value in zip(ranks, values, strict=True):
            state.stored[rank].assign(value)

    def let_go(self) -> None:
        """Let go of the memory of the value, which `take` brings back."""
        self._release()

    def take(self, state: State) -> None:
        """Take over a state and the values in it."""
        self._state = state

    def _release(self) -> None:
        """Let go of the memory of what is stored; handles stay."""
        if isinstance(self._state, Sharded):
            for stored in self._state.stored.values():
                release(stored)
        elif isinstance(self._state, Whole):
            release(self)

    def _assembled(self) -> tf.Tensor:
        """The whole value; where ranks are processes, all of them call this together."""
        state = self._state
        assert isinstance(state, Sharded)
        if state.needs_others and state.ranks.world is not None:
            state.ranks.world.lead.ask(self._key, "_assembled")
        if is_tracing():
            return self._in_graph(state).read()
        return state.assemble(self.name, self.shape, self.dtype)

    def _in_graph(self, state: Sharded) -> Calls:
        """Return the variable's calls in the function that is being traced."""
        if self._calls is None or self._calls.state is not state:
            self._calls = Calls(self.handle, state, self.name, self.shape, self.dtype)
        return self._calls

    def _whole(self) -> tf.Tensor:
        """The assembled value, as a read of this variable to gradient tapes."""
        note_use(self)
        with without_tapes():
            value = self._assembled()
        note_read(value, self.handle)
        return value

    def _tell_of_read(self) -> None:
        if self.on_outside_read is None or not self.trainable or is_capturing():
            return
        if is_tracing() and not is_inferring_shapes():
            function = tf.compat.v1.get_default_graph().name
            self.on_outside_read(f"The function {function!r}", self.name.partition(":")[0])
        elif not is_tracing() and tapes_may_record():
            self.on_outside_read("A tf.GradientTape", self.name.partition(":")[0])

    def _note_assigned(self) -> None:
        """Count what is assigned now, rather than in a graph that is traced."""
        if not is_tracing():
            self.assigned = self.assigned.again()

    def _is_plain(self) -> bool:
        """Whether the handle is the place to read and write."""
        if is_capturing() or is_inferring_shapes():
            return True
        self.materialize()
        return self.is_whole

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
        state = self._state
        self._note_assigned()
        if not isinstance(state, Sharded) or is_capturing():
            if not isinstance(state, Pending) or is_tracing():
                return super().assign(value, use_locking, name, read_value)
            self._take_whole(tf.convert_to_tensor(value, self.dtype))
            return self if read_value else None
        value = tf.convert_to_tensor(value, self.dtype)
        self.shape.assert_is_compatible_with(value.shape)
        if is_tracing():
            self._in_graph(state).write(value)
        else:
            state.assign(value)
            self._note_cut(value, state.spec, state.ranks.world)
        return self if read_value else None

    def assign_add(self, delta, use_locking=None, name=None, read_value=True):
        if self._is_plain():
            self._note_assigned()
            return super().assign_add(delta, use_locking, name, read_value)
        return self.assign(self._assembled() + tf.cast(delta, self.dtype), read_value=read_value)

    def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
        if self._is_plain():
            self._note_assigned()
            return super().assign_sub(delta, use_locking, name, read_value)
        return self.assign(self._assembled() - tf.cast(delta, self.dtype), read_value=read_value)

    def _strided_slice_assign(self, *args, **kwargs):
        return self._through_whole("_strided_slice_assign", *args, **kwargs)

    def _through_whole(self, method: str, *args, **kwargs):
        """Run a method of a plain variable on the whole value and store the result."""
        if self._is_plain():
            self._note_assigned()
            return getattr(super(), method)(*args, **kwargs)
        whole = plain_variable(self._assembled())
        getattr(whole, method)(*args, **kwargs)
        return self.assign(whole.read_value())

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        """Add, in a SavedModel, what functions hold that were traced while it was sharded."""
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel" and self._calls is not None:
            unused = enumerate(self._calls.unused_when_written())
            children.update({f"unused_{i}": handle for i, handle in unused})
        return children

    def _restore_from_tensors(self, restored_tensors):
        if self._is_plain():
            self._note_assigned()
            if isinstance(self._state, Pending):  # as it may be while a step is captured
                self._state = Whole()
            return super()._restore_from_tensors(restored_tensors)
        (value,) = restored_tensors.values()
        return self.assign(value)


def _delegate(method: str) -> None:
    def call(self, *args, **kwargs):
        return self._through_whole(method, *args, **kwargs)

    call.__name__ = method
    setattr(ParallelVariable, method, call)


for _method in (
    "scatter_sub",
    "scatter_add",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_div",
    "scatter_update",
    "batch_scatter_update",
    "scatter_nd_sub",
    "scatter_nd_add",
    "scatter_nd_update",
    "scatter_nd_max",
    "scatter_nd_min",
):
    _delegate(_method)
