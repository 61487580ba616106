"""Schema of a step: layers, variables, collectives, and the flows between layers."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tfpar.observability.report.data.schema.plan import ByPhase, BytesByKind

Phase = Literal["forward", "backward", "update"]
When = Literal["between", "beside", "after"]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """Position of a layer in a repeated block.

    Attributes:
        block: the number of the group of equal blocks; `name` is their common name, with `*` for
            what differs.
        instance: the number of the block in the group, from 0; `of` is the size of the group.
        member: the number of the layer in the block: layers with one number are equal.

    Attributes:
        block: the number of the group of blocks that are alike; `name` is what they are called,
            with `*` for what differs.
        instance: which of them, from 0; `of` so many.
        member: which of the block's layers: those with one number are alike.
    """

    block: int
    name: str
    instance: int
    of: int
    member: int


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """A GraphNode: the ops of one scope.

    Attributes:
        path: Keras's path, unique in the plan; of ops between layers, their scope.
        class_name: of the Keras layer; empty where it is not known.
        source: where it is made: `model.py:42`; empty where that is not known.
        repeat: None: it does not repeat.
        stage: of a pipeline; None: there is one.
        ops: how many, and `kind` the type of the one that computes most.
        flops: of a step on the whole batch.
        placement: of its weights, in words; empty if it has none.
        weights: parameters, of the whole layer, and `weight_bytes` in bytes.
        seconds: of its ops, and `communication_s` of its collectives, as far as they are waited
            for.
        memory: of its variables, and of what is live of it when the rank stores most.
        kept_bytes: of what it makes for the backward pass.
        patterns: its sharding patterns, as text (TAP, section IV-C).
    """

    path: str
    class_name: str
    source: str
    repeat: Repeat | None
    stage: int | None
    ops: int
    kind: str
    flops: float
    placement: str
    weights: int
    weight_bytes: float
    seconds: ByPhase
    communication_s: ByPhase
    memory: BytesByKind
    kept_bytes: float
    patterns: tuple[str, ...] = ()

    @property
    def total_s(self) -> float:
        """Seconds of its ops and collectives."""
        return self.seconds.total + self.communication_s.total


@dataclasses.dataclass(frozen=True)
class Option:
    """Another placement that a planner priced for a variable.

    Attributes:
        placement: in words; `spec` as `S(0)R`.
        layout: the mesh, where it is another than the plan's.
        seconds: of a step with it; None: it is not valid.
    """

    placement: str
    spec: str
    layout: str
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Use:
    """Op that uses a variable: its type and name, and the specs that it reads and makes.

    Attributes:
        planned: it runs as the plan says, where by itself it would run otherwise.
    """

    type: str
    name: str
    reads: str
    makes: str
    planned: bool


@dataclasses.dataclass(frozen=True)
class VariableSummary:
    """A variable of the plan.

    Attributes:
        layer: the path of its layer; None: it belongs to none.
        kind: `weight`, or `state`: optimizer slots, moving statistics, metrics, seeds.
        fixed: the plan itself gives its spec, not propagation.
        placement: in words; None: left to propagation.
        spec: as `S(0)R`; `slots` of a weight's slots where theirs differs.
        gathered: how layers read a weight that is gathered for them, in words; None: as it is.
        local_shape: on a device, padding included.
        num_bytes: of the whole; `device_bytes` on a device, None where its spec is not known.
        why: it is placed so.
        offloaded: its optimizer slots are in host memory.
        options: what else was priced, the fastest first.
        uses: who reads or assigns it: the first of `num_uses`.
        reshards: around them, as text, the first of `num_reshards`.
    """

    path: str
    layer: str | None
    kind: Literal["weight", "state"]
    fixed: bool
    shape: tuple[int, ...]
    dtype: str
    placement: str | None
    spec: str | None
    slots: str | None
    local_shape: tuple[int, ...] | None
    num_bytes: int
    device_bytes: int | None
    why: str
    stage: int | None = None
    offloaded: bool = False
    options: tuple[Option, ...] = ()
    uses: tuple[Use, ...] = ()
    num_uses: int = 0
    reshards: tuple[str, ...] = ()
    num_reshards: int = 0
    gathered: str | None = None


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of a step that are equal in kind, axes, layer and time.

    Attributes:
        kind: `all_reduce`, `all_gather`, ...
        axes: of the mesh, that they go over.
        layer: whose tensors they move; None: of no layer.
        when: `between` ops, which wait for them; `beside` the backward pass; or `after` it, in
            the update.
        count: how many, before those of one kind and group are packed.
        num_bytes: payload on a rank, of all of them.
        seconds: that they take, packed as the program packs them; `alone_s` one by one.
    """

    kind: str
    axes: tuple[str, ...]
    layer: str | None
    phase: Phase
    when: When
    count: int
    num_bytes: int
    seconds: float
    alone_s: float


@dataclasses.dataclass(frozen=True)
class FlowSummary:
    """A tensor of the forward pass that one layer makes and another reads.

    Attributes:
        spec: in which it is kept; `read_as` those in which it is read.
    """

    source: str
    target: str
    tensor: str
    shape: tuple[int | None, ...]
    dtype: str
    num_bytes: int
    spec: str
    read_as: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of the step: what a rank is given of it, and what its ops take, in words."""

    name: str
    shape: tuple[int | None, ...]
    given: str
    taken: str


@dataclasses.dataclass(frozen=True)
class Padding:
    """Padding of sizes that do not divide.

    Attributes:
        variables: names of the padded ones.
        num_bytes: of padding in them, in all.
        tensors: how many other tensors are padded.
    """

    variables: tuple[str, ...]
    num_bytes: float
    tensors: int


@dataclasses.dataclass(frozen=True)
class WithoutRule:
    """Ops of a type that have no rule: they run replicated."""

    type: str
    count: int
    first: str


@dataclasses.dataclass(frozen=True)
class RunWhole:
    """A loop, branch or call that runs whole along a mesh axis."""

    type: str
    axis: str
    op: str
