"""Schema of a plan's facts, its machines, its pipeline and the cost of its step."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ByPhase:
    """Seconds of each phase of a step."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all phases."""
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
    """Facts of a plan.

    Attributes:
        model: the name of the model, and `model_class` its class; empty where they are not known.
        where: the mesh in words; of a pipeline, with its stages.
        batch: in words, over which axes the batch is split.
        mesh: of all ranks; of a pipeline, those of its first layout.
        ranks: of the job.
        planner: empty for a plan from constraints alone.
        recompute: blocks that are computed again in the backward pass.
        offloaded_slots: how many weights have their optimizer slots in host memory.
        offloaded_activations: blocks whose activations are offloaded there.
        splits_anything: the batch or a variable is split over several ranks.
        split_slots: how many weights have slots that are split further than they (ZeRO-1).
        gathered_weights: how many weights are stored in parts and gathered for their layers
            (ZeRO-3, FSDP).
        constraints: what the plan was made from, as text.
        fixed_tensors: activations that constraints fix, with their placement.
        passed_over: (seconds, collectives) of a faster plan that is no simpler; see `Plan`.
        fingerprint: of the graph.
        in_unequal_shares: the ranks of some stage have unequal shares of the batch.
        attention: how attentions run; see `Plan`.
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
    gathered_weights: int = 0
    splits_anything: bool = True
    constraints: tuple[str, ...] = ()
    fixed_tensors: dict[str, str] = dataclasses.field(default_factory=dict)
    passed_over: tuple[float, int] | None = None
    cut_short: bool = False
    fingerprint: str = ""
    in_unequal_shares: bool = False
    attention: str = "whole"


@dataclasses.dataclass(frozen=True)
class LinkSummary:
    """A level of a cluster's network: bytes a second and seconds, between neighbours."""

    name: str
    bandwidth: float
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Machines:
    """The cluster that the plan was priced for.

    Attributes:
        shape: in words.
        devices: the device types, each with the number of its devices.
        memory_limit: of the rank whose memory is in `CostSummary`.
        links: from within a node outwards.
        flops: FLOP/s of all devices together, in the model's arithmetic as planned.
        host_memory_limit: what a rank may have in the memory of its host; None: not known.
    """

    name: str
    shape: str
    devices: dict[str, int]
    memory_limit: float | None
    links: tuple[LinkSummary, ...]
    flops: float | None = None
    host_memory_limit: float | None = None


@dataclasses.dataclass(frozen=True)
class RentalSummary:
    """Devices that the step may rent.

    Attributes:
        name: in words.
        ranks: of the cluster, that they are.
        dollars_per_hour: of all of them.
        dollars_per_million: of a million samples, and `seconds` of a step; None: it was not
            planned there, or there is no plan.
        why: it was not taken; empty for the plan's own.
    """

    name: str
    ranks: tuple[int, ...]
    dollars_per_hour: float
    dollars_per_million: float | None
    seconds: float | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class PartOfStep:
    """A part of the time of a step: `compute`, `collectives` (what is waited for between ops),
    `gradients` (their sums, past the end of the backward pass), `transfers` and `bubble` (of
    pipelines), `start` (what a step takes besides), and `hidden`, below 0: collectives that run
    behind other work."""

    name: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class SecondsByCause:
    """Seconds of a step by what they grow with; they add up to it.

    On devices that are c times as fast, with links l times as fast and a batch b times as large (in
    as many more microbatches of the same size), a step takes
    `b * (compute_s / c + links_s / l) + once_compute_s / c + once_links_s / l + start_s`.

    Attributes:
        compute_s: of the forward and backward pass, and `once_compute_s` whatever the batch: the
            update, and what ranks wait for each other.
        links_s: of collectives that the passes wait for and of transfers between stages, and
            `once_links_s` of the gradients' sums, and of the update.
        start_s: what a step takes besides.
    """

    compute_s: float
    links_s: float
    once_compute_s: float
    once_links_s: float
    start_s: float


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
        """Bytes of all of them."""
        return self.weights + self.slots + self.live


@dataclasses.dataclass(frozen=True)
class CostSummary:
    """Cost of a step; see `tfpar.cost.cost.Cost` for each number.

    Attributes:
        parts: of `seconds`, of which they are the sum.
        memory_bytes: the most that a rank stores, and `memory` of what, adding up to it.
        host_slot_bytes, host_activation_bytes: what a rank has in the memory of its host.
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
    host_slot_bytes: float = 0.0
    host_activation_bytes: float = 0.0
    host_wait_s: float = 0.0


# --- pipeline -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a pipeline; seconds of one microbatch (of the update: of a step); see
    `tfpar.cost.pipeline_cost.StageCost`.

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
class TaskSummary:
    """A task of a pipeline, from start to end in seconds from the start of the step.

    Attributes:
        actor: that runs it.
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
class TransferSummary:
    """Transfer from one stage to another, from start to end."""

    start: float
    end: float
    source: int
    target: int
    microbatch: int | None
    num_bytes: float


@dataclasses.dataclass(frozen=True)
class PipelineSummary:
    """Pipeline of a plan: its stages, and the times of their tasks.

    Attributes:
        schedule: in words.
        actors: the ranks of each actor.
        actor_of_stage: the actor that runs each stage.
        recompute: the stages whose forward pass runs again in the backward pass: True for all,
            False for none, or the numbers of some.
        bubble: what all ranks wait, as a part of what they work; None where nothing was priced.
        schedules: that the plan's was picked from, itself the first.
        tasks, transfers: of a simulated step, by their starts; empty where it is not known.
    """

    schedule: str
    actors: tuple[tuple[int, ...], ...]
    actor_of_stage: tuple[int, ...]
    recompute: bool | tuple[int, ...]
    stages: tuple[Stage, ...]
    bubble: float | None = None
    schedules: tuple[ScheduleTime, ...] = ()
    tasks: tuple[TaskSummary, ...] = ()
    transfers: tuple[TransferSummary, ...] = ()
