"""Planners side by side on the models and clusters of Rhino's evaluation (§7).

    python -m benchmarks.planners [--quick] [--case dnabert] [--devices 8] [--cluster rhino-s1]
                                  [--planner tap] [--json FILE]
    python -m benchmarks.planners --depth
    python -m benchmarks.planners --critical
    python -m benchmarks.planners --stages

Each case is captured once for each number of devices, in a process of its own, and planned there by
every planner; no weight is given memory. Steps and memory are what the plan's cost predicts; plans
hold what a planner alone finds, without blocks that are computed again. Search takes CPU-seconds
and, after the stroke, seconds. `--depth` plans GPTs that grow deeper for 2 devices (Fig. 10),
`--critical` the models whose critical nodes Table 5 counts, and ALBERT and RoBERTa (§2.4).

`--stages` plans the models of Tables 1 and 2 with pipelines in the space too (`rhino-3-stages`), as
`pipeline="auto"` does, beside both levels without them (`-whole`): with the batches of SPMD alone
and with those of full parallelism, which are 16 and 32 times as large. These plans are what
`tap.plan` gives, so collectives of neighbouring ops overlap and blocks may be computed again.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.planned_in_stages import Searches
from benchmarks.results import save
from benchmarks.workers import Worker, serve

if TYPE_CHECKING:
    import tfpar as tap
    from tfpar.planning.problem import Planner
    from tfpar.planning.request import PlanRequest
    from tfpar.plans import Plan

PLANNERS = ("tap", "rhino-2", "rhino-3")
PLANNERS_OF_STAGES: dict[str, Callable[[Searches, PlanRequest], Plan]] = {
    "rhino-2-whole": lambda searches, asked: searches.whole(asked, 2),
    "rhino-3-whole": lambda searches, asked: searches.whole(asked, 3),
    "rhino-3-stages": lambda searches, asked: searches.in_stages(asked, 3),
}
CLUSTERS = {"rhino-m8": 8, "rhino-s1": 1}
"""The devices of a node, by preset."""
STATE = 2.0
"""Bytes of Adam's slots by byte of weight."""
REPORTED = ("instructions", "critical_nodes", "subgraphs", "cones", "nodes")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of `benchmarks.models.FULL`, or one of its builders and what it is given.

    Attributes:
        devices: how many to plan for, in turn.
        batch: of all devices, or `per_device` of each.
    """

    model: str
    devices: tuple[int, ...] = (2, 4, 8, 16)
    batch: int = 0
    per_device: int = 0
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    def config(self, devices: int) -> dict[str, Any]:
        """What a worker needs to capture it."""
        batch = self.batch or self.per_device * devices
        return {"model": self.model, "sizes": self.sizes, "batch": batch}


CASES = {
    # Table 1, SPMD only; GPT-Medium also for its strong scaling.
    "gpt_medium": Case("gpt_medium", (1, 2, 4, 8, 16), batch=4),
    "gpt_large": Case("gpt_large", (2,), batch=4),
    "gpt_xl": Case("gpt_xl", (4,), batch=4),
    "gpt_2b7": Case("gpt_2b7", (8,), batch=4),
    "gpt_6b7": Case("gpt_6b7", (16,), batch=4),
    # Table 2, SPMD only.
    "moe_8e_380m": Case("moe_8e_380m", (1,), batch=8),
    "moe_8e_760m": Case("moe_8e_760m", (2,), batch=8),
    "moe_16e_1b3": Case("moe_16e_1b3", (4,), batch=8),
    "moe_16e_2b4": Case("moe_16e_2b4", (8,), batch=8),
    "moe_32e_10b": Case("moe_32e_10b", (16,), batch=8),
    # Tables 3 and 4.
    "vgg19_1m": Case("vgg19_1m", per_device=128),
    "dnabert": Case("dnabert", per_device=32),
    "unet": Case("unet", per_device=16),
    "wide_resnet_1b": Case("wide_resnet_1b", (1,), batch=4),
    "wide_resnet_2b6": Case("wide_resnet_2b6", (2,), batch=4),
    "wide_resnet_6b": Case("wide_resnet_6b", (4,), batch=4),
    "wide_resnet_12b": Case("wide_resnet_12b", (8, 16), batch=4),
    # Not Rhino's; the batches of its other models of their kind.
    "t5_large": Case("t5_large", per_device=4),
    "bert_large": Case("bert_large", per_device=8),
    "resnet50": Case("resnet50", per_device=32),
}
QUICK = {name: dataclasses.replace(CASES[name], devices=(2,)) for name in ("dnabert", "unet")}
OF_FULL_PARALLELISM = {"gpt": 64, "moe": 256}
"""Batches of Tables 1 and 2 where pipelines may be used, by family."""
TABLES = ("gpt_large", "moe_8e_760m", "gpt_xl", "moe_16e_1b3", "gpt_2b7", "moe_16e_2b4", "gpt_6b7")
TABLES = (*TABLES, "moe_32e_10b")
STAGES = {name: CASES[name] for name in TABLES} | {
    f"{name}_full": dataclasses.replace(CASES[name], batch=OF_FULL_PARALLELISM[name[:3]])
    for name in TABLES
}
DEPTH = {
    f"gpt-{n}": Case(
        "gpt",
        (2,),
        per_device=4,
        sizes=dict(vocabulary=50_257, length=1024, hidden=512, heads=8, num_layers=n),
    )
    for n in (12, 24, 36, 72)
}

CRITICAL = {
    "gpt-72": DEPTH["gpt-72"],
    "moe_32e_10b": dataclasses.replace(CASES["moe_32e_10b"], devices=(16,)),
    # Rhino says neither sizes nor batches of these (§2.4).
    "albert_xxlarge": Case("albert_xxlarge", (8,), per_device=4),
    "roberta_large": Case("roberta_large", (8,), per_device=8),
}


# --- in a worker --------------------------------------------------------------------


class Planning:
    """Captures one model and plans it as it is asked to."""

    def __init__(self, config: dict) -> None:
        import tfpar as tap
        from benchmarks import models
        from tfpar.compile import simplify_step
        from tfpar.tf.capture.step import argument_specs
        from tfpar.tf.keras.adapter import parallel_model

        self.batch = config["batch"]
        build = models.FULL.get(config["model"]) or getattr(models, config["model"])
        with tap.auto_parallel([1], planner=None):
            model = models.compile_model(build(**config["sizes"]))
        specs = argument_specs((models.batch_of(model, self.batch),))
        self.captured = parallel_model(model).capture_gradients(specs)
        simplify_step(self.captured)
        self.searches = Searches(self.captured, self.batch, STATE)
        self.parameters = sum(w.value.shape.num_elements() for w in model.trainable_weights)

    def handle(self, request: dict) -> dict:
        from tfpar.planning.problems import state_problem
        from tfpar.spec import MemoryLimitError, PlanError

        asked, name = self._request(request["cluster"], request["devices"]), request["planner"]
        planner = None if name in PLANNERS_OF_STAGES else _planner(name)
        limit = asked.cluster.device.memory_bytes
        row: dict[str, Any] = {"parameters": self.parameters, "limit_gib": limit / 2**30}
        row["batch"] = self.batch
        seconds, cpu_seconds = time.perf_counter(), time.process_time()
        try:
            if planner is not None:
                problem = state_problem(self.captured, asked, self.batch, state_ratio=STATE)
                plan = planner.solve(problem)
            else:
                plan = PLANNERS_OF_STAGES[name](self.searches, asked)
        except MemoryLimitError as error:
            row["refused"] = f"does not fit: needs {error.needed_bytes / 2**30:.0f} GiB"
        except PlanError as error:
            row["refused"] = str(error)
        else:
            needed = plan.cost.memory_bytes
            row |= {"ms": plan.cost.seconds * 1e3, "gib": needed / 2**30, "plan": _in_words(plan)}
            if plan.findings.rivals:
                row["rivals"] = {
                    r.name: r.reason if r.cost is None else f"{r.cost.seconds * 1e3:.1f} ms"
                    for r in plan.findings.rivals
                }
            if needed > limit:
                row["refused"] = f"does not fit: needs {needed / 2**30:.0f} GiB"
        row["search_s"] = time.perf_counter() - seconds
        row["search_cpu_s"] = time.process_time() - cpu_seconds
        return row if planner is None else row | {"counts": _counts(planner)}

    def _request(self, cluster: str, devices: int) -> PlanRequest:
        from tfpar.cluster.lookup import find_cluster
        from tfpar.planning.request import PlanRequest

        mesh = _mesh(cluster, devices)
        return PlanRequest(mesh, find_cluster(cluster, mesh))


def _mesh(cluster: str, devices: int) -> tap.Mesh:
    """The nodes and the devices of each."""
    import tfpar as tap

    each = CLUSTERS[cluster]
    if devices <= each:
        return tap.Mesh.of([devices])
    return tap.Mesh.of([devices // each, each])


def _planner(name: str) -> Planner:
    from tfpar.planning.intra_op.planners import find_planner

    if name.startswith("rhino-"):
        from tfpar.planning.intra_op.rhino import RhinoPlanner

        return RhinoPlanner(level=int(name.removeprefix("rhino-")))
    return find_planner(name)


def _counts(planner: Any) -> dict[str, int]:
    """What a planner says of its last search."""
    if hasattr(planner, "statistics"):
        return dataclasses.asdict(planner.statistics)
    report = dataclasses.asdict(planner.report)
    return {name: report[name] for name in REPORTED}


def _in_words(plan: Plan) -> str:
    """Stages and mesh, what splits the batch, and how many weights are split in which way."""
    from tfpar.planning.candidates import name_of_plan
    from tfpar.spec import Shard, format_spec

    split = collections.Counter(
        format_spec(v.spec)
        for v in plan.variables.values()
        if v.trainable and v.spec and any(isinstance(p, Shard) for p in v.spec)
    )
    weights = sum(v.trainable for v in plan.variables.values())
    ways = ", ".join(f"{count} {spec}" for spec, count in split.most_common()) or "none"
    batch = " and ".join(plan.batch_axes) or "no axis"
    return f"{name_of_plan(plan)}, batch over {batch}; split of {weights}: {ways}"


# --- tables -------------------------------------------------------------------------


def rows(
    cases: dict[str, Case], planners: Collection[str], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One for each case, number of devices, cluster and planner."""
    for name, case in cases.items():
        for devices in arguments.devices or case.devices:
            config, worker = case.config(devices), None
            try:
                for cluster in arguments.cluster or CLUSTERS:
                    for planner in arguments.planner or planners:
                        asked = {"cluster": cluster, "devices": devices, "planner": planner}
                        worker = worker or Worker("benchmarks.planners", config, arguments.timeout)
                        try:
                            answer = worker.ask(asked)
                        except RuntimeError as error:  # it was closed: the next needs another
                            answer, worker = {"refused": str(error)}, None
                        yield {"case": name, **asked, **answer}
            finally:
                if worker:
                    worker.close()


