"""Plant faults into the package, and count those that the test suite catches.

    python -m scripts.mutations [--fast] [--json FILE] [--number 30] [--tests tests/rules ...]
    python -m scripts.mutations --rank [--tests tests/rules ...]

Faults are drawn at random, the same for the same code, from rules, cost, propagation, rewriting,
runtime, planning and launching. First each test module runs once, in a process of its own, with all
faults in place and none switched on: that tells which tests come past which fault, and what they
take. Then each fault is switched on, and the tests that come past it run, the quickest first, until
one fails. A fault is caught if one fails, or takes several times as long as before. One that no
test comes past is not caught, nor is one that still lives when its tests have taken `--seconds`.

With `--rank` every place of the package where a fault could be planted counts, and no fault is
switched on. Tests are listed by what they add: the places that no test above them comes past,
for the seconds that it takes. Those at the end, which add none, may be worth their seconds for what
they assert, or be repetitions.

Processes are forked from one that has imported TensorFlow and the package already.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from benchmarks import results  # noqa: E402
from scripts.mutating import faults as planted  # noqa: E402
from scripts.mutating import hook  # noqa: E402
from scripts.mutating.faults import Fault  # noqa: E402

SITE = """
import os, sys
if os.environ.get({planted!r}):
    sys.path.insert(0, {root!r})
    from scripts.mutating import hook
    sys.path.remove({root!r})
    hook.install()
