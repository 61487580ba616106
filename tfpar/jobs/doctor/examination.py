"""Checks of the doctor in order: later ones depend on the findings of earlier ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from tfpar.jobs.doctor import machine, software, trials
from tfpar.jobs.doctor.finding import Finding, Status, look
from tfpar.jobs.doctor.probe import Probe

Check = Callable[[], Finding | None]


def examine(*, quick: bool, tell: Callable[[str], object]) -> Iterator[Finding]:
    """Look at everything, and then train on it.

    Args:
        quick: train nothing.
        tell: gets the name of what is looked at next, as that may take a minute.
    """
    tell("TensorFlow and Keras")
    found: dict[str, Finding] = {}
    for name, check in _checks(Probe.of_this_machine(), found, quick):
        tell(name)
        finding = look(name, check)
        if finding is not None:
            found[name] = finding
            yield finding


def _checks(probe: Probe, found: Mapping[str, Finding], quick: bool) -> Iterator[tuple[str, Check]]:
    """Names and checks; `found` grows as they are made."""
    yield "Python", software.check_python
    yield "TensorFlow", partial(software.check_tensorflow, probe)
    yield "Keras", partial(software.check_keras, probe)
    yield "GPUs", partial(machine.check_gpus, probe)
    yield "CPU", machine.check_cpu
    yield "Horovod", partial(software.check_horovod, probe)
    yield "Build tools", lambda: software.check_build_tools(found["Horovod"])
    yield "Open MPI", software.check_mpi
    yield "ssh", software.check_ssh
    yield "Network", machine.check_network
    yield "Job", machine.check_job
    yield "Caches", machine.check_caches
    yield "Extras", software.check_extras
    if quick or Status.MISSING in (found["TensorFlow"].status, found["Keras"].status):
        return
    yield trials.ONE_PROCESS, trials.try_one_process
    horovod = importlib.util.find_spec("horovod") is not None
    if horovod and found["Horovod"].status is not Status.MISSING:
        yield trials.over("horovod"), partial(trials.try_processes, "horovod", probe, default=True)
    yield (
        trials.over("tensorflow"),
        partial(trials.try_processes, "tensorflow", probe, default=not horovod),
    )
