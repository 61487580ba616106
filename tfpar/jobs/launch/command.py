"""The command lines that start a rank: on this machine, over ssh, or all of them by mpirun.

A rank on this or another machine is started by a few words of shell. They leave a watcher in the
rank's process group that reads the process's stdin, the *lifeline*: a line on it is a signal
for the whole group, and its end, when the launcher or the connection is gone, ends the group. So
one mechanism serves every machine, and nothing outlives the launcher however that dies.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence

from tfpar.jobs.launch.environment import is_variable
from tfpar.jobs.launch.hosts import Host
from tfpar.jobs.launch.options import RunOptions
from tfpar.spec.errors import TfparError

_WATCH = (
    "exec 3<&0 </dev/null; "
    "(trap '' HUP INT TERM; "
    'while read -r signal; do kill -s "$signal" 0; done; '
    "kill -s TERM 0; sleep {grace}; kill -s KILL 0) <&3 3<&- >/dev/null 2>&1 & "
    "exec 3<&-; "
)
_BECOME = 'exec "$@"'
# Variables come over stdin: command lines are seen by everybody on a machine. This shell stays,
# because ssh does not tell which signal has ended a command, and a shell does (128 + signal).
_TAKE_VARIABLES = 'read -r line; eval "$(printf %b "$line")"; '
_WAIT_FOR = 'trap : HUP INT TERM; "$@"; exit $?'


def local_command(command: Sequence[str], grace_s: float) -> list[str]:
    """Return the command line that runs `command` here, as the leader of its process group."""
    return ["/bin/sh", "-c", _watch(grace_s) + _BECOME, "sh", *command]


def ssh_command(host: str, command: Sequence[str], folder: str, options: RunOptions) -> list[str]:
    """Return the command line that runs `command` on `host` in `folder`.

    Whom ssh trusts is as the user's ssh has it. The first line on its stdin is `exporting(...)`.
    """
    script = _TAKE_VARIABLES + _watch(options.grace_s) + _WAIT_FOR
    there = shlex.join(["sh", "-c", script, "sh", *command])
    return [
        "ssh",
        "-T",
        "-x",
        "-o",
        "BatchMode=yes",
        "-o",
        "LogLevel=ERROR",
        "-o",
        f"ConnectTimeout={math.ceil(options.start_timeout_s)}",
        "-o",
        "ServerAliveInterval=15",
        *(["-p", str(options.ssh_port)] if options.ssh_port is not None else []),
        *(["-i", options.ssh_identity_file] if options.ssh_identity_file is not None else []),
        host,
        f"cd {shlex.quote(folder)} && exec {there}",
    ]


def exporting(environment: Mapping[str, str]) -> str:
    """One line, of whatever values, by which a shell gets these variables.

    Raises:
        TfparError: a name that no shell knows as a variable's.
    """
    odd = [name for name in environment if not is_variable(name)]
    if odd:
        raise TfparError(
            f"The variable {odd[0]!r} (--env) cannot be sent to another machine. Name it with "
            f"letters, digits and _ alone."
        )
    assigned = (f"{name}={shlex.quote(value)}" for name, value in environment.items())
    script = " ".join(["export", *assigned])
    return script.replace("\\", "\\\\").replace("\n", "\\n")


def mpirun_command(
    hosts: Sequence[Host], num_ranks: int, names: Sequence[str], options: RunOptions
) -> list[str]:
    """Open MPI starts all ranks; the variables `names` are passed on from its own environment."""
    ssh = []
    if options.ssh_port is not None:
        ssh += ["-p", str(options.ssh_port)]
    if options.ssh_identity_file is not None:
        ssh += ["-i", options.ssh_identity_file]
    interface = options.network_interface
    over = ["--mca", "btl_tcp_if_include", interface] if interface is not None else []
    return [
        "mpirun",
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        "-np",
        str(num_ranks),
        "-H",
        ",".join(f"{host.name}:{host.slots}" for host in hosts if host.slots),
        "--bind-to",
        "none",
        "--map-by",
        "slot",
        *over,
        *(["--mca", "plm_rsh_args", shlex.join(ssh)] if ssh else []),
        *(word for name in sorted(names) for word in ("-x", name)),
        *options.command,
    ]


def _watch(grace_s: float) -> str:
    return _WATCH.format(grace=math.ceil(grace_s))
