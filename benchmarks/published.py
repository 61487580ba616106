"""Steps of large GPTs that others measured, and what we predict of them. Nothing is fitted.

    python -m benchmarks.published [--steps FILE [--predicted FILE]] [--json FILE]

    GPT 2.6B     8 V100: Alpa's benchmark (Zheng et al. 2022) by hand, 2 stages x 2 data x 2 tensor,
                 4 microbatches, recomputed, with slots sharded (its `prefer_reduce_scatter`)
    GPT-3 175B   1,024 A100: Narayanan et al. 2021 (§5.1), 140 TFLOP/s a GPU by their formula; they
                 do not say the degrees. Here 8 tensor ranks, as many as a machine has, and 16
                 stages: of the powers of two the fewest that hold it
    GPT 1T       3,072 A100: the same (Table 1), 64 stages x 8 tensor ranks, 163 TFLOP/s a GPU,
                 interleaved, with 2 parts a stage, as many as its 128 layers allow

Layer times are those of `benchmarks.gpt_layers` on the presets of these machines. Both papers count
operations with the forward pass that is computed again.

`--steps` compares a table of measured steps instead (`benchmarks.measured_steps`) and says how good
predictions are: of all steps, of those on one machine, and on several. `--predicted` writes the
table with what is predicted of each.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
from typing import Any

from benchmarks.gpt_layers import Gpt, gpt_table
from benchmarks.measured_steps import MeasuredStep, score, score_text, scored
from benchmarks.results import save
from tfpar.cluster.lookup import find_cluster
from tfpar.planning.inter_op.three_d.assign import even_counts
from tfpar.planning.inter_op.three_d.cost_model import simulate_strategy
from tfpar.planning.inter_op.three_d.memory import stored_bytes
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.strategy import MemoryOptions, Strategy3D
from tfpar.planning.inter_op.three_d.time_terms import passes_of_copies, sync_seconds
from tfpar.spec import Mesh


@dataclasses.dataclass(frozen=True)
class Run:
    """A step that was measured.

    Attributes:
        nodes: machines of 8 devices.
        actors: sets of ranks that run stages.
        flops: FLOP/s a device, by the formula of the paper; the step's seconds follow.
        num_bytes: that a device stores at most; None: not said.
        shard_slots: whether copies share the optimizer's slots out.
    """

    name: str
    preset: str
    nodes: int
    gpt: Gpt
    batch: int
    data: int
    tensor: int
    actors: int
    microbatch: int
    flops: float
    virtual: int = 1
    num_bytes: float | None = None
    shard_slots: bool = False

    @property
    def seconds(self) -> float:
        """Of a step (Narayanan et al. 2021, §5.1, equation 3)."""
        gpt = self.gpt
        tokens, blocks = self.batch * gpt.length, 96 * gpt.layers * gpt.hidden**2
        beside = gpt.length / 6 / gpt.hidden + gpt.vocabulary / 16 / gpt.layers / gpt.hidden
        return tokens * blocks * (1 + beside) / (8 * self.nodes * self.flops)

    @property
    def model(self) -> StrategyProblem:
        """On the preset's machines."""
        cluster = find_cluster(self.preset, Mesh.of([self.nodes, 8]))
        table = gpt_table(cluster, (self.microbatch,), (self.tensor,), self.gpt)
        return StrategyProblem(table, cluster, self.batch)

    @property
    def strategy(self) -> Strategy3D:
        """As many blocks in each stage, as they have it: the embedding in the first, the head in
        the last."""
        first, *rest = even_counts(self.gpt.layers, self.actors * self.virtual)
        *rest, last = rest or [0]
        counts = (first + 1, *rest, last + 1)
        memory = MemoryOptions(recompute=True, shard_slots=self.shard_slots)
        return Strategy3D(
            self.data, self.tensor, self.microbatch, counts, virtual=self.virtual, memory=memory
        )


RUNS = (
    Run(
        "GPT 2.6B, 8 V100",
        "rhino-m8",
        1,
        Gpt(32, 2560, 32, 1024, 51_200),
        batch=32,
        data=2,
        tensor=2,
        actors=2,
        microbatch=4,
        flops=37.01e12,
        num_bytes=8.745e9,
        shard_slots=True,
    ),
    Run(
        "GPT-3 175B, 1,024 A100",
        "dgx-a100",
        128,
        Gpt(96, 12_288, 96, 2048, 51_200),
        batch=1536,
        data=8,
        tensor=8,
        actors=16,
        microbatch=1,
        flops=140e12,
    ),
    Run(
        "GPT 1T, 3,072 A100",
        "dgx-a100",
        384,
        Gpt(128, 25_600, 160, 2048, 51_200),
        batch=3072,
        data=6,
        tensor=8,
        actors=64,
        microbatch=1,
        flops=502e15 / 3072,
        virtual=2,
    ),
)


def predicted(run: Run) -> dict[str, Any]:
    """What we predict of a run, and of what parts."""
    model, strategy = run.model, run.strategy
    seconds = simulate_strategy(model, strategy).seconds
    (microbatches, *_), cluster = model.microbatches(strategy), model.cluster
    unsummed = {
        name: dataclasses.replace(kind, reduced_bytes=0.0)
        for name, kind in model.table.kinds.items()
    }
    alone = StrategyProblem(dataclasses.replace(model.table, kinds=unsummed), cluster, run.batch)
    busy, passes = (
        max(
            microbatches
            * sum(
                sum(passes_of_copies(of, cluster, strategy, s, strategy.runs[s])[0])
                for s in strategy.stages_of(actor)
            )
            for actor in range(strategy.actors)
        )
        for of in (model, alone)
    )
    sync = max(sync_seconds(model, cluster, strategy, s) for s in range(strategy.stages))
    return {
        "run": run.name,
        "strategy": str(strategy),
        "published_s": run.seconds,
        "predicted_s": seconds,
        "ratio": seconds / run.seconds,
        "passes_s": passes,
        "tensor_sums_s": busy - passes,
        "gradients_s": sync * strategy.virtual,
        "published_bytes": run.num_bytes,
        "predicted_bytes": max(stored_bytes(model, strategy)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    rows = []
    parser.add_argument("--steps", metavar="FILE", help="a table of measured steps, as CSV")
    parser.add_argument("--predicted", metavar="FILE", help="write these steps as predicted")
    arguments = parser.parse_args()
    if arguments.steps is not None:
        steps = scored(MeasuredStep.read(arguments.steps))
        scores = score(steps)
        print("\n".join(map(score_text, scores)))
        save(arguments.json, scores)
        if arguments.predicted is not None:
            with open(arguments.predicted, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, [*steps[0]] if steps else [])
                writer.writeheader()
                writer.writerows(steps)
        return
    for run in RUNS:
        row = predicted(run)
        rows.append(row)
        print(
            "{run}: {predicted_s:.3g} s, published {published_s:.4g} s ({ratio:.2f}); passes "
            "{passes_s:.3g}, tensor sums {tensor_sums_s:.3g}, gradients {gradients_s:.3g}; "
            "{predicted_bytes:.4g} bytes".format_map(row)
        )
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
