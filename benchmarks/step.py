"""Step time: plain Keras, tfpar in-process, MirroredStrategy, side by side in one run.

    python -m benchmarks.step [--quick] [--json FILE] [--model gpt] [--first-step | --processes ...]

Contenders take turns; figures are medians over the turns, CPU time is that of the whole
process, and what to read are the ratios to plain Keras. `--first-step` measures
a 24-layer GPT (hidden 1024) from `fit` to the end of its first step instead; `--processes`
one rank a process, beside data parallelism and Megatron's layout as one writes them by hand;
`--xla` compares steps that XLA compiles, under plain Keras and on ranks in one process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

from benchmarks.by_hand.launch import KINDS, Ranks
from benchmarks.results import save
from benchmarks.workers import Worker, endless, serve

CONTENDERS = [
    {"system": "keras", "ranks": 1, "layout": "-"},
    {"system": "tfpar", "ranks": 1, "layout": "data"},
    {"system": "tfpar", "ranks": 2, "layout": "data"},
    {"system": "tfpar", "ranks": 4, "layout": "data"},
    {"system": "tfpar", "ranks": 2, "layout": "model"},
    {"system": "tfpar", "ranks": 4, "layout": "model"},
    {"system": "tfpar", "ranks": 2, "layout": "searched"},
    {"system": "tfpar", "ranks": 4, "layout": "searched"},
    {"system": "mirrored", "ranks": 2, "layout": "data"},
    {"system": "mirrored", "ranks": 4, "layout": "data"},
]

XLA = [
    {**contender, "xla": True}
    for contender in CONTENDERS
    if contender["system"] != "mirrored" and contender["ranks"] <= 2
]

PROCESSES = [
    {"system": "keras", "ranks": 1, "layout": "-"},
    *(
        {"system": system, "ranks": 2, "layout": layout}
        for system, layout in (
            ("horovod", "data"),
            ("mwms", "data"),
            ("megatron", "model"),
            ("tfpar-data", "data"),
            ("tfpar-model", "model"),
            ("tfpar-searched", "searched"),
        )
    ),
]
"""One rank a process: what is written by hand, and tfpar over Horovod."""


# --- a contender's process ---------------------------------------------------------


class Contender:
    """Builds one model under one system and runs steps when asked."""

    def __init__(self, config: dict) -> None:
        import keras
        import tensorflow as tf

        self.config = config
        ranks = config["ranks"]
        if config["system"] == "mirrored":
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * ranks
            )
        keras.utils.set_random_seed(0)
        x, y = self._data()
        self.model = self._model()
        self.dataset = endless((x, y))

    def _data(self):
        from benchmarks import models

        return models.wide_batch() if self.config["model"] == "wide" else models.gpt_batch()

    def _build(self):
        from benchmarks import models

        build = models.wide if self.config["model"] == "wide" else models.gpt
        model = models.compile_model(build(**self.config.get("size", {})))
        model.jit_compile = self.config.get("xla", False)
        return model

    def _model(self):
        import tensorflow as tf

        ranks = self.config["ranks"]
        if self.config["system"] == "keras":
            return self._build()
        if self.config["system"] == "mirrored":
            devices = [f"CPU:{i}" for i in range(ranks)]
            with tf.distribute.MirroredStrategy(devices).scope():
                return self._build()
        import tfpar as tap
        from benchmarks import models

        if self.config["layout"] == "searched":
            context = tap.auto_parallel(tap.split([ranks]))
        elif self.config["layout"] == "model":
            constraints = models.layout(self.config["model"])
            context = tap.auto_parallel(tap.split([1, ranks]), constraints, planner=None)
        elif self.config["layout"] == "pipeline":
            pipeline = tap.Pipeline(stages=ranks, microbatches=8)
            context = tap.auto_parallel(tap.split([ranks]), pipeline=pipeline, planner=None)
        else:
            context = tap.auto_parallel(tap.split([ranks, 1]), planner=None)
        with context:
            return self._build()

    def handle(self, request: dict) -> dict:
        steps = request["steps"]
        cpu, wall = time.process_time(), time.perf_counter()
        self.model.fit(self.dataset, steps_per_epoch=steps, epochs=1, verbose=0)
        return {
            "cpu_s": (time.process_time() - cpu) / steps,
            "wall_s": (time.perf_counter() - wall) / steps,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def _start(config: dict) -> Worker | Ranks:
    if config["system"] in KINDS:
        return Ranks(config["system"], config["model"], config["ranks"])
    return Worker("benchmarks.step", config)


# --- the run ---------------------------------------------------------------------------


def measure(model: str, turns: int, steps: int, contenders=None, size=None) -> list[dict]:
    """One row per contender of `model`."""
    workers = []
    rows = []
    try:
        for contender in contenders or CONTENDERS:
            config = {**contender, "model": model, **({"size": size} if size else {})}
            worker = _start(config)
            workers.append(worker)
            first = worker.ask({"steps": 1})
            rows.append(
                {
                    **contender,
                    "model": model,
                    "first_step_s": first["wall_s"],
                    "first_step_cpu_s": first["cpu_s"],
                    "turns": [],
                }
            )
        for _ in range(turns):
            for worker, row in zip(workers, rows, strict=True):
                row["turns"].append(worker.ask({"steps": steps}))
    finally:
        for worker in workers:
            worker.close()
    for row in rows:
        measured = row.pop("turns")
        for key in ("cpu_s", "wall_s", "peak_mib"):
            row[key] = statistics.median(m[key] for m in measured) if measured else None
    for row in rows:
        for key in ("cpu", "wall"):
            if row[f"{key}_s"]:
                row[f"{key}_ratio"] = row[f"{key}_s"] / rows[0][f"{key}_s"]
        row["first_step_ratio"] = row["first_step_s"] / rows[0]["first_step_s"]
        row["first_step_cpu_ratio"] = row["first_step_cpu_s"] / rows[0]["first_step_cpu_s"]
    return rows


def first_step(num_layers: int, hidden: int) -> list[dict]:
    """From `fit` to the end of the first step, each contender alone on the machine."""
    rows = []
    contenders = [
        {"system": "keras", "ranks": 1, "layout": "-"},
        {"system": "tfpar", "ranks": 4, "layout": "model"},
        {"system": "tfpar", "ranks": 2, "layout": "searched"},
        {"system": "tfpar", "ranks": 4, "layout": "searched"},
    ]
    for contender in contenders:
        size = {"num_layers": num_layers, "hidden": hidden, "heads": 16}
        rows += measure("gpt", 0, 1, [contender], size)
    for row in rows:
        row["first_step_ratio"] = row["first_step_s"] / rows[0]["first_step_s"]
        row["first_step_cpu_ratio"] = row["first_step_cpu_s"] / rows[0]["first_step_cpu_s"]
        row["model"] = f"gpt-{num_layers}x{hidden}"
    return rows


COLUMNS = [
    ("CPU s", "cpu_s", ".3f"),
    ("CPU ratio", "cpu_ratio", ".2f"),
    ("wall s", "wall_s", ".3f"),
    ("wall ratio", "wall_ratio", ".2f"),
    ("first step s", "first_step_s", ".1f"),
    ("first step ratio", "first_step_ratio", ".2f"),
    ("peak MiB", "peak_mib", ".0f"),
]


def show(rows: list[dict]) -> None:
    """A Markdown table."""
    heads = ["model", "system", "ranks", "layout", *(head for head, _, _ in COLUMNS)]
    print("| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|")
    for row in rows:
        cells = [str(row[key]) for key in ("model", "system", "ranks", "layout")]
        for _, key, form in COLUMNS:
            cells.append("-" if row.get(key) is None else format(row[key], form))
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: few contenders, few steps"
    )
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--model", choices=("gpt", "wide"), action="append")
    parser.add_argument("--first-step", action="store_true")
    parser.add_argument(
        "--processes", action="store_true", help="one rank a process, beside what is by hand"
    )
    parser.add_argument("--xla", action="store_true", help="steps that XLA compiles")
    parser.add_argument("--layout", action="append", help="only these, beside Keras")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(Contender(json.loads(args.worker)).handle)
        return
    if args.first_step:
        rows = first_step(*((4, 256) if args.quick else (24, 1024)))
    elif args.quick:
        rows = measure("gpt", 2, 2, [CONTENDERS[0], CONTENDERS[4]])
    else:
        rows = []
        for model in args.model or ("gpt", "wide"):
            contenders = PROCESSES if args.processes else XLA if args.xla else CONTENDERS
            chosen = [
                c for c in contenders if not args.layout or c["layout"] in ("-", *args.layout)
            ]
            steps = 16 if args.processes else 8 if model == "gpt" else 4
            rows += measure(model, turns=7, steps=steps, contenders=chosen)
    show(rows)
    save(args.json, rows)


if __name__ == "__main__":
    main()
