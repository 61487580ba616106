"""The `LayerCostTable` of a captured step: its layers, priced under the plan of each layout.

    table = step_table(plans, batch)

For each layout of a stage's ranks (copies x ranks that weights are split over, and copies that
share experts) the user's planner finds one plan, whatever it stores. The folded step under that
plan is cut into microbatches once for each number of them, and its ops, collectives and buffers are
counted layer by layer, by what prices stages (`cost.stage_breakdown`): a layer is a stage of its
own, on the ranks of all. So sums over the layers of a stage are what the stage is priced at, but
for what only the whole says: what is stored of a tensor that two of its layers read, and what is
sent in slices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cost.packing_gain import PackingKey
from tfpar.cost.stage_breakdown import StageCostBreakdown, stage_prices
from tfpar.cost.stage_transfers import StageTransfers
from tfpar.cost.sub_batch_pricing import without_parts
from tfpar.cost.task_partition import TaskPartition
from tfpar.ir.collection import collection_paused
from tfpar.ir.roles import When
from tfpar.pipeline.graph import Carries
from tfpar.planning.folding.folded_model import FoldedModel, folded_model
from tfpar.planning.folding.folded_plan import folded_anchors
from tfpar.planning.inter_op.stages.op_times import SingleDeviceProfile
from tfpar.planning.inter_op.three_d.cost_table import (
    LayerCost,
    LayerCostTable,
    LayerExchange,
    LayerLayout,
    LayoutDegrees,
    Passes,
)
from tfpar.planning.inter_op.three_d.step_layers import StepLayers
from tfpar.planning.pricing.sub_batches import SubBatchStep
from tfpar.planning.problem import Problem
from tfpar.plans import Plan
from tfpar.propagation.engine import propagate
from tfpar.spec import PlanError, Shard


@dataclasses.dataclass(frozen=True, eq=False)
class LaidOut:
    """The plan of a layout.

    Attributes:
        plan: for the ranks of a stage.
        problem: that it solves.
    """

    plan: Plan
    problem: Problem


@dataclasses.dataclass(frozen=True, eq=False)
class StepPrices:
    """Costs of the layers of a step, found when they are asked for.

    Attributes:
        plans: by the degrees of their layouts.
        batch: samples of a step.
        most: microbatches of each layout at most.
        devices: the machines if all had the same device, by its name.
        layers: of the folded step.
        shards: whether copies can share slots of the optimizer out.
        offloads: whether these can lie in host memory.
    """

    plans: Mapping[LayoutDegrees, LaidOut]
    batch: int
    most: Mapping[LayoutDegrees, int]
    devices: Mapping[str, Cluster]
    layers: StepLayers
    shards: bool
    offloads: bool
    _steps: dict[LayoutDegrees, SubBatchStep] = dataclasses.field(default_factory=dict)
    _costs: dict[LayerLayout, list[LayerCost]] = dataclasses.field(default_factory=dict)
    _counted: dict[tuple[LayoutDegrees, int], _Counted] = dataclasses.field(default_factory=dict)

    def has(self, layout: LayerLayout) -> bool:
        """Whether there is a plan for it, and its microbatches come out even."""
        degrees = layout.degrees
        count, rest = divmod(self.batch, layout.data * layout.microbatch)
        return degrees in self.plans and not rest and 1 <= count <= self.most[degrees]

    def costs(self, layout: LayerLayout) -> list[LayerCost]:
        """Return the costs of each layer of the folded step."""
        if layout not in self._costs:
            degrees = layout.degrees
            count = self.batch // (layout.data * layout.microbatch)
            with collection_paused():
                key = degrees, count
                if key not in self._counted:
                    plan = self.plans[degrees].plan
                    axes = [plan.mesh.axis(name) for name in plan.batch_axes]
                    parts = self._step(degrees)
                    self._counted[key] = _Counted.of(parts, self.layers, count, axes)
                self._costs[layout] = self._counted[key].costs(layout, self.devices)
        return self._costs[layout]

    def _step(self, degrees: LayoutDegrees) -> SubBatchStep:
        if degrees not in self._steps:
            self._steps[degrees] = _folded_step(self.plans[degrees])
        return self._steps[degrees]


@dataclasses.dataclass(frozen=True, eq=False)
class StepLayer:
    """Type of equal layers of a step: the `cost_table.Kind` of a layer of its folded graph."""

    prices: StepPrices
    number: int

    @functools.cached_property
    def shapes(self) -> Collection[tuple[int, int]]:
        batch = self.prices.batch
        sizes = [n for n in range(1, batch + 1) if batch % n == 0]
        tensors = {degrees.tensor for degrees in self.prices.plans}
        return [(tensor, size) for tensor in tensors for size in sizes]

    can_recompute: bool = True

    @functools.cached_property
    def expert_degrees(self) -> Collection[int]:
        return {degrees.experts for degrees in self.prices.plans}

    @property
    def can_shard_slots(self) -> bool:
        return self.prices.shards

    @property
    def can_offload_slots(self) -> bool:
        return self.prices.offloads

    def has(self, device: str, layout: LayerLayout) -> bool:
        return device in self.prices.devices and self.prices.has(layout)

    def cost(self, layout: LayerLayout) -> LayerCost:
        if not self.prices.has(layout):
            raise PlanError(f"The step has no plan for {layout}.")
        return self.prices.costs(layout)[self.number]


def step_table(
    plans: Mapping[LayoutDegrees, LaidOut],
    batch: int,
    most: Mapping[LayoutDegrees, int],
    cluster: Cluster,
    shards: bool,
) -> LayerCostTable:
    """Build the cost table of a step.

    Args:
        plans: by the degrees of their layouts; one at least.
        batch: samples of a step.
        most: microbatches of each layout at most.
        cluster: of all ranks, each kind of devices with a name of its own.
        shards: whether copies can share slots of the optimizer out.

    Raises:
        PlanError: the step computes nothing of what it is fed.
    """
    first = next(iter(plans.values())).problem
    model = folded_model(first, 2)
    seconds = SingleDeviceProfile(model.prepared, model.roles).seconds(cluster)
    layers = StepLayers.of(model, seconds.__getitem__)
    devices: dict[str, Cluster] = {}
    for rank, device in enumerate(cluster.devices):
        if device.name not in devices:
            devices[device.name] = cluster.at_pace_of([rank])
    prices = StepPrices(plans, batch, most, devices, layers, shards, first.decides_offload)
    kinds = {f"layer {i}": StepLayer(prices, i) for i in range(len(layers.times))}
    names = [name for name, times in zip(kinds, layers.times, strict=True) for _ in range(times)]
    # Gradients are added up within microbatches, which are calls of one function, and summed over
    # ranks behind the last of them (`compile.local.microbatches`): nothing of that is overlapped
    # with the backward pass of the same stage, and `cost.simulator` prices it so, too.
    return LayerCostTable(kinds, tuple(names), sums_overlap=False)


def _folded_step(laid: LaidOut) -> SubBatchStep:
    """The folded graph under a plan of the whole, each of its layers priced as one."""
    plan, problem = laid.plan, laid.problem
    model: FoldedModel = folded_model(problem, 2)
    anchors = folded_anchors(plan, problem, model)
    batched = model.batched(problem)
    once = {op: 0 for op, times in model.roles.times.items() if not times}
    roles = dataclasses.replace(model.roles, times=once)
    folded = problem.with_step(graph=model.prepared.graph, batched=batched)
    with collection_paused():
        whole = propagate(model.prepared, plan.mesh, anchors)
    return SubBatchStep(folded, anchors, whole, roles)


@dataclasses.dataclass(frozen=True, eq=False)
class _Counted:
    """A step in microbatches, and what each of its layers exchanges.

    Attributes:
        step: whose stages are its layers.
        forward, backward: exchanges of a microbatch, by layer.
        sums, gathers: those of a step, the second behind the first.
        sent, returned: bytes of a microbatch that a rank sends past the end of each layer, and gets
            back.
        shard_ratios: the part of the slots of each layer that a rank has where copies share them
            out.
    """

    step: TaskPartition
    forward: Sequence[tuple[LayerExchange, ...]]
    backward: Sequence[tuple[LayerExchange, ...]]
    sums: Sequence[tuple[LayerExchange, ...]]
    gathers: Sequence[tuple[LayerExchange, ...]]
    sent: Sequence[float]
    returned: Sequence[float]
    shard_ratios: Sequence[float]
    _prices: dict[tuple[str, bool], list[StageCostBreakdown]] = dataclasses.field(
        default_factory=dict
    )

    @classmethod
    def of(
        cls, parts: SubBatchStep, layers: StepLayers, count: int, axes: Sequence[int]
    ) -> _Counted:
        """Cut a step into `count` microbatches.

        Args:
            axes: of the mesh, those that split the batch.
        """
        cut = parts.cut(count)
        number = len(layers.times)
        ratio = parts.problem.step.state_ratio
        step = TaskPartition(
            cut, parts.roles, layers.layer_of, number, ratio, parts.statistics(cut)
        )
        found = _exchanges(step)

        def exchanged(what: str) -> list[tuple[LayerExchange, ...]]:
            return [tuple(found.get((layer, what), ())) for layer in range(number)]

        return cls(
            step,
            exchanged("F"),
            exchanged("B"),
            exchanged("sums"),
            exchanged("gathers"),
            _sent(step, "activations"),
            _sent(step, "gradients"),
            _shard_ratios(step, axes),
        )

    def costs(self, layout: LayerLayout, devices: Mapping[str, Cluster]) -> list[LayerCost]:
        """The costs of all layers, on each of these devices."""
        sizes = self.step.laid.mesh.shape[:-1]
        ranks = range(math.prod(sizes))
        by_device = {
            name: self._priced(name, machines.part(ranks), layout)
            for name, machines in devices.items()
        }
        found = []
        for layer in range(self.step.num_stages):
            prices = {name: of[layer] for name, of in by_device.items()}
            stored = next(iter(prices.values()))
            kept, working = stored.cost.kept_bytes, stored.cost.working_bytes
            # By the update nothing is kept any more.
            most = max(working["F"], working["B"], working["U"] - kept)
            sums, gathers = self.sums[layer], self.gathers[layer]
            fixed, away = stored.cost.fixed_bytes, 0.0
            slots = stored.state_bytes
            if layout.shard_slots:
                slots *= self.shard_ratios[layer]
            fixed -= stored.state_bytes - slots
            if layout.offload_slots:
                away, fixed, most = slots, fixed - slots, max(most, slots - kept)
            if layout.shard_slots:
                gathers += tuple(e._replace(kind="all_gather") for e in sums if _is_sum(e))
                sums = tuple(e._replace(kind="reduce_scatter") if _is_sum(e) else e for e in sums)
            found.append(
                LayerCost(
                    sizes,
                    {name: _passes(price.compute_s) for name, price in prices.items()},
                    self.forward[layer],
                    self.backward[layer],
                    sums,
                    gathers,
                    {name: price.compute_s["U"] for name, price in prices.items()},
                    layout.data,
                    fixed,
                    kept,
                    most,
                    self.sent[layer],
                    self.returned[layer],
                    away,
                    {name: _passes(price.dispatch_s) for name, price in prices.items()},
                )
            )
        return found

    def _priced(self, name: str, part: Cluster, layout: LayerLayout) -> list[StageCostBreakdown]:
        """The prices of layers on a device; what is computed again is in none of the seconds."""
        key = name, layout.recompute
        if key not in self._prices:
            transfers = StageTransfers(self.step, (0,) * self.step.num_stages)
            prices = stage_prices(transfers, [part], layout.recompute)
            if layout.recompute:
                plain = self._priced(name, part, layout._replace(recompute=False))
                prices = [
                    dataclasses.replace(price, compute_s=one.compute_s, dispatch_s=one.dispatch_s)
                    for price, one in zip(prices, plain, strict=True)
                ]
            self._prices[key] = prices
        return self._prices[key]


def _passes(seconds: Mapping[str, float]) -> Passes:
    """By kind of task."""
    return Passes(seconds["F"], seconds["I"] + seconds["W"])


def _is_sum(exchange: LayerExchange) -> bool:
    return exchange.kind == "all_reduce"


def _shard_ratios(step: TaskPartition, axes: Sequence[int]) -> list[float]:
    """The part of its slots that a rank of each layer has where copies share them out. Copies do
    that hold the same of a weight: all of most weights, and of experts those with the same.

    Args:
        axes: of the mesh, those that split the batch.
    """
    sizes = step.laid.mesh.shape
    whole, own = [0.0] * step.num_stages, [0.0] * step.num_stages
    for variable, spec in step.laid.variable_specs.items():
        if variable.trainable:
            parts = math.prod(n for n, p in zip(sizes, spec, strict=True) if isinstance(p, Shard))
            copies = math.prod(sizes[axis] for axis in axes if not isinstance(spec[axis], Shard))
            layer = step.stage[variable.handle.op]
            whole[layer] += variable.num_bytes / parts
            own[layer] += variable.num_bytes / parts / copies
    return [one / all_of if all_of else 1.0 for one, all_of in zip(own, whole, strict=True)]


def _exchanges(step: TaskPartition) -> dict[tuple[int, str], list[LayerExchange]]:
    """Collect the exchanges of ranks, by layer and by when: in the passes F and B of a microbatch,
    or once a step: "sums" and "gathers". Those that run at the same time are one."""
    together: dict[tuple[int, str, PackingKey], float] = {}
    found: dict[tuple[int, str], list[LayerExchange]] = {}
    for communication in step.laid.communications(step.roles.wire_dtypes):
        moved, op = without_parts(communication, step.laid.mesh), communication.op
        times = step.roles.times.get(op, 1)
        if moved is None or not times:
            continue
        layer, kind, size = step.stage[op], communication.kind, float(communication[1])
        when = communication.when(step.roles)
        if when is not When.BETWEEN:
            what = "sums" if when is When.BESIDE else "gathers"
            found.setdefault((layer, what), []).append(
                LayerExchange(kind, moved.axes, times * size)
            )
            continue
        task = step.kinds[op]
        each = moved.each or op in step.statistics.sums or step.microbatches == 1
        what = "gathers" if task == "U" or not each else "F" if task == "F" else "B"
        phase = step.roles.phase[op]
        packable = PackingKey.of(communication, step.roles, moved.axes, phase, times)
        if packable is None:
            found.setdefault((layer, what), []).append(LayerExchange(kind, moved.axes, size, times))
        else:
            key = layer, what, packable
            together[key] = together.get(key, 0.0) + size
    for (layer, what, packable), size in together.items():
        packed = LayerExchange(packable.kind, packable.axes, size, packable.times)
        found.setdefault((layer, what), []).append(packed)
    return found


def _sent(step: TaskPartition, carries: Carries) -> list[float]:
    """Bytes of a rank that cross the end of each layer in a microbatch: each tensor once."""
    transfers = StageTransfers(step, range(step.num_stages))
    found = [0.0] * step.num_stages
    crossing: dict[tuple[object, int], float] = {}
    for one in step.crossings:
        if one.carries == carries:
            num_bytes = transfers.sent_bytes(one)
            for end in range(min(one.source, one.target), max(one.source, one.target)):
                key = one.tensor, end
                crossing[key] = max(crossing.get(key, 0.0), num_bytes)
    for (_, end), num_bytes in crossing.items():
        found[end] += num_bytes
    return found
