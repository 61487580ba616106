"""Strategies of stages x data x tensor: what we predict, and what was measured or is found.

    python -m benchmarks.three_d [--json FILE]
    python -m benchmarks.three_d --large [SETUP ...] [--json OUT]
    python -m benchmarks.three_d --scale [--json OUT] | --plot FILE.svg
    python -m benchmarks.three_d --trials FILE [--json OUT]

Without arguments the set-ups of auto3d (§5) are searched, with layer times from the devices'
descriptions (`benchmarks.gpt_layers`): by Megatron's heuristic, at random, as Alpa does, and by our
search; all seconds are simulated.

`--large` plans GPT-3 175B on 1,024 A100 and a mixture of experts with 1.16 T parameters on 2,048
H100, alike and mixed (`benchmarks.large_models`), each twice in processes of their own.

`--scale` measures how long searches take over devices and layers (`benchmarks.three_d_scale`).
`--plot` draws what was last written down of that (needs matplotlib).

`--trials` predicts each trial of a file that others measured (`benchmarks.trials`), by the formulas
(eq. 1-4 of auto3d) and by simulation, and compares the orders: Spearman's rho, and how much longer
than the best the strategy took that we would choose. Trials are run as they were: with their own
layers in each stage.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import three_d_scale
from benchmarks.alpa_simulation import simulate_alpa
from benchmarks.correlation import spearman
from benchmarks.gpt_layers import MICROBATCHES, gpt_table
from benchmarks.large_models import SETUPS as LARGE
from benchmarks.large_models import apart
from benchmarks.results import Result, save
from benchmarks.trials import Setting, Trial, read_trials
from tfpar.cluster.lookup import read_preset
from tfpar.planning.inter_op.three_d.alpa import AlpaPlan
from tfpar.planning.inter_op.three_d.anneal import anneal
from tfpar.planning.inter_op.three_d.baselines import alpa, megatron, random_search
from tfpar.planning.inter_op.three_d.cost_model import analytic_seconds, simulate_strategy
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.searches import find
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.spec import TfparError

SETUPS = {
    "homogeneous": ("auto3d-homogeneous", MICROBATCHES),
    "heterogeneous": ("auto3d-heterogeneous", MICROBATCHES),
    "heterogeneous, microbatch 1": ("auto3d-heterogeneous", (1,)),
    "aws-p3-g4dn": ("aws-p3-g4dn", MICROBATCHES),
    "aws-p3-g4dn, microbatch 1": ("aws-p3-g4dn", (1,)),
}
"""Cluster and microbatch sizes."""
BATCH = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", metavar="FILE", help="measured trials")
    parser.add_argument(
        "--large", nargs="*", metavar="SETUP", choices=[*LARGE], help="plan large models"
    )
    parser.add_argument("--scale", action="store_true", help="searches over devices and layers")
    parser.add_argument("--plot", metavar="FILE", help="draw what --scale found, and stop")
    parser.add_argument("--json", metavar="OUT", help="write the rows")
    arguments = parser.parse_args()
    if arguments.plot:
        three_d_scale.plot(Result.load("three_d_scale").rows, arguments.plot)
        return 0
    if arguments.scale:
        rows = []
        for devices, layers in itertools.product(three_d_scale.DEVICES, three_d_scale.LAYERS):
            rows.append(three_d_scale.measured(devices, layers))
            print(
                "{devices} devices, {layers} layers: {search_cpu_s:.1f} CPU s for {evaluated} "
                "strategies, {strategy}".format_map(rows[-1]),
                flush=True,
            )
        save(arguments.json, rows)
        return 0
    if arguments.large is not None:
        rows = []
        for name in arguments.large or LARGE:
            rows.append(apart(name))
            print(
                "{setup}: {seconds:.3f} s, MFU {mfu:.3f}, bubble {bubble:.3f}, {strategy}; "
                "found in {search_s:.0f} s, the same again: {same_again}".format_map(rows[-1]),
                flush=True,
            )
        save(arguments.json, rows)
        return 0
    if arguments.trials is None:
        rows = [row for name in SETUPS for row in searched(name)]
        for row in rows:
            print("{setup}: {system}: {seconds:.3f} s, {strategy}".format_map(row))
        save(arguments.json, rows)
        return 0
    try:
        rows = [compare(setting) for setting in read_trials(arguments.trials)]
    except TfparError as error:
        print(error, file=sys.stderr)
        return 2
    for row in rows:
        print(
            "{setting}: {trials} trials, rho {rho}, by the formulas alone {rho_formulas}; "
            "first choice {first_choice}: {measured_over_best} of the best".format_map(
                {name: _shown(value) for name, value in row.items()}
            )
        )
    save(arguments.json, rows)
    return 0


def searched(setup: str) -> list[dict[str, Any]]:
    """A row for each way to choose a strategy: what it takes, and how long the choice took."""
    preset, microbatches = SETUPS[setup]
    cluster = read_preset(preset)
    model = StrategyProblem(gpt_table(cluster, microbatches), cluster, BATCH)
    ways: dict[str, Callable[[], Strategy3D | AlpaPlan]] = {
        "Megatron's heuristic": lambda: min(
            megatron(model), key=lambda strategy: simulate_strategy(model, strategy).seconds
        ),
        "random, 50 trials": lambda: random_search(model).best.strategy,
        "Alpa's two levels": lambda: alpa(model),
        "annealing": lambda: anneal(model, starts=megatron(model)).best.strategy,
        "search": lambda: find(model).best.strategy,
    }
    rows: list[dict[str, Any]] = []
    for system, choose in ways.items():
        start = time.process_time()
        found = choose()
        search_s = time.process_time() - start
        if isinstance(found, AlpaPlan):
            seconds = simulate_alpa(model, found).seconds
            ranks = list(range(sum(stage.size for stage in found.stages)))
        else:
            seconds, ranks = simulate_strategy(model, found).seconds, list(found.ranks)
        rows.append(
            {
                "setup": setup,
                "system": system,
                "seconds": seconds,
                "speedup": (rows[0]["seconds"] if rows else seconds) / seconds,
                "strategy": str(found),
                "ranks": ranks,
                "search_cpu_s": search_s,
            }
        )
    return rows


def compare(setting: Setting) -> dict[str, Any]:
    """A row: how well the order of a setting's trials is predicted."""
    measured = [trial.measured_s for trial in setting.trials]
    quick = [analytic_seconds(setting.model, trial.strategy) for trial in setting.trials]
    events = [simulate_strategy(setting.model, trial.strategy).seconds for trial in setting.trials]
    row: dict[str, Any] = {
        "setting": setting.name,
        "trials": len(measured),
        "rho": spearman(events, measured),
        "rho_formulas": spearman(quick, measured),
    }
    if not measured:
        return row | {"first_choice": None, "measured_over_best": None, "predictions": []}
    first = min(range(len(events)), key=events.__getitem__)
    predictions = [
        _in_row(trial) | {"measured_s": trial.measured_s, "simulated_s": s, "formulas_s": q}
        for trial, s, q in zip(setting.trials, events, quick, strict=True)
    ]
    return row | {
        "first_choice": _in_row(setting.trials[first]),
        "measured_over_best": measured[first] / min(measured),
        "predictions": predictions,
    }


def _in_row(trial: Trial) -> dict[str, Any]:
    strategy = trial.strategy
    return {
        "tensor": strategy.tensor,
        "data": strategy.data,
        "pipeline": strategy.actors,
        "microbatch": strategy.microbatch,
        "cuts": [0, *(run.stop for run in strategy.runs)],
    }


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, dict):
        return " ".join(f"{name} {entry}" for name, entry in value.items() if name != "cuts")
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
