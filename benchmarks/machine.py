"""How slow this machine is: the processor time of fixed work, relative to the reference machine.

    python -m benchmarks.machine [--json FILE]

1.00 is the reference machine; a machine that says 1.30 takes 1.3 times its processor time. So a
figure in seconds that was measured here, divided by the factor, is about what the reference machine
would have taken. Results of benchmarks store it (`benchmarks.results`).

The work is a loop in Python (half of the time), numpy (a quarter) and products in TensorFlow (a
quarter), on one thread. Of each, the median of several short repetitions counts, in CPU-seconds, so
that other processes move the factor little. Another Python than 3.11 counts as part of the machine:
the loop takes a quarter more time in 3.13.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

REPETITIONS = 9

REFERENCE_S = {"python": 0.068, "numpy": 0.033, "tensorflow": 0.029}
"""CPU-seconds that each part takes on the reference machine.

It is the machine on which CPython 3.11 runs `for i in range(10_000_000): s += i * i`, at the level
of a module, in 0.69 CPU-seconds. All parts were measured together with that loop, in turns, on a
virtual AMD EPYC (numpy 2.4.6, TensorFlow 2.21.0), and scaled by what the loop took there.
"""

LOOP = compile("s = 0\nfor i in range(500_000): s += i * i", "loop", "exec")


def main() -> None:
    from benchmarks.results import save

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", help="write the parts and their factors")
    parser.add_argument("--factor", action="store_true", help="print the factor alone")
    args = parser.parse_args()
    found = measure()
    factor = relative_time(found)
    if args.factor:
        print(f"{factor:.2f}")
        return
    rows = [
        {"part": part, "cpu_s": cpu_s, "factor": cpu_s / REFERENCE_S[part]}
        for part, cpu_s in found.items()
    ]
    for row in rows:
        print(f"{row['part']:<11}{1e3 * row['cpu_s']:6.1f} ms   {row['factor']:.2f}")
    print(f"{'machine':<20}{factor:.2f}   (reference machine: 1.00; more is slower)")
    save(args.json, rows, machine=round(factor, 2))


def relative_time(cpu_s: dict[str, float]) -> float:
    """The processor time of all parts, relative to the reference machine."""
    return sum(cpu_s.values()) / sum(REFERENCE_S.values())


def measure(repetitions: int = REPETITIONS) -> dict[str, float]:
    """The median CPU-seconds of each part; parts take turns. Starts TensorFlow on one thread."""
    work = {
        "python": lambda: (run_loop(), run_loop()),
        "numpy": numpy_work(),
        "tensorflow": tensorflow_work(),
    }
    for part in work.values():
        part()  # the first time something is made
    taken: dict[str, list[float]] = {part: [] for part in work}
    for _ in range(repetitions):
        for part, run in work.items():
            taken[part].append(cpu_seconds(run))
    return {part: statistics.median(times) for part, times in taken.items()}


def cpu_seconds(run: Callable[[], object]) -> float:
    """The processor time that a call takes."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def python_factor() -> float:
    """How slow this machine is by Python alone, in a tenth of a second."""
    times = [cpu_seconds(run_loop) for _ in range(3)]
    return statistics.median(times) / (REFERENCE_S["python"] / 2)


def run_loop() -> None:
    """A loop at the level of a module: its variables are entries of a dict."""
    exec(LOOP, {})


def numpy_work() -> Callable[[], object]:
    """Exponentials, sums and sorts of arrays that fit into a cache."""
    import numpy as np

    values = np.random.default_rng(0).random(6_000)
    return lambda: [(np.cumsum(np.exp(values)), np.sort(values)) for _ in range(500)]


def tensorflow_work() -> Callable[[], object]:
    """Products of two matrices of 1,024 x 1,024 in single precision."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import numpy as np
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    with tf.device("CPU"):
        matrix = tf.constant(np.random.default_rng(0).random((1024, 1024), dtype=np.float32))
    return lambda: [tf.linalg.matmul(matrix, matrix) for _ in range(3)]


if __name__ == "__main__":
    main()
