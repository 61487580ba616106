"""`Report`: what there is to show of a plan, and how it is written.

`summary`, `explain`, the page, the timeline, `compare` and `--json` read this and nothing else. A
`Report` is what one version of the format says; as JSON it is an object with the fields below, by
their names. Seconds are of one training step on a rank, bytes of a rank, unless another thing is
said. Infinite and unknown numbers are `null`.

A step's time is the sum of `Cost.parts`. Layers add up to it: the seconds of the layers of the
stage that works most (of all layers, where there are no stages) are `parts` "compute",
"collectives" and "gradients" together, "hidden" ones taken off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from tfpar.spec import PlanError

FORMAT, VERSION = "tfpar report", 1

Phase = Literal["forward", "backward", "update"]
When = Literal["between", "beside", "after"]


@dataclasses.dataclass(frozen=True)
class ByPhase:
    """Seconds of each phase of a step."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """Of all phases."""
        return self.forward + self.backward + self.update


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of the mesh.

    Attributes:
        splits_batch: ranks along it have different samples.
        shares: how many samples of a batch each coordinate has, where these are unequal.
    """

    name: str
    size: int
    splits_batch: bool = False
    shares: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the plan is.

    Attributes:
        model: the name of the model, and `model_class` its class; empty where they are not known.
        where: the mesh in words; of a pipeline, with its stages.
        batch: in words, over which axes the batch is split.
        mesh: of all ranks; of a pipeline, those of one set of ranks.
        ranks: of the job.
        planner: empty for a plan from constraints alone.
        recompute: blocks that are computed again in the backward pass.
        offloaded_slots: how many weights have their optimizer slots in host memory.
        offloaded_activations: blocks whose activations lie there.
        splits_anything: the batch or a variable is split over several ranks.
        split_slots: how many weights have slots that are split further than they (ZeRO-1).
        constraints: what the plan was made from, as text.
        fixed_tensors: activations that constraints fix, with their placement.
        passed_over: (seconds, collectives) of a faster plan that is no simpler; see `Plan`.
        fingerprint: of the graph.
    """

    model: str
    model_class: str
    where: str
    batch: str
    mesh: tuple[Axis, ...]
    ranks: int
    planner: str
    microbatches: int = 1
    chunks: int = 1
    batch_statistics: str = "exact"
    recompute: tuple[str, ...] = ()
    offloaded_slots: int = 0
    offloaded_activations: tuple[str, ...] = ()
    split_slots: int = 0
    splits_anything: bool = True
    constraints: tuple[str, ...] = ()
    fixed_tensors: dict[str, str] = dataclasses.field(default_factory=dict)
    passed_over: tuple[float, int] | None = None
    cut_short: bool = False
    fingerprint: str = ""


@dataclasses.dataclass(frozen=True)
class Link:
    """A level of a cluster's network: bytes a second and seconds, between neighbours."""

    name: str
    bandwidth: float
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Machines:
    """The cluster that the plan was priced for.

    Attributes:
        shape: in words.
        devices: the kinds of device, each with how many there are.
        memory_limit: what the rank may store whose memory `Cost` tells.
        links: from within a node outwards.
        flops: FLOP/s of all devices together, in the model's arithmetic as planned.
    """

    name: str
    shape: str
    devices: dict[str, int]
    memory_limit: float | None
    links: tuple[Link, ...]
    flops: float | None = None


@dataclasses.dataclass(frozen=True)
class PartOfStep:
    """A part of the time of a step: `compute`, `collectives` (what is waited for between ops),
    `gradients` (their sums, past the end of the backward pass), `transfers` and `bubble` (of
    pipelines), `start` (what a step takes besides), and `hidden`, below 0: collectives that run
    behind other work."""

    name: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class BytesByKind:
    """Bytes on a rank when it stores most.

    Attributes:
        weights: shards of weights, padding included.
        slots: of the optimizer, and other state.
        live: gradients, activations and all else that a step computes, as far as it is stored then.
    """

    weights: float = 0.0
    slots: float = 0.0
    live: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.slots + self.live


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step costs; see `tfpar.cost.cost.Cost` for each number.

    Attributes:
        parts: of `seconds`, of which they are the sum.
        memory_bytes: the most that a rank stores, and `memory` of what, adding up to it.
    """

    seconds: float
    parts: tuple[PartOfStep, ...]
    compute_s: ByPhase
    communication_s: ByPhase
    hidden_s: float
    gradients_s: float
    exposed_s: float
    bubble_s: float
    transfer_s: float
    bucket_bytes: float
    collectives: int
    memory_bytes: float
    memory: BytesByKind
    gradient_bytes: float
    activation_bytes: float


@dataclasses.dataclass(frozen=True)
class Repeat:
    """That a layer is part of a block that repeats.

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
class Layer:
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
        """Of its ops and collectives."""
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
    """An op that uses a variable: its type, name and the specs it reads and makes.

    Attributes:
        planned: it runs as the plan says, where by itself it would run otherwise.
    """

    type: str
    name: str
    reads: str
    makes: str
    planned: bool


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable of the plan.

    Attributes:
        layer: the path of its layer; None: it belongs to none.
        kind: `weight`, or `state`: optimizer slots, moving statistics, metrics, seeds.
        fixed: the plan itself lays it, not propagation.
        placement: in words; None: left to propagation.
        spec: as `S(0)R`; `slots` of a weight's slots where they lie otherwise.
        local_shape: on a device, padding included.
        num_bytes: of the whole; `device_bytes` on a device, None where its spec is not known.
        why: it lies so.
        offloaded: its optimizer slots lie in host memory.
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


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of a step that are alike.

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
class Flow:
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
class Stage:
    """A stage of a pipeline; seconds of one microbatch (of the update: of a step); see
    `tfpar.cost.staged.StageShare`.

    Attributes:
        layers: its layers in words: the first and the last.
        num_bytes: of its variables, and `device_bytes` on a rank.
        bubble: what its ranks wait, as a part of what they work.
    """

    ranks: tuple[int, ...]
    layers: str
    num_bytes: int
    device_bytes: int | None
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    reduction_s: float | None = None
    bubble: float | None = None
    sent_bytes: float | None = None
    in_flight: int | None = None
    fixed_bytes: float | None = None
    kept_bytes: float | None = None
    peak_bytes: float | None = None
    peak_task: str = ""
    limit_bytes: float | None = None


