"""Blame for a job's end: finds the rank that caused it, from the status of all ranks alone.

This needs no clocks, no processes and no text.

The culprit is the rank that failed first by itself. A rank that failed because another had ended
is none, and neither is one that waited in vain: then it is the rank that did not come along.
"""

from __future__ import annotations

import enum
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfpar.jobs.launch import activities
from tfpar.jobs.launch.environment import HUNG, TEMPORARY_FAILURE
from tfpar.jobs.launch.processes import Exit
from tfpar.jobs.launch.supervisor import Signs

_SSH_FAILED = 255
_SILENT_S = 4.0  # of a rank that gives a sign of life every second


class Cause(enum.Enum):
    """Reason for which a rank is blamed."""

    KILLED = "killed by a signal"
    EXITED = "ended with an exit code"
    RAISED = "raised an exception"
    UNREACHABLE = "ssh has failed"
    DISCONNECTED = "its connection broke"
    SILENT = "gives no sign of life"
    NOT_STARTED = "has not reported"
    FEWER_BATCHES = "has had fewer batches than others"
    ELSEWHERE = "is at something that the others do not do"
    LEFT_EARLY = "came to its end while others went on"
    HUNG = "did not come along"
    PEER = "failed because another rank had ended"


# Rather the machine's fault than the program's: without these ranks it may go on.
_LOSSES = {
    Cause.KILLED,
    Cause.UNREACHABLE,
    Cause.DISCONNECTED,
    Cause.SILENT,
    Cause.NOT_STARTED,
    Cause.HUNG,
}


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Status of one rank, as far as the launcher knows it.

    Attributes:
        exit: None while it runs.
        stopped: the launcher had asked it to end before it did.
        signs: None if it has never reported.
    """

    rank: int
    host: str
    remote: bool
    exit: Exit | None
    stopped: bool
    signs: Signs | None
    stderr: tuple[str, ...] = ()

    @property
    def signal(self) -> int | None:
        """The signal that ended it; a shell between tells it as 128 + signal."""
        if self.exit is None:
            return None
        number = -self.exit.code
        if self.remote and 128 < self.exit.code < _SSH_FAILED:
            number = self.exit.code - 128
        return number if number in signal.Signals.__members__.values() else None

    @property
    def ended_well(self) -> bool:
        return self.exit is not None and self.exit.code == 0

    @property
    def done_at(self) -> float | None:
        """Time at which its program came to its end by itself; it then waits for the others."""
        if self.exit is not None and self.exit.code == 0:
            return self.exit.at
        return self.signs.done_at if self.signs is not None else None


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits, in seconds, beyond which a rank counts as hung or lost."""

    timeout_s: float
    start_timeout_s: float
    drop_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Blame:
    """A rank, why, and since when (`time.monotonic()`)."""

    record: RankStatus
    cause: Cause
    at: float

    @property
    def is_loss(self) -> bool:
        """Whether the others may go on without this rank."""
        code = self.record.exit.code if self.record.exit is not None else None
        return self.cause in _LOSSES or (
            self.cause in (Cause.EXITED, Cause.RAISED) and code == TEMPORARY_FAILURE
        )

    @property
    def may_follow(self) -> bool:
        """Whether another rank's end may have brought it about: Gloo aborts when a peer is gone."""
        return self.cause is Cause.KILLED and self.record.signal == signal.SIGABRT

    def is_like(self, other: Blame) -> bool:
        """Whether both ranks ended in one way that no other rank's end brings about."""
        if self.cause is Cause.KILLED:
            return self.record.signal == other.record.signal == signal.SIGKILL
        if self.cause is Cause.EXITED:
            return self.is_loss and other.cause is Cause.EXITED and other.is_loss
        return self.cause is other.cause and self.cause is not Cause.RAISED

    @property
    def exit_code(self) -> int:
        """Exit code of the launcher for this cause."""
        ended = self.record.exit if not self.record.stopped else None
        if self.cause is Cause.KILLED and self.record.signal is not None:
            return 128 + self.record.signal
        if self.cause in (Cause.EXITED, Cause.RAISED, Cause.PEER, Cause.UNREACHABLE):
            return ended.code if ended is not None and ended.code > 0 else 1
        return HUNG


def must_end(records: Sequence[RankStatus], limits: Limits, now: float) -> bool:
    """Whether the job has to end: not for a reported exception, which may be caught."""
    return any(
        (r.exit is not None and r.exit.code != 0 and not r.stopped)
        or (r.signs is not None and r.signs.hung_after is not None)
        or _cut_off(r, records, limits, now)
        for r in records
    ) or bool(_stuck(records, limits, now))


def blame(records: Sequence[RankStatus], limits: Limits, now: float) -> list[Blame]:
    """The ranks to blame, the first of them first; none if nothing went wrong."""
    own = [b for r in records if (b := _own_failure(r, records, limits, now))]
    hung = [r for r in records if r.signs is not None and r.signs.hung_after is not None]
    # Of ranks that hang together the first to end itself makes Gloo abort the others.
    if own and not (hung and all(b.may_follow for b in own)):
        return sorted(own, key=lambda b: (b.may_follow, b.at))
    peers = [r for r in records if _told_of(r, "peer")]
    early = [Blame(r, Cause.LEFT_EARLY, r.done_at) for r in records if r.done_at is not None]
    if early and (hung or peers):
        return early
    unheard = [r for r in records if r.signs is None and r.exit is None]
    if hung and unheard:
        return [Blame(r, Cause.NOT_STARTED, now) for r in unheard]
    if hung:
        return _parted(records) or [Blame(r, Cause.HUNG, _since(r)) for r in _behind(records, now)]
    stuck = _stuck(records, limits, now)
    if stuck:
        return stuck
    first = min(peers, key=_told_at, default=None)
    return [Blame(first, Cause.PEER, _told_at(first))] if first is not None else []


