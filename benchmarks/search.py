"""What planning takes: capture, search and layout of models that grow deeper or wider.

    python -m benchmarks.search [--quick] [--json FILE] [--case gpt-96]

Each case runs in a process of its own, on a mesh of 2 x 8 V100 with Ethernet between nodes (TAP
§V). CPU-seconds are those of the process after TensorFlow is imported; `from nothing` is
everything: building and compiling the model, tracing forward and backward, search, and laying out
all tensors. No weight is given memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

from benchmarks.results import save
from benchmarks.workers import Worker, serve

T5_LARGE = dict(vocabulary=32128, length=512, hidden=1024, heads=16, head_dim=64, inner=4096)
GPT_MEDIUM = dict(vocabulary=50257, length=512, hidden=1024, heads=16)
GPT_3 = dict(vocabulary=50257, length=2048, hidden=12288, heads=96)

CASES: dict[str, dict[str, Any]] = {
    **{
        f"t5-{2 * n}": {"model": "t5", "size": {**T5_LARGE, "num_layers": n}, "batch": 16}
        for n in (3, 6, 12, 24)
    },
    **{
        f"gpt-{n}": {"model": "gpt", "size": {**GPT_MEDIUM, "num_layers": n}, "batch": 8}
        for n in (12, 24, 48, 96)
    },
    "gpt3-175B": {"model": "gpt", "size": {**GPT_3, "num_layers": 96}, "batch": 16},
    **{
        f"resnet50-{name}": {"model": "resnet50", "size": {"classes": n}, "batch": 256}
        for name, n in (("1k", 1_000), ("10k", 10_000), ("100k", 100_000), ("1M", 1_000_000))
    },
}
QUICK = ("t5-6", "gpt-12", "gpt-24")


class Planning:
    """Plans one model in its own process and reports what that took."""

    def __init__(self, config: dict) -> None:
        self.config = config

    def handle(self, request: dict) -> dict:
        import tfpar as tap
        from benchmarks import models
        from tfpar.cluster.lookup import find_cluster
        from tfpar.compile import simplify_step
        from tfpar.planning.intra_op.tap.planner import TapPlanner
        from tfpar.planning.pricing.plan_propagation import propagate_plan
        from tfpar.planning.problems import state_problem
        from tfpar.planning.request import PlanRequest
        from tfpar.tf.capture.step import argument_specs
        from tfpar.tf.keras.adapter import parallel_model

        clock = _Clock()
        config, mesh = self.config, tap.split([2, 8])
        with tap.auto_parallel(mesh, cluster="v100-ethernet"):
            build = getattr(models, config["model"])
            model = models.compile_model(build(**config["size"]), "adamw")
        batch = models.batch_of(model, config["batch"])
        build_s = clock.lap()
        captured = parallel_model(model).capture_gradients(argument_specs((batch,)))
        simplify_step(captured)
        capture_s = clock.lap()
        request_ = PlanRequest(mesh, find_cluster("v100-ethernet", mesh))
        problem = state_problem(captured, request_, config["batch"], state_ratio=2.0)
        planner = TapPlanner()
        plan = planner.solve(problem)
        search_s = clock.lap()
        propagate_plan(plan, problem)
        layout_s = clock.lap()
        return {
            "parameters": sum(w.value.shape.num_elements() for w in model.trainable_weights),
            **vars(planner.statistics),
            "build_s": build_s,
            "capture_s": capture_s,
            "search_s": search_s,
            "layout_s": layout_s,
            "total_s": build_s + capture_s + search_s + layout_s,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "plan": f"{plan.mesh}, {plan.cost.seconds * 1e3:.1f} ms",
        }


class _Clock:
    def __init__(self) -> None:
        self.last = time.process_time()

    def lap(self) -> float:
        """CPU-seconds since the last lap."""
        now = time.process_time()
        self.last, passed = now, now - self.last
        return passed


COLUMNS = (
    ("case", "{}"),
    ("parameters", "{:,}"),
    ("ops", "{}"),
    ("nodes", "{}"),
    ("weighted_nodes", "{}"),
    ("subgraphs", "{}"),
    ("candidates", "{}"),
    ("valid", "{}"),
    ("build_s", "{:.1f}"),
    ("capture_s", "{:.1f}"),
    ("search_s", "{:.2f}"),
    ("layout_s", "{:.1f}"),
    ("total_s", "{:.1f}"),
    ("peak_mib", "{:.0f}"),
    ("plan", "{}"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(Planning(json.loads(arguments.worker)).handle)
        return
    print("| " + " | ".join(name for name, _ in COLUMNS) + " |", flush=True)
    print("| " + " | ".join("---" for _ in COLUMNS) + " |", flush=True)
    rows = []
    for case in arguments.case or (QUICK if arguments.quick else CASES):
        worker = Worker("benchmarks.search", CASES[case])
        try:
            row = {"case": case, **worker.ask({})}
        finally:
            worker.close()
        rows.append(row)
        print(
            "| " + " | ".join(form.format(row[name]) for name, form in COLUMNS) + " |", flush=True
        )
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
