"""Nodes of unequal speed: each has a quota of the cores, by a control group (version 1) of its own.

No group is ever made whose name does not start with `PREFIX`, and none is left.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.shaped_cluster.namespaces import PREFIX, ClusterError, Node, undisturbed

# A rank that has waited finds all of its quota, a rank that computes waits for the next: the
# shorter, the more even. The kernel grants a quota of 1 ms at least.
LEAST_QUOTA_US = 1000
_NO_QUOTA = "-1"
_MANY_SHARES = "65536"  # so that what else runs here takes nothing of a quota
_MOUNTS = "/proc/mounts"
_END_S = 10.0


class _Hierarchy(NamedTuple):
    """Where groups of the `cpu` controller lie, and which controllers have them in common."""

    folder: pathlib.Path
    controllers: str


def obstacle() -> str | None:
    """What is missing here; None if quotas may be tried."""
    if _hierarchy() is None:
        return "Quotas of cores need the cpu controller of cgroup v1, which is not mounted here."
    return None


class Groups(NamedTuple):
    """What `job.run_module` is to have each node do before all else, and where its ranks then find
    their group (see `held`)."""

    first: str
    folder: str


@contextlib.contextmanager
def groups(nodes: Sequence[Node], least: float) -> Iterator[Groups]:
    """A group for each node, without a quota yet, while the context lasts.

    What an earlier run left behind is removed before; nothing, no process either, is left after.

    Args:
        least: cores of the slowest node.

    Raises:
        ClusterError: the kernel refuses.
    """
    at = _hierarchy()
    if at is None:
        raise ClusterError(str(obstacle()))
    period_us = math.ceil(LEAST_QUOTA_US / least)
    _remove(at)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        try:
            for node in nodes:
                _make(at.folder / node.namespace, period_us)
            yield Groups(_joining(at.controllers, folder), folder)
        finally:
            with undisturbed():
                _remove(at)


@contextlib.contextmanager
def held(folder: str, cores: float) -> Iterator[None]:
    """Let this process and those of its group use so many cores, while the context lasts.

    Args:
        folder: of `Groups`.
    """
    group = pathlib.Path(folder, _own_group())
    period_us = int((group / "cpu.cfs_period_us").read_text())
    shares, quota = group / "cpu.shares", group / "cpu.cfs_quota_us"
    before = shares.read_text()
    shares.write_text(_MANY_SHARES)
    quota.write_text(str(round(cores * period_us)))
    try:
        yield
    finally:
        quota.write_text(_NO_QUOTA)
        shares.write_text(before)


def _own_group() -> str:
    """Of this process, among the groups of the `cpu` controller."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return path.lstrip("/")
    raise ClusterError("This process is in no group of the cpu controller.")


def _joining(controllers: str, folder: str) -> str:
    """Words that run those behind them in the group of the node whose host name ends on `$1`.

    `ip netns exec` hides what lies below /sys, so that the groups are mounted once more, where no
    process of another node sees it.
    """
    script = (
        f"mount -t cgroup -o {controllers} none {folder} && "
        f'echo $$ > "{folder}/{PREFIX}$0/cgroup.procs" && exec "$@"'
    )
    return f"unshare --mount sh -c '{script}' \"${{1##*.}}\""


def _hierarchy() -> _Hierarchy | None:
    with open(_MOUNTS, encoding="utf-8") as file:
        mounts = [line.split() for line in file]
    for _, folder, kind, options, *_ in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            known = [name for name in options.split(",") if name in ("cpu", "cpuacct")]
            return _Hierarchy(pathlib.Path(folder), ",".join(known))
    return None


def _make(group: pathlib.Path, period_us: int) -> None:
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(period_us))
    except OSError as error:
        raise ClusterError(f"{group} cannot be made: {error}") from error


def _remove(at: _Hierarchy) -> None:
    """End the processes in our groups, and delete these."""
    end = time.monotonic() + _END_S
    for group in at.folder.glob(f"{PREFIX}*"):
        while pids := (group / "cgroup.procs").read_text().split():
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise ClusterError(f"Processes {', '.join(pids)} in {group} cannot be ended.")
            time.sleep(0.1)
        group.rmdir()
