"""Trials: cases that run one after another in a process of their own, with limits.

A case ends well, or it raises a TfparError. Whatever else it does is a fault: another exception, more
than its time or memory, or the end of the process.
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
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tfpar.spec import TfparError

LIMIT_S = 20.0
"""Seconds of one case, many times what the longest takes."""

MEMORY_BYTES = 3 << 30
"""Beyond what the process has before its first case."""

Case = Callable[[random.Random], None]
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

    def by_place(self) -> dict[tuple[str, str], list[Fault]]:
        """The faults that are alike, the most frequent first."""
        found = collections.defaultdict(list)
        for fault in self.faults:
            found[fault.error.partition(":")[0], fault.where].append(fault)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))


class OvertimeError(BaseException):
    """A case took more than `LIMIT_S`."""


class Drawn(contextlib.ContextDecorator):
    """What the case at hand has drawn, for the report of a fault."""

    text = ""


def tell(drawn: Any) -> None:
    """Note what the case at hand is."""
    Drawn.text = repr(drawn)[:300]


def run(kind: Kind, cases: Sequence[int], seed: int = 0) -> Outcome:
    """Try `cases`, in as many processes as it takes."""
    outcome, left = Outcome(), list(cases)
    while left:
        for line in _lines_of(kind, left, seed):
            if line["kind"] == "begin":
                case = line["case"]
                left.remove(case)
                outcome.accepted += 1
                begun: int | None = case
                continue
            begun = None
            if line["kind"] == "end":
                continue
            outcome.accepted -= 1
            if line["kind"] == "refused":
                outcome.refused += 1
            else:
                outcome.faults.append(Fault(case, line["error"], line["where"], line["drawn"]))
        if begun is not None:
            outcome.accepted -= 1
            outcome.faults.append(Fault(begun, "the process ended or hung", "", ""))
    return outcome


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


def _work(kind: Kind, cases: Sequence[int], seed: int, told: Any) -> int:
    def tell_parent(**line: Any) -> None:
        told.write(json.dumps(line) + "\n")
        told.flush()

    def alarm(number: int, frame: Any) -> None:
        raise OvertimeError(f"more than {LIMIT_S:g} s")

    folder = tempfile.mkdtemp(prefix="fuzz-")
    before = os.getcwd()
    try:
        os.chdir(folder)
        logging.getLogger("tfpar").setLevel(logging.CRITICAL)
        attempt = kind.prepare(folder)
        signal.signal(signal.SIGALRM, alarm)
        _limit_memory()
        for case in cases:
            tell_parent(kind="begin", case=case)
            Drawn.text = ""
            try:
                signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
                attempt(random.Random(f"{kind.name} {seed} {case}"))
            except TfparError:
                tell_parent(kind="refused")
            except BaseException as error:  # noqa: BLE001 - that is what is looked for
                signal.setitimer(signal.ITIMER_REAL, 0)
                said = f"{type(error).__name__}: {error}"[:300]
                tell_parent(kind="fault", error=said, where=_where(error), drawn=Drawn.text)
            else:
                tell_parent(kind="end")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        return 0
    except BaseException:  # noqa: BLE001 - the parent sees that nothing comes
        traceback.print_exc()
        return 1
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


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
