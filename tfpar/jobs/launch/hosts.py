"""Hosts and their slots, and which rank gets which slot.

Hosts come from `-H`, a hostfile or a Slurm allocation; else this machine is the only one.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tfpar.jobs.launch.options import RunOptions
from tfpar.jobs.launch.slurm import expand_nodelist, expand_tasks
from tfpar.spec.errors import TfparError

_HOST = re.compile(r"[A-Za-z0-9_](?:[\w.@-]*\w)?")  # never an option of ssh's
_MOST_RANKS = 100_000  # each is a process


@dataclass(frozen=True, slots=True)
class Host:
    """A machine and how many ranks may run on it."""

    name: str
    slots: int

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.name):
            raise TfparError(f"{self.name!r} is no host name. Write host or host:slots.")
        if self.slots < 0:
            raise TfparError(f"The host {self.name} has {self.slots} slots; write 0 or more.")
        if self.slots > _MOST_RANKS:
            raise TfparError(
                f"The host {self.name} has {self.slots} slots; at most {_MOST_RANKS:,} can be."
            )


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one rank: the numbers have Horovod's meaning.

    `cross_rank` counts the hosts that have a rank of the same `local_rank`.
    """

    rank: int
    size: int
    hostname: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def find_hosts(options: RunOptions, environ: Mapping[str, str]) -> list[Host]:
    """The hosts of a run.

    Raises:
        TfparError: what names them cannot be read.
    """
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    for variable in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(variable):
            return _slurm_hosts(variable, environ)
    return [Host("localhost", 1 if options.num_ranks is None else options.num_ranks)]


def parse_hosts(text: str) -> list[Host]:
    """The hosts of `host1:2,host2`; a host without a number has one slot.

    Raises:
        TfparError: the text is not of this form.
    """
    try:
        return _merged(_entry(part) for part in text.split(","))
    except TfparError as error:
        raise TfparError(f"-H {text}: {error}") from error


def read_hostfile(path: str) -> list[Host]:
    """The hosts of a file with a line `host slots=N`, `host:N` or `host` each; `#` comments.

    Raises:
        TfparError: there is no such file, or a line is of another form.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TfparError(f"Cannot read the hostfile {path!r}: {error}.") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            hosts.append(_line(words))
        except TfparError as error:
            raise TfparError(f"{path}, line {number}: {error}") from error
    if not hosts:
        raise TfparError(f"The hostfile {path!r} names no host. Write lines like: node1 slots=4")
    return _merged(hosts)


def allocate(hosts: Sequence[Host], num_ranks: int) -> list[Slot]:
    """Ranks 0, 1, ... on the slots of the hosts, in their order.

    Raises:
        TfparError: there are fewer slots than ranks.
    """
    total = sum(host.slots for host in hosts)
    if num_ranks > total:
        known = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise TfparError(
            f"{num_ranks} ranks (-np) need as many slots, but the hosts have {total} ({known}). "
            f"Lower -np, or give the hosts more slots (-H host:slots)."
        )
    if num_ranks > _MOST_RANKS:
        raise TfparError(f"{num_ranks} ranks are more than a job can have ({_MOST_RANKS:,}).")
    names = (host.name for host in hosts for _ in range(host.slots))
    return place_ranks(list(itertools.islice(names, num_ranks)))


def place_ranks(hosts: Sequence[str]) -> list[Slot]:
    """The slot of each rank, given the machine of each: `a b a` has local ranks 0, 0, 1."""
    on_host: dict[str, int] = defaultdict(int)
    across: dict[int, int] = defaultdict(int)
    places = []
    for host in hosts:
        local = on_host[host]
        places.append((host, local, across[local]))
        on_host[host] += 1
        across[local] += 1
    return [
        Slot(rank, len(hosts), host, local, on_host[host], cross, across[local])
        for rank, (host, local, cross) in enumerate(places)
    ]


def without(hosts: Sequence[Host], lost: Iterable[str]) -> list[Host]:
    """The hosts with one slot less for each time that `lost` names them."""
    gone = list(lost)
    return [Host(host.name, max(0, host.slots - gone.count(host.name))) for host in hosts]


def _line(words: list[str]) -> Host:
    fields = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    if len(fields) != len(words) - 1:
        raise TfparError(f"{' '.join(words)!r} is no host. Write: node1 slots=4")
    if "slots" not in fields:
        return _entry(words[0])
    return Host(words[0], _count(words[0], fields["slots"]))


def _entry(text: str) -> Host:
    name, colon, slots = text.strip().partition(":")
    return Host(name, _count(name, slots) if colon else 1)


def _count(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise TfparError(f"{text!r} is no number of slots for the host {name!r}.")
    return int(text)


def _merged(hosts: Iterable[Host]) -> list[Host]:
    """A host named twice has the slots of both."""
    slots: dict[str, int] = defaultdict(int)
    for host in hosts:
        slots[host.name] += host.slots
    return [Host(name, count) for name, count in slots.items()]


def _slurm_hosts(variable: str, environ: Mapping[str, str]) -> list[Host]:
    nodes = environ[variable]
    names = expand_nodelist(nodes, variable)
    tasks = environ.get("SLURM_TASKS_PER_NODE")
    each = environ.get("SLURM_NTASKS_PER_NODE")
    if tasks:
        counts = expand_tasks(tasks, "SLURM_TASKS_PER_NODE")
        if len(counts) != len(names):
            raise TfparError(
                f"SLURM_TASKS_PER_NODE={tasks} is for {len(counts)} nodes, but {nodes} are "
                f"{len(names)}. Name the hosts with -H."
            )
    else:
        counts = [_count("SLURM_NTASKS_PER_NODE", each) if each else 1] * len(names)
    return [Host(name, count) for name, count in zip(names, counts, strict=True)]
