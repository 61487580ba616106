"""Annealing beside exhaustive search and random search, on random clusters and models.

    python -m benchmarks.three_d_random [--seeds FIRST LAST] [--seconds S] [--iterations N]
                                        [--known FILE] [--json FILE]

Models are `mixed` of `tests/planning/inter_op/three_d/random_models.py`, of seeds that no test
uses. Random search draws as many strategies as annealing prices. All seconds of steps are
simulated; exhaustive search is complete where it ends in time, as no strategy that it leaves out
can be better. With `--known` annealing alone is run, beside what an earlier run says of the others.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from benchmarks.results import save
from tests.planning.inter_op.three_d.random_models import mixed
from tfpar.planning.inter_op.three_d.anneal import ITERATIONS, anneal
from tfpar.planning.inter_op.three_d.baselines import megatron, random_search
from tfpar.planning.inter_op.three_d.exhaustive import exhaustive
from tfpar.planning.inter_op.three_d.space import StrategySpace
from tfpar.spec import PlanError

SEEDS = (7000, 7049)
SECONDS = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs=2, default=SEEDS, help="the first and the last")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of exhaustive search")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="of annealing")
    parser.add_argument("--known", type=Path, help="rows of an earlier run")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    rows = []
    known = {row["seed"]: row for row in _rows(options.known)}
    for seed in range(options.seeds[0], options.seeds[1] + 1):
        if options.known is None:
            row = compared(seed, options.seconds, options.iterations)
        else:
            row = annealed(known.get(seed), options.iterations)
        if row is None:
            print(f"{seed}: no strategy", flush=True)
            continue
        rows.append(row)
        print(
            "{seed}: {points} points; exhaustive {exhaustive_s} s of {exhaustive_priced} in "
            "{exhaustive_cpu_s:.1f} CPU s, complete: {complete}; annealing {annealing_s} s in "
            "{annealing_cpu_s:.1f}; random {random_s} s".format_map(row),
            flush=True,
        )
    ended = [row for row in rows if row["complete"]]
    equal = sum(row["annealing_s"] <= row["exhaustive_s"] * (1 + 1e-9) for row in ended)
    ratios = [row["random_s"] / row["annealing_s"] for row in rows if row["random_s"] is not None]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(
        f"exhaustive search ended on {len(ended)} of {len(rows)}; annealing equals it on {equal}; "
        f"random search is {mean:.2f} times as slow as annealing (geometric mean)"
    )
    save(options.json, rows)


def compared(seed: int, seconds: float, iterations: int = ITERATIONS) -> dict[str, Any] | None:
    """A row; None if there is no strategy that fits."""
    model = mixed(seed)
    try:
        points = StrategySpace(model).num_points
        start = time.process_time()
        best = exhaustive(model, seconds=seconds, starts=megatron(model))
        exhaustive_cpu_s = time.process_time() - start
    except PlanError:
        return None
    try:
        drawn = random_search(model, seed=seed, trials=iterations).best.simulated_s
    except PlanError:
        drawn = None
    row = {
        "seed": seed,
        "points": points,
        "complete": best.complete,
        "exhaustive_s": best.best.simulated_s,
        "exhaustive_priced": best.evaluated,
        "exhaustive_cpu_s": exhaustive_cpu_s,
        "random_s": drawn,
        "strategy": str(best.best.strategy),
    }
    return annealed(row, iterations)


def annealed(row: dict[str, Any] | None, iterations: int = ITERATIONS) -> dict[str, Any] | None:
    """A row with what annealing finds; None if there is no strategy that fits."""
    if row is None:
        return None
    model, start = mixed(row["seed"]), time.process_time()
    found = anneal(model, seed=row["seed"], iterations=iterations, starts=megatron(model))
    taken = time.process_time() - start
    return {**row, "annealing_s": found.best.simulated_s, "annealing_cpu_s": taken}


def _rows(file: Path | None) -> list[dict[str, Any]]:
    return [] if file is None else json.loads(file.read_text())["rows"]


if __name__ == "__main__":
    main()
