"""Reports written by hand, whose numbers add up as those of plans do: what views are tested on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tests.observability.report.one_f_one_b import simulated
from tfpar.observability.report.data.schema import (
    Axis,
    ByPhase,
    BytesByKind,
    CandidateSummary,
    Collective,
    CostSummary,
    Facts,
    FlowSummary,
    Input,
    LayerSummary,
    LinkSummary,
    Machines,
    MeasuredLane,
    MeasuredSlice,
    MeasuredStep,
    Option,
    PartOfStep,
    PipelineSummary,
    Repeat,
    Report,
    ScheduleTime,
    SecondsByCause,
    Stage,
    Use,
    VariableSummary,
    WhatIf,
)
from tfpar.spec import Partial, Replicate, Shard, parse_spec

GIB = 2.0**30
FLOPS, BANDWIDTH = 5e13, 5e10
"""Of a device, and of a link in bytes a second."""
NASTY = "\"'<b>&amp;</b></script><!--"
"""A name that breaks a page which takes it for anything but text."""
SEQUENCE = 128
PHASES, KINDS = ("forward", "backward", "update"), ("weights", "slots", "live")


@dataclasses.dataclass(frozen=True)
class Sketch:
    """A layer: its weights with their specs, how wide what it makes is, and how that lies."""

    path: str
    class_name: str
    weights: tuple[tuple[str, tuple[int, ...], str], ...]
    width: int
    made: str
    reads: tuple[str, ...]
    repeat: Repeat | None = None
    stage: int | None = None


def mlp(name: str = "mlp") -> Report:
    """Three layers on 2x2 ranks; `name` is that of the model and of its first layer."""
    sketches = (
        Sketch(name, "Dense", (("kernel", (64, 256), "R,S(1)"),), 256, "S(0),S(1)", ()),
        Sketch("hidden", "Dense", (("kernel", (256, 256), "R,S(0)"),), 256, "S(0),P(sum)", (name,)),
        Sketch("classes", "Dense", (("kernel", (256, 10), "R,R"),), 10, "S(0),R", ("hidden",)),
    )
    return _report(name, sketches, (2, 2), rows=1024)


def with_measured_step(report: Report) -> Report:
    """A step of two ranks, half as long again as it was predicted, beside the predicted one."""
    assert report.cost is not None
    seconds = 1.5 * report.cost.seconds
    lanes = []
    for rank in (0, 1):
        late = 0.2 * seconds * rank
        ran = MeasuredSlice(f"net/{report.layers[0].path}", "forward", late, 0.5 * seconds)
        meets = [MeasuredSlice("sum", "forward", 0.5 * seconds, seconds)]
        if rank == 0:
            meets.insert(
                0, MeasuredSlice("waiting for rank 1", "waiting", 0.0, late + 0.5 * seconds)
            )
        lanes += [
            MeasuredLane(rank, "compute", (ran,)),
            MeasuredLane(rank, "communication", tuple(meets)),
        ]
    times = (2 * seconds, seconds, 0.5 * seconds)
    step = MeasuredStep("t.json", 11, seconds, times, 2, tuple(lanes))
    return dataclasses.replace(report, measured=step)


def gpt(depth: int, stages: int = 1, mesh: tuple[int, int] = (2, 4), width: int = 1024) -> Report:
    """A GPT as Megatron splits it: blocks of eight layers, shared out evenly over stages."""
    first, last = (0, stages - 1) if stages > 1 else (None, None)
    tokens = (("embeddings", (32_000, width), "R,S(0)"),)
    positions = (("embeddings", (SEQUENCE, width), "R,R"),)
    sketches = [
        Sketch("tokens", "Embedding", tokens, width, "S(0),P(sum)", (), stage=first),
        Sketch("positions", "Embedding", positions, width, "S(0),R", ("tokens",), stage=first),
    ]
    before = "positions"
    for i in range(depth):
        for member, sketch in enumerate(_block(i, depth, width, before)):
            stage = None if first is None else (8 * i + member) * stages // (8 * depth)
            sketches.append(dataclasses.replace(sketch, stage=stage))
        before = f"block_{i}/add_2"
    norm = (("gamma", (width,), "R,R"), ("beta", (width,), "R,R"))
    logits = (("kernel", (width, 32_000), "R,S(1)"),)
    sketches += [
        Sketch("norm", "LayerNormalization", norm, width, "S(0),R", (before,), stage=last),
        Sketch("logits", "Dense", logits, 32_000, "S(0),S(2)", ("norm",), stage=last),
        Sketch("loss", "", (), 1, "S(0),R", ("logits",), stage=last),
    ]
    return _report(f"gpt_{depth}", sketches, mesh, rows=64 * SEQUENCE, microbatches=8 * stages)


def _block(i: int, depth: int, width: int, before: str) -> list[Sketch]:
    name = f"block_{i}"

    def layer(
        member: int,
        path: str,
        kind: str,
        wide: int,
        made: str,
        reads: Sequence[str],
        **weights: str,
    ) -> Sketch:
        sizes = {"gamma": (width,), "bias": (wide,)}
        shapes = [(n, sizes.get(n, (_width(reads[0]), wide)), s) for n, s in weights.items()]
        repeat = Repeat(0, "block_*", i, depth, member)
        return Sketch(f"{name}/{path}", kind, tuple(shapes), wide, made, tuple(reads), repeat)

    def _width(read: str) -> int:
        return {f"{name}/mlp/up": 4 * width}.get(read, width)

    whole, cut = "S(0),R", "S(0),S(2)"
    normal = "LayerNormalization"
    attention, up = f"{name}/attention", f"{name}/mlp/up"
    return [
        layer(0, "norm_1", normal, width, whole, [before], gamma="R,R"),
        layer(1, "attention/qkv", "Dense", 3 * width, cut, [f"{name}/norm_1"], kernel="R,S(1)"),
        layer(
            2, "attention/out", "Dense", width, "S(0),P(sum)", [f"{attention}/qkv"], kernel="R,S(0)"
        ),
        layer(3, "add_1", "Add", width, whole, [f"{attention}/out", before]),
        layer(4, "norm_2", normal, width, whole, [f"{name}/add_1"], gamma="R,R"),
        layer(
            5, "mlp/up", "Dense", 4 * width, cut, [f"{name}/norm_2"], kernel="R,S(1)", bias="R,S(0)"
        ),
        layer(6, "mlp/down", "Dense", width, "S(0),P(sum)", [up], kernel="R,S(0)", bias="R,R"),
        layer(7, "add_2", "Add", width, whole, [f"{name}/mlp/down", f"{name}/add_1"]),
    ]


# --- what comes of sketches -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Size:
    """The mesh (data, model), rows of the global batch, and microbatches of it."""

    mesh: tuple[int, int]
    rows: int
    microbatches: int

    def split(self, spec: str) -> int:
        """Into how many parts."""
        parts = zip(parse_spec(spec), self.mesh, strict=True)
        return math.prod(n for p, n in parts if isinstance(p, Shard))


def _report(
    name: str, sketches: Sequence[Sketch], mesh: tuple[int, int], rows: int, microbatches: int = 1
) -> Report:
    size = Size(mesh, rows, microbatches)
    variables = [v for s in sketches for v in _variables(s, size)]
    collectives = tuple(c for s in sketches for c in _collectives(s, size))
    layers = tuple(_layer(s, size, collectives, variables) for s in sketches)
    by_stage = {s.stage: [x for x in layers if x.stage == s.stage] for s in sketches}
    pipeline = _pipeline(by_stage, size) if len(by_stage) > 1 else None
    cost = _cost(by_stage, collectives, pipeline)
    ranks = math.prod(mesh) * len(by_stage)
    stages = f"{len(by_stage)} stages x " if pipeline else ""
    where = f"{stages}{mesh[0]} data x {mesh[1]} model"
    alone = sum(x.flops for x in layers) / FLOPS
    return Report(
        tfpar_version="0.1.0",
        verdict=f"{name!r} on {where}: a step takes {cost.seconds * 1e3:.2f} ms, "
        f"{alone / cost.seconds:.1f} times as fast as one device.",
        facts=Facts(
            name,
            "Functional",
            where,
            "split over data",
            tuple(_axes(mesh)),
            ranks,
            "tap",
            microbatches=microbatches,
            fingerprint="9f3c1a",
        ),
        machines=Machines(
            "dgx-a100",
            f"{max(1, ranks // 8)} nodes x {min(ranks, 8)} devices",
            {"A100": ranks},
            40 * GIB,
            (LinkSummary("nvlink", 3e11, 2e-6), LinkSummary("infiniband", 2.5e10, 5e-6)),
            FLOPS * ranks,
        ),
        cost=cost,
        layers=layers,
        variables=tuple(variables),
        collectives=collectives,
        flows=_flows(sketches, size),
        inputs=(Input("tokens", (64, SEQUENCE), "a part along data", "split over data"),),
        pipeline=pipeline,
        candidates=_candidates(cost, alone),
        what_if=_what_if(cost),
        planned_ops={},
        padding=None,
        without_rule=(),
        run_whole=(),
        warnings=(f"{name}: a warning that names its model.",),
        hints=("The dearest collective is an all_reduce over model.",),
    )


def _axes(mesh: tuple[int, int]) -> list[Axis]:
    return [Axis("data", mesh[0], True), Axis("model", mesh[1])]


def _flops(sketch: Sketch, size: Size) -> float:
    matrices = [s for _, s, _ in sketch.weights if len(s) == 2 and sketch.class_name == "Dense"]
    return size.rows * (6.0 * sum(map(math.prod, matrices)) or 30.0 * sketch.width)


def _made_bytes(sketch: Sketch, size: Size) -> int:
    """On a rank."""
    return 4 * size.rows * sketch.width // size.split(sketch.made)


def _variables(sketch: Sketch, size: Size) -> list[VariableSummary]:
    found = []
    for name, shape, spec in sketch.weights:
        path = f"{sketch.path}/{name}"
        num_bytes, parts = 4 * math.prod(shape), size.split(spec)
        specs = ("R,R", "R,S(0)", "R,S(1)")[: len(shape) + 1]
        options = tuple(
            Option(_words(other), other, "", 1e-3 * (2 + i))
            for i, other in enumerate(specs)
            if other != spec
        )
        uses = (Use("MatMul", f"{sketch.path}/MatMul", spec, sketch.made, False),)
        local = tuple(
            n // size.mesh[1] if f"S({dim})" in spec else n for dim, n in enumerate(shape)
        )
        shared = path, sketch.path, shape, spec, local, num_bytes, num_bytes // parts, sketch.stage
        found += [
            _variable(*shared, "weight", options, uses),
            *(_variable(f"adam/{path}_{slot}", *shared[1:], "state", (), ()) for slot in "mv"),
        ]
    return found


def _variable(path, layer, shape, spec, local, num_bytes, held, stage, kind, options, uses):
    return VariableSummary(
        path,
        layer,
        kind,
        kind == "weight",
        shape,
        "float32",
        _words(spec),
        spec,
        None,
        local,
        num_bytes,
        held,
        "the planner chose it" if kind == "weight" else "as its weight",
        stage,
        False,
        options,
        uses,
        len(uses),
    )


def _words(spec: str) -> str:
    texts = [
        f"{p} over {n}"
        for p, n in zip(parse_spec(spec), ("data", "model"), strict=True)
        if not isinstance(p, Replicate)
    ]
    return ", ".join(texts) or "replicated"


def _collectives(sketch: Sketch, size: Size) -> list[Collective]:
    """Sums of partial results forward, of their like backward, and of gradients beside."""
    found = []
    made = 4 * size.rows * sketch.width // size.mesh[0]

    def add(axis: str, phase: str, when: str, count: int, num_bytes: int) -> None:
        seconds = num_bytes * 1.5 / BANDWIDTH
        found.append(
            Collective(
                "all_reduce",
                (axis,),
                sketch.path,
                phase,
                when,
                count,
                num_bytes,
                seconds,
                seconds * 1.1,
            )
        )

    if any(isinstance(p, Partial) for p in parse_spec(sketch.made)):
        add("model", "forward", "between", size.microbatches, made)
    if any(spec == "R,S(1)" for _, _, spec in sketch.weights):
        add("model", "backward", "between", size.microbatches, made // 2)
    if sketch.weights:
        held = sum(4 * math.prod(s) // size.split(spec) for _, s, spec in sketch.weights)
        add("data", "backward", "beside", len(sketch.weights), held)
    return found


HIDDEN, EXPOSED = 0.2, 0.1
"""What part of collectives between ops runs behind work, and of gradients' sums does not."""


