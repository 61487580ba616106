"""Predicted against measured step times, after calibration.

    python -m benchmarks.prediction [--quick] [--json FILE] [--setting loopback] [--ranks 4]
    python -m benchmarks.prediction --offline

In each setting (ranks in one process, processes on the loopback, processes on nodes with shaped
links, which needs root) the machine is calibrated; then plans of two models are priced on the
calibrated cluster and run, taking turns. Told are, for each plan, the predicted and the median
measured seconds of a step, optimizer included; for each setting Spearman's rank correlation, how
far the searched plan is from the best measured, and by how much predicted ratios of plans that are
near each other are off (`planning.objective.UNCERTAINTY`), and how many times are within 15 %.
`--offline` runs nothing: it prices the plans of `benchmarks/results/prediction.json` anew, each on
the cluster that was calibrated before its steps were measured. `--json` replaces the settings that
are run in a file that holds others. `--memory` holds what a rank stores against what its resident
memory grows by.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.correlation import shown, spearman
from benchmarks.plans_to_predict import BATCHES, SEARCHED, SIZES, model_of, plans
from benchmarks.results import Result, commit, measure_machine, save
from benchmarks.shaped_cluster.namespaces import ClusterError, cluster, limit, obstacle
from benchmarks.workers import ROOT

MARK = "@prediction "
SETTINGS = ("in-process", "loopback", "shaped")
GOOD_RHO, GOOD_CHOICE = 0.95, 1.05
NEAR_ENOUGH = 0.15
"""By what part of the measured time a predicted one may be off."""
NEAR = 1.25


@dataclasses.dataclass(frozen=True)
class Config:
    """What one setting's ranks run.

    Attributes:
        ranks: of all nodes.
        nodes: of the shaped cluster, else 1.
        mbit: of a node's link, in Mbit/s; None: as it is.
        plans: only these; all if empty.
    """

    setting: str
    ranks: int
    nodes: int = 1
    mbit: float | None = None
    models: tuple[str, ...] = ("gpt", "wide")
    plans: tuple[str, ...] = ()
    budget_s: float = 60.0
    turns: int = 5
    turn_s: float = 0.5

    @property
    def name(self) -> str:
        link = f", {self.mbit:g} Mbit/s" if self.mbit else ""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.setting}, {self.ranks} ranks{nodes}{link}"


# --- the ranks -------------------------------------------------------------------------


class Training:
    """A model under one plan; the first step, which compiles it, is taken here."""

    def __init__(
        self,
        model: str,
        plan: str,
        config: Config,
        machines: Any,
        size: dict[str, int] | None = None,
        batch: int | None = None,
    ) -> None:
        import keras
        import tensorflow as tf

        import tfpar as tap
        from benchmarks import models
        from tfpar.cost.evaluation import evaluate
        from tfpar.ir.roles import Roles
        from tfpar.tf.keras.adapter import parallel_model

        keras.utils.set_random_seed(0)
        if plan == SEARCHED:
            shape = [config.nodes, config.ranks // config.nodes]
            context = tap.auto_parallel(tap.split(shape), cluster=machines)
        else:
            mesh, constraints = plans(model, config.ranks)[plan]
            context = tap.auto_parallel(tap.split(mesh), constraints, planner=None)
        with context:
            self.model = models.compile_model(model_of(model, size))
        x, y = models.batch_of(self.model, batch or BATCHES[model])
        self._batch = (tf.constant(x), tf.constant(y))
        self.model.train_on_batch(x, y)
        state = parallel_model(self.model)
        assert state is not None and state.plan is not None
        self._step = state.executables["train"]
        captured = self._step.captured
        gradients = [t for g in captured.gradients for t in g.tensors]
        partitioned = self._step.partitioned
        self.cost = evaluate(partitioned, machines, Roles.of(partitioned.graph, gradients))
        # Plans of one price that exchange the same are one program.
        program = repr((self.cost, sorted(partitioned.collectives())))
        self.program = hashlib.blake2b(program.encode(), digest_size=8).hexdigest()
        self.text = f"{state.plan.mesh}, batch over {' and '.join(state.plan.batch_axes) or 'none'}"

    def step(self) -> float:
        start = time.perf_counter()
        self._step((self._batch,))
        return time.perf_counter() - start


def measure(config: Config) -> list[dict[str, Any]]:
    """A row for each plan; on every rank."""
    import tfpar as tap
    from tfpar.tf.distributed.world import this_world

    world = this_world()
    if config.mbit and world is not None and world.job.local_rank == 0:
        limit(config.mbit)
    machines = tap.calibrate([config.nodes, config.ranks // config.nodes], budget_s=config.budget_s)
    rows: list[dict[str, Any]] = []
    for model in config.models:
        names = config.plans or (*plans(model, config.ranks), SEARCHED)
        trainings = [Training(model, name, config, machines) for name in names]
        times = take_turns(trainings, config, world)
        for name, training, taken in zip(names, trainings, times, strict=True):
            rows.append(
                {
                    "setting": config.name,
                    "model": model,
                    "plan": name,
                    "layout": training.text,
                    "predicted_s": training.cost.seconds,
                    "measured_s": statistics.median(taken),
                    "least_s": min(taken),
                    "program": training.program,
                    "steps": len(taken),
                    "cost": dataclasses.asdict(training.cost),
                }
            )
    rows[0]["cluster"] = _described(machines)
    return rows


def _described(machines: Any) -> dict[str, Any]:
    from tfpar.cluster.files import describe

    return describe(machines)


def take_turns(trainings: Sequence[Training], config: Config, world: Any) -> list[list[float]]:
    """Seconds of the steps of each."""
    times: list[list[float]] = [[] for _ in trainings]
    counts = []
    for training in trainings:
        pace = min(training.step() for _ in range(2))
        if world is not None:
            pace = world.first("counting steps", lambda pace=pace: pace)
        counts.append(max(2, min(50, int(config.turn_s / pace))))
    for _ in range(config.turns):
        for training, taken, count in zip(trainings, times, counts, strict=True):
            if world is not None:
                world.exchange.messages(None)
            training.step()  # what the one before has left in caches is gone
            taken += [training.step() for _ in range(count)]
    return times


def _rank(config: Config) -> None:
    rows = measure(config)
    from tfpar.tf.distributed.world import this_world

    world = this_world()
    if world is None or world.rank == 0:
        print(f"{MARK}{json.dumps(rows)}", flush=True)


# --- the run ---------------------------------------------------------------------------


def run(config: Config) -> list[dict[str, Any]]:
    """The rows of one setting.

    Raises:
        ClusterError: no shaped cluster can be made, or the ranks have failed.
    """
    worker = [sys.executable, "-m", "benchmarks.prediction", "--worker"]
    worker.append(json.dumps(dataclasses.asdict(config)))
    if config.setting == "shaped":
        from benchmarks.shaped_cluster.job import run_module

        with cluster(config.nodes) as hosts:
            each = config.ranks // config.nodes
            texts = run_module(hosts, each, worker[2:], 1800.0)
        return _rows(texts[0])
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    if config.setting == "loopback":
        worker = [sys.executable, "-m", "tfpar", "run", "-np", str(config.ranks), *worker]
    done = subprocess.run(
        worker, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=1800
    )
    if done.returncode:
        raise ClusterError(f"{config.name} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return _rows(done.stdout)


def _rows(text: str) -> list[dict[str, Any]]:
    line = next((line for line in text.splitlines() if MARK in line), None)
    if line is None:
        raise ClusterError(f"No result:\n{text[-3000:]}")
    return json.loads(line.partition(MARK)[2])


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table of one setting and what it comes to."""
    from tfpar.observability.report.tables import render_table

    cells = [
        (
            row["model"],
            row["plan"],
            row["layout"],
            f"{1e3 * row['predicted_s']:.1f}",
            f"{1e3 * row['measured_s']:.1f}",
            f"{row['predicted_s'] / row['measured_s']:.2f}",
            f"{1e3 * sum(row['cost']['compute_s']):.1f}",
            f"{1e3 * (sum(row['cost']['communication_s']) + row['cost']['exposed_s']):.1f}",
        )
        for row in rows
    ]
    columns = ("model", "plan", "layout", "plan ms", "ms", "ratio", "compute", "collectives")
    text = [render_table(rows[0]["setting"], columns, cells, numeric=(3, 4, 5, 6, 7))]
    said = summary(rows)
    rho = shown(said["rho"])
    text.append(f"  Spearman's rho over {len(rows)} plans: {rho} (wanted {GOOD_RHO})")
    text.append(
        f"  within {NEAR_ENOUGH:.0%} of what was measured: {said['within']:.0%} of the plans"
    )
    for model, rho in said["rho_of"].items():
        line = f"  {model}: rho {shown(rho)}"
        if model in said["choice_of"]:
            slower = said["choice_of"][model]
            line += f", searched / best measured {slower:.3f} (wanted {GOOD_CHOICE})"
        text.append(line)
    errors = ratio_errors(rows)
    if errors:
        text.append(
            f"  Ratios of plans predicted within {NEAR - 1:.0%} of each other: off by "
            f"{statistics.median(errors):.1%} in the middle of {len(errors)} pairs"
        )
    return "\n".join(text)


