"""Trials: cases that run one after another in a process of their own, with limits.

A case ends well, or it raises a TfparError. Whatever else it does is a fault: another exception,
more than its time or memory, or the end of the process.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import random
import resource
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from tfpar.spec import TfparError

LIMIT_S = 20.0
"""Seconds of one case, many times what the longest takes."""

MEMORY_BYTES = 3 << 30
"""Beyond what the process has before its first case."""


class Draw(random.Random):
    """Draws one case, and knows what it has drawn.

    Attributes:
        told: what the case is, for the report of a fault.
    """

    told = ""

    def tell(self, drawn: Any) -> None:
        self.told = repr(drawn)[:300]


Case = Callable[[Draw], None]
"""Draws one case, and tries it."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of cases.

    Attributes:
        prepare: makes what its cases need, in the process that tries them, in an empty folder.
    """

    name: str
    prepare: Callable[[str], Case]


class Fault(NamedTuple):
    """What is wrong with one case: `case` draws the same one again."""

    case: int
    error: str
    where: str
    drawn: str


@dataclasses.dataclass
class Outcome:
    """How the cases of one kind ended."""

    accepted: int = 0
    refused: int = 0
    faults: list[Fault] = dataclasses.field(default_factory=list)

    def add(self, case: int, line: Mapping[str, Any]) -> None:
        """Count a case by what its process told."""
        if line["ended"] == "accepted":
            self.accepted += 1
        elif line["ended"] == "refused":
            self.refused += 1
        else:
            self.faults.append(Fault(case, line["error"], line["where"], line["drawn"]))

    def by_place(self) -> dict[tuple[str, str], list[Fault]]:
        """The faults that are alike, the most frequent first."""
        found = collections.defaultdict(list)
        for fault in self.faults:
            found[fault.error.partition(":")[0], fault.where].append(fault)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))


class OvertimeError(BaseException):
    """A case took more than `LIMIT_S`."""


def run(kind: Kind, cases: Sequence[int], seed: int = 0) -> Outcome:
    """Try `cases`, in as many processes as it takes."""
    outcome, left = Outcome(), list(cases)
    while left:
        begun: int | None = None
        for line in _lines_of(kind, left, seed):
            if begun is None:
                begun = left.pop(0)
            else:
                outcome.add(begun, line)
                begun = None
        if begun is not None:
            outcome.faults.append(Fault(begun, "the process ended or hung", "", ""))
    return outcome


def replay(kind: Kind, case: int, seed: int = 0) -> None:
    """Try one case in this process, and let through what it raises."""
    with _empty_folder() as folder:
        attempt, draw = kind.prepare(folder), _draw(kind, case, seed)
        try:
            attempt(draw)
        finally:
            print(draw.told)


def _draw(kind: Kind, case: int, seed: int) -> Draw:
    return Draw(f"{kind.name} {seed} {case}")


@contextlib.contextmanager
def _empty_folder() -> Iterator[str]:
    """A folder to work in."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


def _lines_of(kind: Kind, cases: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
    """What the process tells that tries cases until it ends, or until one hangs it."""
    sys.stdout.flush()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        with os.fdopen(write, "w") as told:
            code = _work(kind, cases, seed, told)
        os._exit(code)
    os.close(write)
    begun = False
    with os.fdopen(read, "rb", buffering=0) as told:
        waiting = b""
        while select.select([told], [], [], 3 * LIMIT_S if begun else 600.0)[0]:
            got = told.read(1 << 16)
            if not got:
                break
            *lines, waiting = (waiting + got).split(b"\n")
            for line in lines:
                begun = True
                yield json.loads(line)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not begun:
        raise RuntimeError(f"{kind.name}: nothing could be prepared (status {status})")


def _work(kind: Kind, cases: Sequence[int], seed: int, told: IO[str]) -> int:
    """Try the cases; two lines tell of each, one before and one after it."""

    def tell(**line: Any) -> None:
        told.write(json.dumps(line) + "\n")
        told.flush()

    def alarm(number: int, frame: Any) -> None:
        raise OvertimeError(f"more than {LIMIT_S:g} s")

    logging.getLogger("tfpar").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGALRM, alarm)
    try:
        with _empty_folder() as folder:
            attempt = kind.prepare(folder)
            _limit_memory()
            for case in cases:
                tell()
                tell(**_tried(attempt, _draw(kind, case, seed)))
        return 0
    except BaseException:  # noqa: BLE001 - the parent sees that nothing comes
        traceback.print_exc()
        return 1


def _tried(attempt: Case, draw: Draw) -> dict[str, Any]:
    """How a case ended."""
    try:
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            attempt(draw)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TfparError:
        return {"ended": "refused"}
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        said = f"{type(error).__name__}: {error}"[:300]
        return {"ended": "fault", "error": said, "where": _where(error), "drawn": draw.told}
    return {"ended": "accepted"}


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))


def _where(error: BaseException) -> str:
    """The innermost line of the package that the error went through, else of anything."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if f"{os.sep}tfpar{os.sep}" in f.filename] or frames
    if not inside:
        return ""
    return f"{inside[-1].filename.rpartition('tfpar' + os.sep)[2]}:{inside[-1].lineno}"