def _own_failure(
    record: RankStatus, records: Sequence[RankStatus], limits: Limits, now: float
) -> Blame | None:
    ended, signs = record.exit, record.signs
    if ended is not None and ended.code != 0 and not record.stopped:
        if record.signal is not None:
            return Blame(record, Cause.KILLED, ended.at)
        if record.remote and ended.code == _SSH_FAILED:
            return Blame(record, Cause.UNREACHABLE, ended.at)
        if _told_of(record, "error"):
            return Blame(record, Cause.RAISED, _told_at(record))
        if _told_of(record, "peer") or (signs is not None and signs.hung_after is not None):
            return None
        return Blame(record, Cause.EXITED, ended.at)
    if _told_of(record, "error") and not record.ended_well:
        return Blame(record, Cause.RAISED, _told_at(record))
    cause = _cut_off(record, records, limits, now)
    return Blame(record, cause, _since(record) or now) if cause else None


def _cut_off(
    record: RankStatus, records: Sequence[RankStatus], limits: Limits, now: float
) -> Cause | None:
    """Find the cause for which a rank that should be there cannot be heard."""
    signs = record.signs
    if record.exit is not None:
        return None
    if signs is None:
        first = min((r.signs.connected_at for r in records if r.signs), default=now)
        return Cause.NOT_STARTED if now - first > limits.start_timeout_s else None
    if signs.lost_at is not None and signs.hung_after is None:
        return Cause.DISCONNECTED if now - signs.lost_at > limits.drop_s else None
    silent = not signs.left and now - signs.heard_at > max(limits.timeout_s, _SILENT_S)
    return Cause.SILENT if silent else None


def _stuck(records: Sequence[RankStatus], limits: Limits, now: float) -> list[Blame]:
    """Blame ranks where some have ended well, and the others got no further for too long."""
    ended = [r for r in records if r.ended_well]
    running = [r for r in records if r.exit is None]
    if not ended or not running:
        return []
    last = max(*(r.exit.at for r in ended if r.exit), *map(_since, running))
    if now - last <= limits.timeout_s:
        return []
    if len(ended) > len(running):
        return [Blame(r, Cause.HUNG, last) for r in running]
    return [Blame(r, Cause.LEFT_EARLY, r.exit.at) for r in ended if r.exit]


def _parted(records: Sequence[RankStatus]) -> list[Blame]:
    """Blame ranks that others wait for in a step, while they wait for the others elsewhere.

    They are in something else that comes after as many steps.
    """
    known = [
        (record, record.signs)
        for record in records
        if record.signs is not None and (record.signs.bounded or _told_of(record, "peer"))
    ]
    steps = Counter(at for _, signs in known if (at := activities.step_of(signs.activity)))
    if len(known) < len(records) or not steps:
        return []
    (name, number), _ = max(steps.items(), key=lambda each: (each[1], each[0][0] == "train step"))
    found = [(r, s) for r, s in known if activities.step_of(s.activity) != (name, number)]
    if any(signs.steps != number - 1 for _, signs in found):
        return []  # one has not got so far, or is through with it
    return [
        Blame(
            record,
            Cause.FEWER_BATCHES if activities.is_end_of_epoch(signs.activity) else Cause.ELSEWHERE,
            signs.since,
        )
        for record, signs in found
    ]


def _behind(records: Sequence[RankStatus], now: float) -> list[RankStatus]:
    """Whom the waiting ranks wait for; all ranks, if nothing sets one of them apart."""
    known = [r for r in records if r.signs is not None]
    mute = [r for r in known if r.exit is None and r.signs and now - r.signs.heard_at > _SILENT_S]
    if mute:
        return mute
    counts = Counter(r.signs.activity for r in known if r.signs)
    if len(counts) == 1:
        busy = [r for r in known if r.signs and r.signs.reached and r.signs.reached.state == "runs"]
        if (
            0 < len(busy) < len(known)
        ):  # the others wait for what comes of a task, or all it leads to
            return busy
        patient = [r for r in known if r.signs and r.signs.hung_after is None and r.exit is None]
        return patient if 0 < len(patient) < len(known) / 2 else known
    (_, most), (_, next_most) = counts.most_common(2)
    if most > next_most:
        common = counts.most_common(1)[0][0]
        return sorted((r for r in known if r.signs and r.signs.activity != common), key=_since)
    return [min(known, key=_order_of(known))]


def _order_of(known: Sequence[RankStatus]) -> Callable[[RankStatus], tuple[bool, float]]:
    """Return a sort key without a majority: first those that wait for no rank, then by time."""
    return lambda r: (bool(r.signs and r.signs.bounded), _since(r))


def _told_of(record: RankStatus, kind: str) -> bool:
    """Whether it reported such an exception, and has not gone on after it."""
    signs = record.signs
    if signs is None or signs.failure is None or signs.failure.kind != kind:
        return False
    return record.exit is not None or signs.since <= signs.failure.at


def _told_at(record: RankStatus) -> float:
    assert record.signs is not None and record.signs.failure is not None  # asked by `_told_of`
    told = record.signs.failure.at
    if record.signs.since <= told or record.exit is None:
        return told
    return record.exit.at  # it went on for a while


def _since(record: RankStatus) -> float:
    return record.signs.since if record.signs is not None else 0.0
