"""Devices, networks, folders, and the job that this process is part of."""

from __future__ import annotations

import os
import shutil
import socket
from collections import Counter
from pathlib import Path

from tfpar.jobs.doctor.command import run
from tfpar.jobs.doctor.finding import Finding, missing, ok, warning
from tfpar.jobs.doctor.probe import Probe
from tfpar.jobs.install.wheel_cache import default_cache
from tfpar.jobs.launch.host_network import find_network, is_local
from tfpar.jobs.launch.hosts import find_hosts
from tfpar.jobs.launch.options import RunOptions
from tfpar.spec.errors import TfparError
from tfpar.spec.quantities import format_bytes
from tfpar.tf.distributed.job import Job

_LIMIT_S = 20.0
_LITTLE_MEMORY = 2 << 30  # empirical: two ranks with TensorFlow and a tiny model take 1 GiB
_LITTLE_DISK = 1 << 30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_FAR_AWAY = ("198.51.100.1", "198.51.100.2")  # documentation addresses: nothing is sent there


def check_gpus(probe: Probe) -> Finding:
    """The GPUs that TensorFlow sees, and those that only the driver does."""
    driver, names = _driver()
    if probe.gpus:
        cuda = f", TensorFlow for CUDA {probe.cuda}" if probe.cuda else ""
        version = f", driver {driver}" if driver else ""
        return ok("GPUs", f"{_counted(probe.gpus)}{version}{cuda}")
    if not names:
        return ok("GPUs", "none; ranks compute on the CPU")
    found = f"{_counted(names)}, driver {driver}, but TensorFlow sees none"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        hidden = os.environ["CUDA_VISIBLE_DEVICES"]
        return warning("GPUs", f"{found} (CUDA_VISIBLE_DEVICES={hidden!r})", "Unset the variable.")
    return warning("GPUs", found, "pip install 'tensorflow[and-cuda]'")


def check_cpu() -> Finding:
    """Cores and memory that this process may use."""
    cores, memory = len(os.sched_getaffinity(0)), _memory()
    found = f"{cores} core{'s' * (cores != 1)}, {format_bytes(memory)} of memory"
    if memory < _LITTLE_MEMORY:
        return warning("CPU", found, "Give the machine or container at least 2 GiB for two ranks.")
    return ok("CPU", found)


def check_network() -> Finding:
    """Find the network interfaces for ranks of this machine, and to other machines of a job."""
    here = find_network(["localhost"], None)
    others = [host.name for host in find_hosts(RunOptions(command=("true",)), os.environ)]
    others = [name for name in others if not is_local(name)]
    names = ", ".join(name for _, name in socket.if_nameindex())
    own = f"{here.interface} on this machine"
    try:
        there = find_network(["localhost", *(others or _FAR_AWAY)], None)
    except TfparError as error:
        mend = "Only for ranks on other machines: tfpar run --network-interface NAME"
        return warning("Network", f"{own}; others: {error} Interfaces: {names}", mend)
    return ok("Network", f"{own}, {there.interface} ({there.address}) to others; there are {names}")


def check_job() -> Finding:
    """Find whether tfpar takes this process for a rank of a job, and of which."""
    try:
        job = Job.of(os.environ)
    except TfparError as error:
        return missing("Job", str(error), "Unset the variable, or set it as the launcher does.")
    if job is not None:
        found = f"rank {job.rank} of {job.size}, on {job.nodes} machine(s), by {job.launcher}"
        return ok("Job", found)
    if os.environ.get("SLURM_JOB_ID"):
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        return ok("Job", f"Slurm's allocation {nodes}; `tfpar run` or `srun` starts its ranks")
    return ok("Job", "none: this process is alone; `tfpar run` starts ranks")


def check_caches() -> Finding:
    """The folders in which wheels and plans are kept."""
    folders = {"TFPAR_CACHE": default_cache()}
    plans = os.environ.get("TFPAR_PLAN_CACHE")
    if plans:
        folders["TFPAR_PLAN_CACHE"] = Path(plans).expanduser().absolute()
    for variable, folder in folders.items():
        place = next(p for p in (folder, *folder.parents) if p.exists())
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            mend = f"export {variable}=a folder that can be written, shared by all machines"
            return warning("Caches", f"{folder} cannot be written", mend)
        if shutil.disk_usage(place).free < _LITTLE_DISK:
            mend = f"Make room, or export {variable}=another folder"
            return warning("Caches", f"{folder}: less than 1 GiB free", mend)
    return ok("Caches", ", ".join(f"{folder}" for folder in folders.values()))


def _driver() -> tuple[str, tuple[str, ...]]:
    """The version of NVIDIA's driver and the GPUs that it names; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return "", ()
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    ended = run(query, _LIMIT_S)
    if ended.code != 0:
        return "", ()
    rows = [line.split(", ", 1) for line in ended.out.splitlines() if ", " in line]
    return (rows[0][0] if rows else ""), tuple(name for _, name in rows)


def _counted(names: tuple[str, ...]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _memory() -> int:
    """Bytes, of the machine or of the container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # "max": no limit
        return memory
