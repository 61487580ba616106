"""Report on a job that failed: the rank to blame, its cause, and the activities of all ranks."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from tfpar.jobs.launch.activities import describe_activity
from tfpar.jobs.launch.beacon import TaskProgress
from tfpar.jobs.launch.blame import Blame, Cause, RankStatus

_MESSAGE_CHARACTERS = 400
_HEADERS = ("rank", "host", "at", "stage", "task", "for", "end")
_MAY_BE_EMPTY = ("stage", "task")
_HOST_KEY = "Host key verification failed"  # ssh's words


def headline(blamed: Sequence[Blame]) -> str:
    """One sentence: the first culprit, its cause and activity."""
    first = blamed[0]
    text = f"{_who(first.record)} {_why(first)}".rstrip(".") + "."
    others = [f"{b.record.rank}" for b in blamed[1:] if b.is_like(first)]
    if others:
        text += f" The same holds for rank{'s' * (len(others) > 1)} {', '.join(others)}."
    return text


def loss(blamed: Blame) -> str:
    """`rank 2 (host h) was lost: SIGKILL at train step 17`."""
    return f"{_who(blamed.record)} was lost: {_short(blamed)}{_where(blamed.record)}"


def report(blamed: Sequence[Blame], records: Sequence[RankStatus], now: float) -> str:
    """The headline, a table of all ranks, and the end of the culprit's stderr."""
    parts = [headline(blamed), *_advice(blamed, records), table(records, now)]
    culprit = blamed[0].record
    if culprit.stderr:
        parts.append(f"The last lines of rank {culprit.rank}'s stderr:")
        parts.append("\n".join(f"  {line}" for line in culprit.stderr))
    return "\n".join(parts)


def _advice(blamed: Sequence[Blame], records: Sequence[RankStatus]) -> list[str]:
    """Suggest what to do about a host that ssh does not trust, and ranks that wait elsewhere."""
    cause, culprits = blamed[0].cause, [b.record.rank for b in blamed]
    if cause is Cause.UNREACHABLE and _HOST_KEY in " ".join(blamed[0].record.stderr):
        return [
            f"ssh does not know the key of {blamed[0].record.host}, or it has changed. Log in once "
            f"by hand (ssh {blamed[0].record.host}), which shows and asks, or have ssh take new "
            f"keys at their word: StrictHostKeyChecking accept-new in ~/.ssh/config."
        ]
    others = [r for r in records if r.rank not in culprits and r.signs is not None]
    if cause not in (Cause.FEWER_BATCHES, Cause.ELSEWHERE) or not others:
        return []
    waits = f"Rank {others[0].rank} waits for it{_where(others[0])}."
    if cause is Cause.FEWER_BATCHES:
        return [f"{waits} Every rank has to read as many batches."]
    return [
        f"{waits} Every rank has to call the same in the same order: look for a callback, or other "
        f"code, that runs on some ranks only (`if rank == 0`)."
    ]


def table(records: Sequence[RankStatus], now: float) -> str:
    """Format a table of all ranks: activity, its duration, and how the rank ended."""
    rows = _columns([_HEADERS, *(_row(record, now) for record in records)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Without those of pipelines, where no rank has anything to say there."""
    kept = [
        i
        for i, header in enumerate(_HEADERS)
        if header not in _MAY_BE_EMPTY or any(row[i] for row in rows[1:])
    ]
    return [tuple(row[i] for i in kept) for row in rows]


def _row(record: RankStatus, now: float) -> tuple[str, ...]:
    at, since, stages, task = "", "", "", ""
    if record.signs is not None:
        ended = record.exit.at if record.exit is not None else now
        at, since = record.signs.activity, f"{max(0.0, ended - record.signs.since):.1f} s"
        stages = ", ".join(map(str, record.signs.stages))
        task = _task(record.signs.reached)
    return str(record.rank), record.host, at, stages, task, since, _ending(record)


def _task(reached: TaskProgress | None) -> str:
    if reached is None:
        return ""
    shown = {"waits": "{} (waits)", "runs": "{}", "done": "after {}"}[reached.state]
    return shown.format(reached.task)


def _ending(record: RankStatus) -> str:
    failure = record.signs.failure if record.signs is not None else None
    told = ""
    if failure is not None:
        because = " (after another rank's end)" if failure.kind == "peer" else ""
        told = f"; {_clipped(failure.message)}{because}"
    if record.exit is None:
        return f"still running{told}"
    number = record.signal
    by = _name(number) if number is not None else f"exit code {record.exit.code}"
    if record.stopped:
        return f"ended by tfpar run ({by}){told}"
    if record.signs is not None and record.signs.hung_after is not None:
        return f"waited {record.signs.hung_after:.0f} s in vain ({by})"
    return f"{by}{told}"


def _why(blamed: Blame) -> str:
    record, at = blamed.record, _where(blamed.record)
    code = record.exit.code if record.exit is not None else None
    signs = record.signs
    told = _clipped(signs.failure.message) if signs and signs.failure else ""
    with_code = f" (exit code {code})" if code and not record.stopped else ""
    return {
        Cause.KILLED: f"was killed by {_name(record.signal)}{at}",
        Cause.EXITED: f"ended with exit code {code}{at}",
        Cause.RAISED: f"failed{at}{with_code}: {told}",
        Cause.UNREACHABLE: f"cannot be reached (ssh ended with exit code 255){at and f',{at}'}",
        Cause.DISCONNECTED: f"closed its connection{at}, but has not ended",
        Cause.SILENT: f"gives no sign of life{at}",
        Cause.NOT_STARTED: "has not reported in time, while others have (--start-timeout)",
        Cause.LEFT_EARLY: f"came to its end{at}, while other ranks went on",
        Cause.FEWER_BATCHES: f"has had fewer batches than others: it is{at} after "
        f"{signs.steps if signs else 0} steps",
        Cause.ELSEWHERE: f"is{describe_activity(at)}, and the others are not",
        Cause.HUNG: f"hung{at}, while the others waited or had ended",
        Cause.PEER: f"failed{at}{with_code} because another rank had ended, of which nothing is "
        f"known: {told}",
    }[blamed.cause]


def _short(blamed: Blame) -> str:
    record = blamed.record
    if blamed.cause is Cause.KILLED:
        return _name(record.signal)
    if blamed.cause in (Cause.EXITED, Cause.RAISED) and record.exit is not None:
        return f"exit code {record.exit.code}"
    cause: str = blamed.cause.value
    return cause


def _where(record: RankStatus) -> str:
    if record.signs is None:
        return ""
    activity = record.signs.activity
    at = f" {activity}" if activity.startswith("after ") else f" at {activity}"
    within = record.signs.reached
    return at if within is None else f"{at}, {within.described}"


def _who(record: RankStatus) -> str:
    stages = record.signs.stages if record.signs is not None else ()
    runs = f", stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}" if stages else ""
    return f"rank {record.rank} (host {record.host}{runs})"


def _name(number: int | None) -> str:
    return signal.Signals(number).name if number is not None else "a signal"


def _clipped(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= _MESSAGE_CHARACTERS else f"{text[:_MESSAGE_CHARACTERS]}..."