def _layer(
    sketch: Sketch,
    size: Size,
    collectives: Sequence[Collective],
    variables: Sequence[VariableSummary],
) -> LayerSummary:
    flops = _flops(sketch, size)
    split = size.mesh[0] * (size.mesh[1] if any("S" in s for *_, s in sketch.weights) else 1)
    work = flops / split / FLOPS
    weights = [v for v in variables if v.layer == sketch.path and v.kind == "weight"]
    held = sum(v.device_bytes or 0 for v in weights)
    waited = dict.fromkeys(("forward", "backward"), 0.0)
    for c in collectives:
        if c.layer == sketch.path:
            waited[c.phase] += c.seconds * (1 - HIDDEN if c.when == "between" else EXPOSED)
    kept = _made_bytes(sketch, size)
    words = {v.placement or "" for v in weights}
    return LayerSummary(
        sketch.path,
        sketch.class_name,
        "model.py:42" if sketch.class_name else "",
        sketch.repeat,
        sketch.stage,
        12,
        "MatMul" if len(sketch.weights) else "AddV2",
        flops,
        "; ".join(sorted(words - {"replicated"}) or words),
        sum(math.prod(v.shape) for v in weights),
        sum(v.num_bytes for v in weights),
        ByPhase(work / 3, work * 2 / 3, held * 7 / 1e12),
        ByPhase(**waited),
        BytesByKind(held, 2 * held, kept * (4 if sketch.stage else 1) / size.microbatches),
        kept,
    )


