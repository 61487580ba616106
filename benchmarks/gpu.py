"""One GPU: step times of plain Keras and tfpar, what splitting, recomputation and offload cost, how
fast the host issues ops, and the tests that need a GPU.

    python -m benchmarks.gpu [--minutes 8] [--json FILE] [--case NAME ...] [--tiny]

For a machine without network: it needs this checkout, Python with what `requirements.lock` pins for
running (TensorFlow with its CUDA libraries: `pip install tensorflow[and-cuda]`), and pytest. Cases
run one after the other, each in a process with the GPU to itself, the most telling first; results
are saved after each, so that a run that is cut off leaves what it had. A case that fails or has no
time left is a row that says so.

    large       a GPT of 1.3 G parameters: few wide layers, since XLA compiles for ten seconds and
                more a layer; a batch that fills 80 GB
    small       4 layers of 1,024, for which the host is the limit without XLA
    two ranks   two logical devices of the one GPU compute the same step in two halves: what they
                take longer is what splitting costs
    floor       `Device.dispatch_s` and the like, as `tap.calibrate` measures them
    tests       tests/gpu

`mfu` is model FLOPs (6 N T for N parameters and T tokens, and 12 L h s T of attention: Chowdhery et
al. 2022, appendix B) over the peak of the data sheet, where the GPU's is known. `--tiny` runs all
cases on models of a few numbers, also without a GPU: to see that the script works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.results import save
from benchmarks.workers import ROOT

PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""FLOP/s of products in bfloat16, by a part of the GPU's name (NVIDIA's data sheets, dense)."""

RANK_MIB = 30 * 1024
STEPS, TURNS = 10, 3
FLOOR_S = 15.0
LEAST_PART = 0.5
"""Of the time that a case is expected to take: with less left, it is not begun."""


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of a GPT and its batch."""

    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    batch: int

    @property
    def flops(self) -> float:
        """Model FLOPs of a step."""
        tokens = self.batch * self.length
        weights = self.layers * 12 * self.hidden**2 + self.vocabulary * self.hidden
        return 6.0 * weights * tokens + 12.0 * self.layers * self.hidden * self.length * tokens


LARGE = Size(5, 4096, 32, 1024, 32_000, 16)
SMALL = Size(4, 1024, 16, 512, 32_000, 8)
TINY = Size(1, 8, 2, 8, 32, 2)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured in a process of its own.

    Attributes:
        about_s: what it takes on an H200, with compiling.
        kept: `recompute` or `offload`, the option that keeps activations, or also slots, from the
            GPU's memory.
    """

    name: str
    about_s: float
    size: Size | None = None
    system: str = "tfpar"
    ranks: int = 1
    xla: bool = False
    kept: str = ""


CASES = (
    Case("floor", 40),
    Case("large keras", 90, LARGE, "keras", xla=True),
    Case("large", 110, LARGE, xla=True),
    Case("small keras", 20, SMALL, "keras"),
    Case("small", 20, SMALL),
    Case("small two ranks", 25, SMALL, ranks=2),
    Case("small recompute", 25, SMALL, kept="recompute"),
    Case("small offload", 25, SMALL, kept="offload"),
    Case("tests", 90),
)


def measure(case: Case) -> dict[str, Any]:
    """The row of a case, which runs in this process."""
    if case.size is None:
        return _floor()
    import keras
    import tensorflow as tf

    import tfpar as tap
    from benchmarks import models
    from benchmarks.workers import endless

    size, gpus = case.size, tf.config.list_physical_devices("GPU")
    if gpus and case.ranks > 1:
        part = tf.config.LogicalDeviceConfiguration(memory_limit=RANK_MIB)
        tf.config.set_logical_device_configuration(gpus[0], [part] * case.ranks)
    elif gpus:
        tf.config.experimental.set_memory_growth(gpus[0], True)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_bfloat16")

    def build() -> keras.Model:
        sizes = dict(hidden=size.hidden, heads=size.heads, length=size.length)
        model = models.gpt(num_layers=size.layers, vocabulary=size.vocabulary, **sizes)
        return models.compile_model(model, "adam", jit_compile=case.xla)

    if case.system == "keras":
        model = build()
    else:
        kept = {case.kept: True} if case.kept else {}
        with tap.auto_parallel(tap.split([case.ranks, 1]), planner=None, **kept):
            model = build()
    data = endless(models.gpt_batch(size.batch, size.length, size.vocabulary))

    def seconds(steps: int) -> float:
        begin = time.perf_counter()
        model.fit(data, steps_per_epoch=steps, verbose=0)
        return (time.perf_counter() - begin) / steps

    first = seconds(1)
    seconds(2)
    step = statistics.median(seconds(STEPS) for _ in range(TURNS))
    row = {"first_step_s": first, "step_s": step, "layers": size.layers, "hidden": size.hidden}
    if gpus:
        row["peak_bytes"] = tf.config.experimental.get_memory_info("GPU:0")["peak"]
        name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "")
        peak = next((peak for part, peak in PEAKS.items() if part in name), None)
        row |= {"gpu": name, "mfu": None if peak is None else size.flops / step / peak}
    return row


def _floor() -> dict[str, Any]:
    """How fast ops are issued here."""
    import tfpar as tap

    device = tap.calibrate([1], budget_s=FLOOR_S).device
    names = ("dispatch_s", "xla_dispatch_s", "launch_s", "memory_bandwidth", "half_size")
    return {name: getattr(device, name) for name in names} | {"flops": dict(device.flops)}


def _tests(seconds: float) -> dict[str, Any]:
    """How many tests of tests/gpu passed."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-o", "addopts="]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
    lines = done.stdout.strip().splitlines() or [done.stderr[-500:]]
    return {"result": lines[-1], "ok": done.returncode == 0}


def in_a_process(case: Case, seconds: float, tiny: bool) -> dict[str, Any]:
    """The row of a case; what went wrong, if it failed or took longer than `seconds`."""
    row: dict[str, Any] = {"case": case.name, "system": case.system, "ranks": case.ranks}
    row |= {"xla": case.xla, "dtype": "mixed_bfloat16"}
    if seconds < LEAST_PART * case.about_s:
        return row | {"error": "no time was left"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", case.name]
    command += ["--tiny"] if tiny else []
    try:
        if case.name == "tests":
            return row | _tests(seconds)
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return row | {"error": f"took longer than {seconds:.0f} s"}
    if done.returncode:
        return row | {"error": done.stderr[-2000:]}
    return row | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="that all may take")
    parser.add_argument("--case", choices=names, action="append", help="default: all")
    parser.add_argument(
        "--tiny", action="store_true", help="models of a few numbers, on any device"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", choices=names, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.name in (arguments.case or names)]
    if arguments.tiny:
        cases = [dataclasses.replace(case, about_s=0, size=case.size and TINY) for case in cases]
    if arguments.only is not None:
        (case,) = (case for case in cases if case.name == arguments.only)
        print(json.dumps(measure(case)))
        return
    end, rows = time.monotonic() + 60 * arguments.minutes, []
    for case in cases:
        rows.append(in_a_process(case, end - time.monotonic(), arguments.tiny))
        print(rows[-1], flush=True)
        save(arguments.json, rows)


if __name__ == "__main__":
    main()
