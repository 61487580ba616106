"""Steps of GPTs that others measured in many strategies, and what we predict of them.

    python -m benchmarks.published --steps FILE [--json FILE]

FILE is a table (CSV) with a row for each step and the columns of `MeasuredStep`: Megatron-DeepSpeed
in 16 bits on DGX A100, activations recomputed, 1F1B, a vocabulary of 51,200, as in the files of
vTrain (Bang et al., MICRO 2024; MIT licence).

    blocks      `benchmarks.gpt_layers`; where the heads of a rank times its samples are no multiple
                of four, Megatron-LM has no fused softmax (its `FusedScaleMaskSoftmax`), and more
                ops run
    head        besides the product what Megatron-LM's `vocab_parallel_cross_entropy` reads and
                writes of the logits, and what it keeps in 32 bits
    gradients   summed in 32 bits, once the backward pass is over
    update      Adam in 32 bits reads and writes weights, both slots and the gradient, and writes
                weights in 16 bits
    host        issues the ops of a block one by one (`Device.dispatch_s`)

What data sheets do not say are the `Constants`. They were fitted (`benchmarks.fit_steps`) to every
tenth row of the half of vTrain's steps that is public here, which are in
`benchmarks/data/vtrain_tenth.csv` and are never scored. Which terms a step has was decided with all
rows of that half at hand, so its other half is the better test of them.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import functools
import os
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.correlation import spearman
from benchmarks.gpt_layers import OPS, Gpt, gpt_table
from benchmarks.trials import GRADIENT_BYTES
from benchmarks.workers import ROOT
from tfpar.cluster.description import Cluster
from tfpar.cluster.lookup import find_cluster
from tfpar.planning.inter_op.three_d.assign import even_counts
from tfpar.planning.inter_op.three_d.cost_model import simulate_strategy
from tfpar.planning.inter_op.three_d.cost_table import LayerCostTable, LayerType, Passes
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.strategy import MemoryOptions, Strategy3D
from tfpar.spec import Mesh

FITTED = ROOT / "benchmarks" / "data" / "vtrain_tenth.csv"
"""The rows that constants are fitted to."""

VOCABULARY = 51_200
NODE = 8
UPDATED_BYTES = 30
"""Of a weight: 12 read and 12 written of it and its slots, its gradient read, and the weight in 16
bits written."""

LOGIT_BYTES = Passes(38.0, 14.0)
"""Read and written of each logit: a copy in 32 bits (6), its maximum (4), what is subtracted (8),
exponentials (8), their sum (4) and quotients (8); backward the product with the gradient (8) and
the copy in 16 bits (6)."""

UNFUSED_OPS = 4
"""Of a softmax without Megatron-LM's kernel in a forward pass: a copy in 32 bits, scale, mask, the
softmax itself and a copy in 16 bits, less the one kernel."""

SCORE_BYTES = 32.0
"""What these read and write of each score (6, 8, 8, 8 and 6), less what the one kernel does (4)."""


class Constants(NamedTuple):
    """What is fitted.

    Attributes:
        flops: FLOP/s of large products in 16 bits.
        half_size: see `Device`.
        memory_bandwidth: bytes/s.
        link_bandwidth, latency_s: of NVLink, as collectives have it. The latency is far above that
            of the links: it stands for what ranks wait for each other, too.
        dispatch_s: see `Device`.
        microbatch_s: in which the host issues the forward pass of what is no block: embedding, head
            and loss.
    """

    flops: float
    half_size: float
    memory_bandwidth: float
    link_bandwidth: float
    latency_s: float
    dispatch_s: float
    microbatch_s: float


CONSTANTS = Constants(246e12, 36.3, 1.96e12, 307e9, 99.5e-6, 44.8e-6, 0.588e-3)


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """A step that was measured; `micro_batch` is that of a copy of the pipeline."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    measured_ms: float

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> list[MeasuredStep]:
        """Return the rows of a table.

        Raises:
            ValueError: it lacks a column, or has no number in one; names the line.
        """
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            lacking = {f.name for f in dataclasses.fields(cls)} - {*(reader.fieldnames or ())}
            if lacking:
                raise ValueError(f"{path} has no column {', '.join(sorted(lacking))}.")
            found = []
            for row in reader:
                try:
                    counts = {f.name: int(row[f.name]) for f in dataclasses.fields(cls)[:-1]}
                    found.append(cls(**counts, measured_ms=float(row["measured_ms"])))
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{path}, line {reader.line_num}: {error}.") from None
        return found

    @property
    def seconds(self) -> float:
        """As measured."""
        return self.measured_ms / 1e3

    @property
    def model(self) -> tuple[int, ...]:
        """What all strategies that one can choose among have in common."""
        return (
            *(self.gpus, self.global_batch),
            *(self.hidden, self.heads, self.layers, self.sequence),
        )

    @property
    def strategy(self) -> Strategy3D:
        """As many blocks in each stage: the embedding in the first, the head in the last."""
        first, *rest = even_counts(self.layers, self.pipeline)
        *rest, last = rest or [0]
        counts = (first + 1, *rest, last + 1) if self.pipeline > 1 else (self.layers + 2,)
        memory = MemoryOptions(recompute=True)
        return Strategy3D(self.data, self.tensor, self.micro_batch, counts, memory=memory)

    def predicted_s(self, constants: Constants = CONSTANTS) -> float:
        """The seconds that we predict."""
        cluster = machines(self.gpus, constants)
        problem = StrategyProblem(_table(self, cluster, constants), cluster, self.global_batch)
        return simulate_strategy(problem, self.strategy).seconds