def ratio_errors(rows: Sequence[dict[str, Any]]) -> list[float]:
    """By what part the predicted ratio of two steps is off, for each pair of programs of a model
    that are predicted to be near (`NEAR`): what a planner has to tell apart."""
    found = []
    for one, other in itertools.combinations(rows, 2):
        predicted = one["predicted_s"] / other["predicted_s"]
        alike = one["model"] == other["model"] and one["program"] != other["program"]
        if alike and 1 / NEAR <= predicted <= NEAR:
            off = predicted * other["measured_s"] / one["measured_s"]
            found.append(max(off, 1 / off) - 1)
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the plans of one setting come to.

    Its `rho` over all plans and `rho_of` each model; `choice_of` each, how much slower than the
    best one measured the searched plan is; `within`, what part of the plans is predicted to take
    what it took, but for `NEAR_ENOUGH`.
    """
    rho_of, choice_of = {}, {}
    for model in dict.fromkeys(r["model"] for r in rows):
        own = [r for r in rows if r["model"] == model]
        rho_of[model] = _rho(own)
        programs = {r["program"] for r in own if r["plan"] == SEARCHED}
        if programs:
            chosen = min(r["measured_s"] for r in own if r["program"] in programs)
            choice_of[model] = chosen / min(r["measured_s"] for r in own)
    return {
        "setting": rows[0]["setting"],
        "count": len(rows),
        "rho": _rho(rows),
        "rho_of": rho_of,
        "choice_of": choice_of,
        "within": sum(_is_near(row) for row in rows) / len(rows),
    }


def _is_near(row: dict[str, Any]) -> bool:
    return abs(row["predicted_s"] / row["measured_s"] - 1) <= NEAR_ENOUGH


def _rho(rows: Sequence[dict[str, Any]]) -> float | None:
    return spearman([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows])


def memory(ranks: int, rows: Sequence[dict[str, Any]]) -> str:
    """The table of predicted and measured memory of a rank."""
    from tfpar.observability.report.tables import render_table

    cells = [
        (
            row["model"],
            row["plan"],
            f"{row['predicted'] / 1e6:.0f}",
            f"{row['measured'] / 1e6:.0f}",
            f"{row['predicted'] / row['measured']:.2f}",
            *(f"{n / 1e6:.0f}" for n in row["parts"].values()),
        )
        for row in rows
    ]
    columns = ("model", "plan", "plan MB", "MB", "ratio", "weights", "state", "activations")
    return render_table(f"Memory of each of {ranks} ranks", columns, cells, numeric=range(2, 8))


def settings(options: argparse.Namespace) -> list[Config]:
    if options.quick:
        return [Config("in-process", 2, models=("wide",), budget_s=15.0, turns=3, turn_s=0.3)]
    found = []
    for setting in options.setting or SETTINGS:
        for ranks in options.ranks or (2, 4):
            nodes, mbit = (2, options.mbit) if setting == "shaped" else (1, None)
            models = tuple(options.model or SIZES)
            found.append(Config(setting, ranks, nodes, mbit, models, budget_s=options.budget))
    return found


def _others(path: str | None, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of settings in a file that have not been measured now."""
    if path is None or not pathlib.Path(path).exists():
        return []
    now = {row["setting"] for row in rows}
    known = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["rows"]
    return [row for row in known if row["setting"] not in now]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes: one setting")
    parser.add_argument("--setting", choices=SETTINGS, action="append", help="default: all")
    parser.add_argument("--ranks", type=int, action="append", help="default: 2 and 4")
    parser.add_argument("--model", choices=tuple(SIZES), action="append", help="default: both")
    parser.add_argument("--mbit", type=float, default=500.0, help="of shaped links")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each calibration")
    parser.add_argument("--offline", action="store_true", help="price what was measured before")
    parser.add_argument("--memory", action="store_true", help="memory only")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        fields = json.loads(options.worker)
        for name in ("models", "plans"):
            fields[name] = tuple(fields[name])
        _rank(Config(**fields))
        return 0
    if options.offline:
        from benchmarks.repriced import repriced

        for row in Result.load("prediction").rows:
            if "plans" in row:
                print(report(repriced(row["plans"])), flush=True)
        return 0
    rows: list[dict[str, Any]] = []
    if options.memory:
        from benchmarks.growth import compare

        for ranks in options.ranks or (2,):
            found = compare(ranks)
            print(memory(ranks, found), flush=True)
            rows += [{"ranks": ranks, **row} for row in found]
            save(options.json, rows)
        return 0
    for config in settings(options):
        why = obstacle() if config.setting == "shaped" else None
        if why is not None:
            print(f"{config.name}: left out. {why}")
            continue
        found = run(config)
        print(report(found), flush=True)
        today = {"date": datetime.date.today().isoformat(), "commit": commit()}
        if options.json:
            today["machine"] = measure_machine()
        rows.append({**summary(found), **today, "plans": found})
        save(options.json, [*_others(options.json, rows), *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