"""
"""What an interpreter runs first that a test starts: faults are planted there too."""


@dataclass
class Reach:
    """What one test comes past, and what it takes.

    Attributes:
        seconds: CPU-seconds, those of processes it starts included.
        passed: whether it passed with no fault switched on.
    """

    test: str
    seconds: float
    wall_s: float
    passed: bool
    faults: set[int] = field(default_factory=set)

    @property
    def module(self) -> str:
        return self.test.split("::")[0]


class Recorder:
    """Plugin of pytest that writes down, for each test, what it comes past and takes."""

    def __init__(self, reached: pathlib.Path) -> None:
        self.reached = reached
        self.tests: list[Reach] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "setup":
            self.tests.append(Reach(report.nodeid, 0, 0, False))
        if report.failed:
            self.tests[-1].passed = False
        elif report.when == "call" and report.passed:
            self.tests[-1].passed = True

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        hook.begin()
        self.reached.write_text("")
        self._start = time.monotonic(), _cpu_seconds()

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        test = self.tests[-1]
        test.wall_s = time.monotonic() - self._start[0]
        test.seconds = _cpu_seconds() - self._start[1]
        children = {int(line) for line in self.reached.read_text().split()}
        test.faults = hook.reached() | children


def _cpu_seconds() -> float:
    took = os.times()
    return took.user + took.system + took.children_user + took.children_system


@dataclass
class Outcome:
    """How a forked process ended: what it wrote, or nothing where it was stopped or died."""

    result: Any
    timed_out: bool
    wall_s: float


def forked(
    jobs: Iterable[tuple[Any, Callable[[], Any], float]], width: int
) -> Iterator[tuple[Any, Outcome]]:
    """Run functions in forked processes, `width` at a time, each at most its seconds."""
    waiting = iter(jobs)
    running: dict[int, tuple[Any, pathlib.Path, float, float]] = {}
    done = False
    while not done or running:
        while not done and len(running) < width:
            try:
                name, call, limit = next(waiting)
            except StopIteration:
                done = True
                break
            descriptor, path = tempfile.mkstemp()
            os.close(descriptor)
            child = os.fork()
            if child == 0:
                _run_child(call, path)
            running[child] = name, pathlib.Path(path), time.monotonic(), limit
        for child, (name, file, start, limit) in list(running.items()):
            took = time.monotonic() - start
            ended = os.waitpid(child, os.WNOHANG)[0] != 0
            if not ended and took < limit:
                continue
            _kill_group(child)
            if not ended:
                os.waitpid(child, 0)
            text = file.read_text()
            file.unlink()
            del running[child]
            yield name, Outcome(json.loads(text) if text else None, not ended, took)
        time.sleep(0.02)


def _run_child(call: Callable[[], Any], path: str) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    try:
        result = call()
        pathlib.Path(path).write_text(json.dumps(result))
    finally:
        os._exit(0)


def _kill_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass


def record(module: str, marks: str) -> list[dict[str, Any]]:
    """Run one test module, and tell what each of its tests comes past."""
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        reached = pathlib.Path(folder) / "reached"
        os.environ[hook.REACHED] = str(reached)
        recorder = Recorder(reached)
        pytest.main([module, "-q", "-p", "no:cacheprovider", "-m", marks], plugins=[recorder])
    return [{**vars(test), "faults": sorted(test.faults)} for test in recorder.tests]


def try_fault(number: int, tests: list[str]) -> dict[str, str | None]:
    """Run tests with one fault switched on, and name the first that fails, if any, as `by`."""
    import pytest

    class FirstFailure:
        test: str | None = None

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed and self.test is None:
                self.test = report.nodeid

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed and self.test is None:
                self.test = report.nodeid

    os.environ.pop(hook.REACHED, None)
    hook.switch_on(number)
    first = FirstFailure()
    code = pytest.main([*tests, "-q", "-x", "-p", "no:cacheprovider"], plugins=[first])
    return {"by": first.test or (None if code == 0 else f"pytest ended with {int(code)}")}


def choose(number: int, tests: list[Reach], seconds: float) -> list[Reach]:
    """Tests that may catch a fault, the quickest first, as many as take `seconds`.

    Those that come past it themselves stand first, then others of their modules, which may use
    what a shared fixture has made.
    """
    modules = {test.module for test in tests if number in test.faults}
    usable = [test for test in tests if test.module in modules and test.passed]
    usable.sort(key=lambda test: (number not in test.faults, test.seconds))
    chosen, total = [], 0.0
    for test in usable:
        total += test.seconds
        if chosen and total > seconds:
            break
        chosen.append(test)
    return chosen


def preload(faults: list[Fault], folder: pathlib.Path) -> None:
    """Plant the faults, and import what tests import, which forked processes then have."""
    planted.write(faults, folder / "faults.json")
    os.environ[hook.PLANTED] = str(folder / "faults.json")
    site = SITE.format(planted=hook.PLANTED, root=str(planted.ROOT))
    (folder / "sitecustomize.py").write_text(site)
    paths = [str(folder), str(planted.ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    hook.install()
    import hypothesis  # noqa: F401
    import keras  # noqa: F401
    import pytest  # noqa: F401
    import tensorflow  # noqa: F401

    for module in sorted({fault.module for fault in faults}):
        __import__(module)


def test_modules(places: list[str]) -> list[str]:
    """The test modules in folders, or those that are named, as paths from the root."""
    found: set[str] = set()
    for place in places:
        path = planted.ROOT / place
        files = path.rglob("test_*.py") if path.is_dir() else [path]
        found.update(str(file.relative_to(planted.ROOT)) for file in files)
    return sorted(found)


def rank(tests: list[Reach]) -> list[tuple[Reach, int]]:
    """Tests in the order of what they add for their seconds, each with how much that is."""
    ranked, seen = [], set[int]()
    left = list(tests)
    while left:
        best = max(left, key=lambda test: (len(test.faults - seen) + 1e-3) / (test.seconds + 0.05))
        left.remove(best)
        ranked.append((best, len(best.faults - seen)))
        seen |= best.faults
    return ranked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="of `make test-fast` alone")
    parser.add_argument("--number", type=int, default=30, help="faults of each area")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=60, help="CPU-seconds of tests a fault")
    parser.add_argument("--only", nargs="*", help="keys of faults, as the JSON has them")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="folders or modules of tests")
    parser.add_argument("--rank", action="store_true", help="list tests by what they add")
    parser.add_argument("--record", type=pathlib.Path, help="keep what tests come past, or use it")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    os.chdir(planted.ROOT)
    faults = planted.draw(sys.maxsize if options.rank else options.number)
    with tempfile.TemporaryDirectory() as folder:
        preload(faults, pathlib.Path(folder))
        tests = read_or_record(options, [fault.key for fault in faults])
        if options.rank:
            total = 0.0
            for test, added in rank(tests):
                total += test.seconds
                print(f"{total:8.1f} {test.seconds:6.2f} s {added:5} {test.test}")
            return
        rows = list(run_all(faults, tests, options))
    show(rows)
    results.save(options.json, rows)


def read_or_record(options: argparse.Namespace, keys: list[str]) -> list[Reach]:
    """What tests come past, as numbers of the faults with these keys."""
    path: pathlib.Path | None = options.record
    marks = "not slow and not nightly" if options.fast else "not nightly"
    if path is not None and path.exists():
        kept = json.loads(path.read_text())
    else:
        kept = {"keys": keys, "tests": []}
        modules = test_modules(options.tests)
        jobs = [(module, functools.partial(record, module, marks), 1200) for module in modules]
        for module, outcome in forked(jobs, options.jobs):
            print(f"{module}: {outcome.wall_s:.1f} s", file=sys.stderr, flush=True)
            if outcome.result is None:
                print(f"{module} was not recorded", file=sys.stderr)
            kept["tests"] += outcome.result or []
        if path is not None:
            path.write_text(json.dumps(kept))
    numbers = {key: number for number, key in enumerate(keys)}
    tests = []
    for test in kept["tests"]:
        reached = {numbers.get(kept["keys"][number]) for number in test["faults"]}
        tests.append(Reach(**{**test, "faults": reached - {None}}))
    return tests


def run_all(
    faults: list[Fault], tests: list[Reach], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    chosen: dict[int, list[Reach]] = {}
    for number, fault in enumerate(faults):
        if options.only is None or fault.key in options.only:
            chosen[number] = choose(number, tests, options.seconds)
    jobs = []
    for number, mine in chosen.items():
        names = [test.test for test in mine]
        limit = 60 + 5 * sum(max(test.seconds, test.wall_s) for test in mine)
        if names:
            jobs.append((number, functools.partial(try_fault, number, names), limit))
        else:
            yield {**planted.as_row(faults[number]), "caught": False, "by": "no test comes past it"}
    for number, outcome in forked(jobs, options.jobs):
        died = outcome.result is None
        by = "it took too long" if outcome.timed_out else "the process died" if died else None
        by = by or outcome.result["by"]
        row = {**planted.as_row(faults[number]), "caught": by is not None, "by": by}
        row |= {"tests": len(chosen[number]), "wall_s": round(outcome.wall_s, 1)}
        print(json.dumps(row), file=sys.stderr, flush=True)
        yield row


def show(rows: list[dict[str, Any]]) -> None:
    for area in [*planted.AREAS, None]:
        mine = [row for row in rows if area in (row["area"], None)]
        if mine:
            caught = sum(row["caught"] for row in mine)
            print(
                f"{area or 'all':12} {caught:4} of {len(mine):4} caught: {caught / len(mine):.0%}"
            )
    for row in rows:
        if not row["caught"]:
            print(f"lives: {row['fault']}{': ' + row['by'] if row['by'] else ''}")


if __name__ == "__main__":
    main()