def cells(row: dict[str, Any], counted: bool) -> dict[str, str]:
    """The columns of a row, by their names."""
    found = {name: str(row[name]) for name in ("case", "cluster", "devices", "planner")}
    if "ms" in row:
        found |= {"step, ms": f"{row['ms']:.1f}", "memory, GiB": f"{row['gib']:.1f}"}
    if "search_s" in row:
        found["search, s"] = f"{row['search_cpu_s']:.1f} / {row['search_s']:.1f}"
    if counted:
        counts = row.get("counts", {})
        found["counts"] = ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in counts.items())
    found["plan"] = "; ".join(row[name] for name in ("refused", "plan") if name in row)
    return found


COLUMNS = (
    "case",
    "cluster",
    "devices",
    "planner",
    "step, ms",
    "memory, GiB",
    "search, s",
    "plan",
)
COLUMNS_OF_COUNTS = ("case", "planner", "search, s", "step, ms", "counts", "plan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK)}, 2 devices")
    parser.add_argument("--depth", action="store_true", help="GPTs that grow deeper, 2 devices")
    parser.add_argument("--critical", action="store_true", help="critical nodes, Table 5")
    parser.add_argument("--stages", action="store_true", help="Tables 1 and 2, also in stages")
    known_cases = CASES | DEPTH | CRITICAL | STAGES
    parser.add_argument("--case", action="append", choices=known_cases, help="only this one")
    parser.add_argument("--devices", action="append", type=int, help="only so many")
    parser.add_argument("--cluster", action="append", choices=CLUSTERS, help="only this one")
    names = [*PLANNERS, *PLANNERS_OF_STAGES]
    parser.add_argument("--planner", action="append", choices=names, help="only this one")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one plan")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(Planning(json.loads(arguments.worker)).handle)
        return
    known = DEPTH if arguments.depth else QUICK if arguments.quick else CASES
    planners: Collection[str] = PLANNERS
    if arguments.stages:
        known, planners = STAGES, PLANNERS_OF_STAGES
    if arguments.critical:
        known = CRITICAL
    counted = arguments.depth or arguments.critical
    if counted:
        arguments.cluster = arguments.cluster or ["rhino-m8"]
    cases = {name: (known_cases | known)[name] for name in arguments.case or known}
    columns = COLUMNS_OF_COUNTS if counted else COLUMNS
    print("| " + " | ".join(columns) + " |", flush=True)
    print("| " + " | ".join("---" for _ in columns) + " |", flush=True)
    made = []
    for row in rows(cases, planners, arguments):
        made.append(row)
        shown = cells(row, counted)
        print("| " + " | ".join(shown.get(name, "") for name in columns) + " |", flush=True)
        save(arguments.json, made)


if __name__ == "__main__":
    main()