@dataclasses.dataclass(frozen=True)
class ScheduleTime:
    """A schedule that the plan's was picked from."""

    name: str
    seconds: float
    memory_bytes: float
    fits: bool


@dataclasses.dataclass(frozen=True)
class Ran:
    """A task of a pipeline, from start to end in seconds from the start of the step.

    Attributes:
        actor: the set of ranks that runs it.
        kind: F, B, I, W, U; or R for a sum of gradients over the ranks of a stage.
        microbatch: None for what runs once.
    """

    start: float
    end: float
    actor: int
    stage: int
    kind: str
    microbatch: int | None


@dataclasses.dataclass(frozen=True)
class Sent:
    """What one stage sends to another, from start to end."""

    start: float
    end: float
    source: int
    target: int
    microbatch: int | None
    num_bytes: float


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The stages of a plan, and when they run.

    Attributes:
        schedule: in words.
        actors: the ranks of each set of ranks.
        actor_of_stage: the set that runs each stage.
        recompute: forward passes run again in the backward pass.
        bubble: what all ranks wait, as a part of what they work; None where nothing was priced.
        schedules: that the plan's was picked from, itself the first.
        tasks, transfers: of a simulated step, by their starts; empty where it is not known.
    """

    schedule: str
    actors: tuple[tuple[int, ...], ...]
    actor_of_stage: tuple[int, ...]
    recompute: bool
    stages: tuple[Stage, ...]
    bubble: float | None = None
    schedules: tuple[ScheduleTime, ...] = ()
    tasks: tuple[Ran, ...] = ()
    transfers: tuple[Sent, ...] = ()


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that was found or priced, and why it lost.

    Attributes:
        kind: `plan`: this one; `layout`: the best on another mesh; `pipeline`: another number of
            stages; `baseline`: `one device` or `data parallel`; `trial`: it was run.
        seconds, memory_bytes: None where they are not known.
        why: it was not taken; empty for the plan, and for baselines.
        parts: of its time, where they are known.
        measured_s: of a trial.
    """

    name: str
    kind: Literal["plan", "layout", "pipeline", "baseline", "trial"]
    seconds: float | None
    memory_bytes: float | None
    fits: bool | None
    why: str = ""
    parts: tuple[PartOfStep, ...] = ()
    measured_s: float | None = None


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """The best plan for the same model on other machines.

    Attributes:
        seconds, memory_bytes: None: no plan was found; `note` says why.
    """

    cluster: str
    mesh: str
    ranks: int
    seconds: float | None
    memory_bytes: float | None
    fits: bool
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Padding:
    """What is padded, as sizes do not divide: variables by name, bytes of them in all, and how many
    other tensors."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What there is to show of a plan.

    Attributes:
        verdict: one sentence: what the plan is, and what it gains.
        cost, machines: None where nothing was priced.
        layers: in the order of the model; empty where the graph is not known, as of a plan that
            was saved without its report.
        flows: between layers, in the forward pass.
        collectives: of the whole step.
        planned_ops: how many ops of each type run as the plan says, where by themselves they would
            run otherwise.
        warnings, hints: sentences; `hints` at most three, of what would change the plan.
    """

    format: Literal["tfpar report"] = "tfpar report"
    version: Literal[1] = 1
    tfpar_version: str
    verdict: str
    facts: Facts
    machines: Machines | None
    cost: Cost | None
    layers: tuple[Layer, ...]
    variables: tuple[Variable, ...]
    collectives: tuple[Collective, ...]
    flows: tuple[Flow, ...]
    inputs: tuple[Input, ...]
    pipeline: Pipeline | None
    candidates: tuple[Candidate, ...]
    what_if: tuple[WhatIf, ...]
    planned_ops: dict[str, int]
    padding: Padding | None
    without_rule: tuple[WithoutRule, ...]
    run_whole: tuple[RunWhole, ...]
    warnings: tuple[str, ...]
    hints: tuple[str, ...]

    def elsewhere(self, found: Iterable[WhatIf]) -> Report:
        """The same, with what the best plans on other machines take."""
        return dataclasses.replace(self, what_if=tuple(found))

    def to_builtins(self) -> dict[str, Any]:
        """As JSON has it: objects, lists, numbers, strings."""
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return found


def read_report(data: Any, source: str) -> Report:
    """The report that `to_builtins` made an object of.

    Args:
        source: names it in errors.

    Raises:
        PlanError: it is none, of a newer version, or malformed; says where.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f"{source} holds no report of a plan.")
    if data.get("version") != VERSION:
        raise PlanError(
            f"The report of {source} has the version {data.get('version')!r}; this tfpar reads "
            f"{VERSION}. Make the plan again with this tfpar, or use the one that made it."
        )
    try:
        return msgspec.convert(data, Report)
    except msgspec.ValidationError as error:
        raise PlanError(f"The report of {source} is malformed: {error}") from error