def _flows(sketches: Sequence[Sketch], size: Size) -> tuple[FlowSummary, ...]:
    named = {s.path: s for s in sketches}
    found = []
    for target in sketches:
        for path in target.reads:
            source = named[path]
            read = source.made.replace("P(sum)", "R")
            shape = (64, size.rows // 64, source.width)
            found.append(
                FlowSummary(
                    path,
                    target.path,
                    f"{path}/out:0",
                    shape,
                    "float32",
                    4 * math.prod(shape),
                    source.made,
                    (read,),
                )
            )
    return tuple(found)


def _cost(
    by_stage: dict[int | None, list[LayerSummary]],
    collectives: Sequence[Collective],
    pipeline: PipelineSummary | None,
) -> CostSummary:
    def worked(found: Sequence[LayerSummary]) -> float:
        return sum(x.total_s for x in found)

    def stored(found: Sequence[LayerSummary]) -> float:
        return sum(x.memory.total for x in found)

    stage = max(by_stage, key=lambda s: worked(by_stage[s]))
    layers, fullest = by_stage[stage], max(by_stage.values(), key=stored)
    paths = {x.path for x in layers}
    moved = [c for c in collectives if c.layer in paths]
    between = sum(c.seconds for c in moved if c.when == "between")
    gradients = sum(c.seconds for c in moved if c.when == "beside")
    compute = [sum(getattr(x.seconds, p) for x in layers) for p in PHASES]
    waits = [sum(getattr(x.communication_s, p) for x in layers) for p in PHASES]
    parts = {
        "compute": sum(compute),
        "collectives": between,
        "gradients": gradients * EXPOSED,
        "hidden": -between * HIDDEN,
        "start": 1e-4,
    }
    if pipeline is not None:
        sends = 2 * sum(t.end - t.start for t in pipeline.transfers[:1])
        end = max(task.end for task in pipeline.tasks)
        parts |= {"transfers": sends, "bubble": end - sum(compute) - sum(waits) - sends}
    memory = BytesByKind(*(sum(getattr(x.memory, k) for x in fullest) for k in KINDS))
    return CostSummary(
        sum(parts.values()),
        tuple(PartOfStep(n, s) for n, s in parts.items()),
        ByPhase(*compute),
        ByPhase(*waits),
        between * HIDDEN,
        gradients,
        gradients * EXPOSED,
        parts.get("bubble", 0.0),
        parts.get("transfers", 0.0),
        25e6,
        sum(c.count for c in collectives),
        memory.total,
        memory,
        memory.weights,
        sum(x.kept_bytes for x in fullest),
    )


def _pipeline(by_stage: dict[int | None, list[LayerSummary]], size: Size) -> PipelineSummary:
    count, each = len(by_stage), math.prod(size.mesh)
    ranks = [tuple(range(i * each, (i + 1) * each)) for i in range(count)]

    def seconds(found: Sequence[LayerSummary], phase: str) -> float:
        return sum(getattr(x.seconds, phase) + getattr(x.communication_s, phase) for x in found)

    forward, backward = (
        [seconds(found, p) / size.microbatches for found in by_stage.values()]
        for p in ("forward", "backward")
    )
    update = [seconds(found, "update") for found in by_stage.values()]
    sent = _made_bytes(Sketch("", "", (), 1024, "S(0),R", ()), size) / size.microbatches
    tasks, transfers = simulated(forward, backward, update, size.microbatches, 2e-5, sent)
    end = max(task.end for task in tasks)
    stages = []
    for i, found in enumerate(by_stage.values()):
        work = sum(t.end - t.start for t in tasks if t.stage == i)
        peak = sum(x.memory.total for x in found)
        stages.append(
            Stage(
                ranks[i],
                f"{found[0].path} to {found[-1].path}",
                int(sum(x.weight_bytes for x in found)),
                int(sum(x.memory.weights for x in found)),
                forward[i],
                backward[i],
                update[i],
                1e-3,
                end / work - 1,
                2 * sent * size.microbatches,
                min(count - i, size.microbatches),
                sum(x.memory.weights + x.memory.slots for x in found),
                sum(x.memory.live for x in found) / (count - i),
                peak,
                "B0",
                40 * GIB,
            )
        )
    schedules = (
        ScheduleTime("1F1B", end, stages[0].peak_bytes or 0.0, True),
        ScheduleTime("GPIPE", end * 1.02, 60 * GIB, False),
    )
    idle = end * count / sum(t.end - t.start for t in tasks) - 1
    return PipelineSummary(
        f"1F1B, {size.microbatches} microbatches",
        tuple(ranks),
        tuple(range(count)),
        False,
        tuple(stages),
        idle,
        schedules,
        tasks,
        transfers,
    )


def _candidates(cost: CostSummary, alone: float) -> tuple[CandidateSummary, ...]:
    found = [
        CandidateSummary(
            *("this plan", "plan", cost.seconds, cost.memory_bytes, True, "", cost.parts),
            causes=SecondsByCause(*(part * cost.seconds for part in (0.4, 0.4, 0.1, 0.1, 0.0))),
        ),
        CandidateSummary(
            *("2 stages", "pipeline", 1.2 * cost.seconds, 2 * cost.memory_bytes, True, "slower"),
            causes=SecondsByCause(*(part * cost.seconds for part in (0.5, 0.1, 0.6, 0.0, 0.0))),
        ),
        CandidateSummary(
            "one device", "baseline", alone, cost.memory_bytes * 6, False, "does not fit"
        ),
        CandidateSummary(
            "data parallel", "baseline", cost.seconds * 1.35, cost.memory_bytes * 3, True
        ),
    ]
    for i, mesh in enumerate(("1x8", "8x1", "4x2", "2x2x2")):
        slower = 1.06 + 0.11 * i
        found.append(
            CandidateSummary(
                mesh,
                "layout",
                cost.seconds * slower,
                cost.memory_bytes * (0.7 + 0.4 * i),
                True,
                f"takes {100 * (slower - 1):.0f} % longer",
            )
        )
    found.append(
        CandidateSummary("8 stages", "pipeline", None, None, None, "its batch is too small")
    )
    return tuple(found)


def _what_if(cost: CostSummary) -> tuple[WhatIf, ...]:
    found = []
    for i, cluster in enumerate(("dgx-a100", "dgx-h100", "v100-ethernet")):
        for j, (mesh, ranks) in enumerate((("1x8", 8), ("2x8", 16), ("4x8", 32))):
            seconds = cost.seconds * (1.0, 0.45, 3.1)[i] * (1.9, 1.0, 0.6)[j]
            fits = not (i == 2 and j == 0)
            note = "" if fits else "6.20 GiB too much"
            found.append(WhatIf(cluster, mesh, ranks, seconds, 9 * GIB / (j + 1), fits, note))
    return tuple(found)


def unpriced() -> Report:
    """What a plan from constraints alone has: no cost, no machines, nothing else priced."""
    found = mlp()
    layers = tuple(
        dataclasses.replace(x, seconds=ByPhase(), communication_s=ByPhase()) for x in found.layers
    )
    return dataclasses.replace(
        found,
        machines=None,
        cost=None,
        layers=layers,
        candidates=(),
        what_if=(),
        warnings=(),
        hints=(),
        verdict="'mlp' on 2 data x 2 model, as constraints say.",
    )