@functools.lru_cache(maxsize=64)
def machines(gpus: int, constants: Constants) -> Cluster:
    """DGX A100 with these constants; several of them as the preset joins them."""
    cluster = find_cluster("dgx-a100", Mesh.of([max(1, gpus // NODE), min(NODE, gpus)]))
    (node,) = {dataclasses.replace(node, count=1) for node in cluster.nodes}
    device = dataclasses.replace(
        node.device,
        flops={**node.device.flops, "float16": constants.flops},
        half_size=constants.half_size,
        memory_bandwidth=constants.memory_bandwidth,
        dispatch_s=constants.dispatch_s,
    )
    levels = tuple(
        dataclasses.replace(
            level, bandwidth=constants.link_bandwidth, latency_s=constants.latency_s
        )
        for level in node.levels
    )
    nodes = [dataclasses.replace(one, device=device, levels=levels) for one in cluster.nodes]
    return dataclasses.replace(cluster, nodes=tuple(nodes))


def _table(step: MeasuredStep, cluster: Cluster, constants: Constants) -> LayerCostTable:
    """The layers of Megatron-LM on the cluster's device."""
    gpt = Gpt(step.layers, step.hidden, step.heads, step.sequence, VOCABULARY)
    fused = step.heads // step.tensor * step.micro_batch % 4 == 0
    ops = OPS + (0 if fused else UNFUSED_OPS)
    issued = {
        "block": ops * constants.dispatch_s,
        "embedding": constants.microbatch_s / 2,
        "head": constants.microbatch_s / 2,
    }
    device = cluster.device
    table = gpt_table(cluster, (step.micro_batch,), (step.tensor,), gpt)
    kinds = dict(table.kinds)
    entries = step.micro_batch * step.sequence / step.tensor
    scores = 0.0 if fused else SCORE_BYTES * entries * step.heads * step.sequence
    more = {
        "block": Passes(scores, scores),
        "head": Passes(*(n * entries * VOCABULARY for n in LOGIT_BYTES)),
    }
    for name, kind in kinds.items():
        assert isinstance(kind, LayerType)
        moved = more.get(name, Passes(0.0, 0.0))
        weights = kind.gradient_bytes / GRADIENT_BYTES
        kinds[name] = dataclasses.replace(
            kind,
            seconds={
                case: passes.plus(moved, 1 / device.memory_bandwidth)
                for case, passes in kind.seconds.items()
            },
            update_s={device.name: weights * UPDATED_BYTES / device.memory_bandwidth},
            dispatch_s={device.name: Passes(issued[name], 2 * issued[name])},
        )
    return LayerCostTable(kinds, table.layers)


# --- the score ------------------------------------------------------------------------------


def scored(steps: Sequence[MeasuredStep]) -> list[dict[str, Any]]:
    """A row for each step that nothing was fitted to, with what we predict of it."""
    known = {*MeasuredStep.read(FITTED)}
    return [
        dataclasses.asdict(step) | {"predicted_ms": 1e3 * step.predicted_s()}
        for step in steps
        if step not in known
    ]


def score(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How far predictions are from measurements: of all rows, of one machine and of several.

    `chosen` is the measured step of the strategy that is predicted to be the fastest over that of
    the fastest of a model, batch and number of GPUs with several.
    """
    parts = {
        "all": rows,
        "one machine": [row for row in rows if row["gpus"] <= NODE],
        "several machines": [row for row in rows if row["gpus"] > NODE],
    }
    return [{"steps": name} | _score(some) for name, some in parts.items() if some]


def _score(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    measured = [row["measured_ms"] for row in rows]
    predicted = [row["predicted_ms"] for row in rows]
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    chosen = [*_chosen(rows)]
    return {
        "number": len(rows),
        "mean_error": statistics.mean(errors),
        "within_15_percent": sum(error <= 0.15 for error in errors) / len(errors),
        "rho": spearman(predicted, measured),
        "choices": len(chosen),
        "chosen_mean": statistics.mean(chosen) if chosen else None,
        "chosen_worst": max(chosen, default=None),
    }


def _chosen(rows: Iterable[dict[str, Any]]) -> Iterable[float]:
    models: dict[tuple[int, ...], list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        step = MeasuredStep(**{f.name: row[f.name] for f in dataclasses.fields(MeasuredStep)})
        models[step.model].append(row)
    for some in models.values():
        if len(some) > 1:
            ours = min(some, key=lambda row: row["predicted_ms"])
            yield ours["measured_ms"] / min(row["measured_ms"] for row in some)


def score_text(row: dict[str, Any]) -> str:
    """A row of `score` in a line."""
    rho = row["rho"]
    text = (
        f"{row['steps']}: {row['number']}, {row['mean_error']:.1%} off on average, "
        f"{row['within_15_percent']:.0%} within 15 %, rho {'-' if rho is None else f'{rho:.3f}'}"
    )
    if not row["choices"]:
        return text
    return (
        f"{text}; of {row['choices']} choices the measured step is {row['chosen_mean']:.3f} times "
        f"the fastest on average, {row['chosen_worst']:.3f} at worst"
    )
