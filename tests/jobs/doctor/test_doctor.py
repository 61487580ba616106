"""`tfpar doctor`, on machines on which things are missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence

import psutil
import pytest

from tests import preloaded
from tests.jobs.launch.programs import variables
from tests.time_limits import time_limit, wait_until
from tfpar.__main__ import main
from tfpar.jobs.doctor import Finding, Status, examination, machine, software, trials
from tfpar.jobs.doctor.command import CommandResult, run
from tfpar.jobs.doctor.finding import missing, ok, warning
from tfpar.jobs.doctor.probe import Probe
from tfpar.jobs.install.horovod import InstalledHorovod
from tfpar.spec import TfparError

pytestmark = pytest.mark.xdist_group("processes")

SOUND = Probe(tensorflow="2.21.0", keras="3.15.0", backend="tensorflow")
WITH_GPUS = Probe("2.21.0", "3.15.0", "tensorflow", ("H200", "H200"), "12.5")


@pytest.fixture
def trial_commands(monkeypatch) -> list[tuple[list[str], dict[str, str]]]:
    """Commands of trials and their environments; none of them runs, and all succeed."""
    commands: list[tuple[list[str], dict[str, str]]] = []

    def ran(command, limit_s, environ):
        commands.append((command, environ))
        return CommandResult(0, "[0] they train\n", "")

    monkeypatch.setattr(trials, "run", ran)
    return commands


@pytest.fixture
def examined(monkeypatch, trial_commands):
    """A machine on which all is well, without the time that it takes to look."""
    monkeypatch.setattr(Probe, "of_this_machine", classmethod(lambda cls: SOUND))
    installed = InstalledHorovod("0.28.1", gloo=True, mpi=False, nccl=False)
    monkeypatch.setattr(software.horovod, "verify", lambda: installed)
    has(monkeypatch, horovod=True)
    monkeypatch.setattr(software, "run", lambda *_: CommandResult(0, "mpirun (Open MPI) 4.1\n", ""))
    monkeypatch.setattr(software.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(machine, "_driver", lambda: ("", ()))


def has(monkeypatch, *, horovod: bool) -> None:
    for module in (software, examination):
        monkeypatch.setattr(
            module.importlib.util, "find_spec", lambda name: object if horovod else None
        )


def installed_versions(monkeypatch, **versions: str | None) -> None:
    """Makes packages have these versions; None: not installed."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        key = name.replace("-", "_")
        if key not in versions:
            return real(name)
        found = versions[key]
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def report(capsys, *options: str) -> tuple[int, dict]:
    code = main(["doctor", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def by_name(told: dict) -> dict[str, dict]:
    return {finding["name"]: finding for finding in told["findings"]}


# --- the command ---------------------------------------------------------------------------------


def test_a_sound_machine_is_said_to_be_sound(examined, capsys):
    code, told = report(capsys)
    assert (code, told["sound"]) == (0, True)
    assert {f["status"] for f in told["findings"]} <= {"ok", "warning"}
    assert by_name(told)["Processes, horovod"]["found"] == "they train"
    assert list(by_name(told))[-3:] == [
        "One process",
        "Processes, horovod",
        "Processes, tensorflow",
    ]


def test_the_table_names_everything_and_then_what_to_do(examined, monkeypatch, capsys):
    monkeypatch.setattr(software.shutil, "which", lambda name: None)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("Python", "ok", "no mpirun on PATH", "if you need it:\n  Open MPI: Only for"):
        assert part in text
    assert text.endswith("Training works here, in one process and in several.\n")


def test_quick_trains_nothing_and_says_so(examined, trial_commands, capsys):
    assert main(["doctor", "--quick"]) == 0
    assert not trial_commands
    assert "without --quick it is tried" in capsys.readouterr().out


def test_what_is_missing_gives_exit_code_1(examined, monkeypatch, capsys):
    monkeypatch.setattr(
        software, "check_keras", lambda probe: missing("Keras", "not installed", "install keras")
    )
    code, told = report(capsys)
    assert (code, told["sound"]) == (1, False)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "for training to work:\n  Keras: install keras" in text
    assert text.endswith("Training does not work here: Keras.\n")


def test_without_tensorflow_nothing_is_tried(examined, monkeypatch, trial_commands, capsys):
    monkeypatch.setattr(Probe, "of_this_machine", classmethod(lambda cls: Probe(error="No module")))
    code, told = report(capsys)
    assert code == 1
    assert not trial_commands
    assert by_name(told)["TensorFlow"]["status"] == "missing"
    assert by_name(told)["Keras"]["mend"] == "Mend TensorFlow first."
    assert by_name(told)["Horovod"]["mend"] == "Mend Keras first."


def test_a_check_that_breaks_does_not_end_the_others(examined, monkeypatch, capsys):
    def broken():
        raise RuntimeError("no such\nluck")

    monkeypatch.setattr(machine, "check_cpu", broken)
    code, told = report(capsys, "--quick")
    assert code == 0
    assert by_name(told)["CPU"]["status"] == "warning"
    assert "RuntimeError: no such luck" in by_name(told)["CPU"]["found"]
    assert "Extras" in by_name(told)


# --- software ------------------------------------------------------------------------------------


def test_versions_are_held_against_what_tfpar_declares(monkeypatch):
    installed_versions(monkeypatch, tensorflow="2.12.0", keras="2.12.0")
    for found in (software.check_tensorflow(SOUND), software.check_keras(SOUND)):
        assert found.status is Status.MISSING
        assert re.fullmatch(r"2\.12\.0.*; tfpar needs .*>=.*", found.found)
        assert "--upgrade" in found.mend
    monkeypatch.setattr(software.platform, "python_version", lambda: "3.9.1")
    assert software.check_python().status is Status.MISSING


def test_a_tfpar_that_is_not_installed_declares_nothing(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    monkeypatch.setattr(importlib.metadata, "metadata", absent)
    assert software.check_python().status is Status.OK
    assert software.check_keras(SOUND).status is Status.OK


def test_packages_that_are_not_installed_are_missing(monkeypatch):
    names = ("tensorflow", "tensorflow_cpu", "tf_nightly", "tf_nightly_cpu", "keras")
    installed_versions(monkeypatch, **dict.fromkeys(names))
    for found in (software.check_tensorflow(Probe()), software.check_keras(Probe())):
        assert (found.status, found.found) == (Status.MISSING, "not installed")
        assert "pip install" in found.mend


def test_an_import_that_fails_is_quoted():
    error = "ImportError: libcudart.so.12"
    assert error in software.check_tensorflow(Probe(error=error)).found
    assert error in software.check_keras(Probe(tensorflow="2.21.0", error=error)).found


def test_a_keras_that_cannot_be_loaded_may_want_another_backend(monkeypatch):
    probe = Probe(tensorflow="2.21.0", error="ModuleNotFoundError: No module named 'jax'")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert software.check_keras(probe).mend == "export KERAS_BACKEND=tensorflow"
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    assert "pip install --force-reinstall 'keras==" in software.check_keras(probe).mend


def test_keras_has_to_run_on_tensorflow(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    found = software.check_keras(Probe("2.21.0", "3.15.0", "jax"))
    assert found.status is Status.MISSING
    assert "on jax, as KERAS_BACKEND says" in found.found
    assert found.mend == "export KERAS_BACKEND=tensorflow"


def test_without_horovod_tensorflow_is_the_backend_and_tools_are_looked_for(
    examined, monkeypatch, trial_commands, capsys
):
    has(monkeypatch, horovod=False)
    monkeypatch.setattr(software.toolchain, "missing_packages", lambda: ["cmake"])
    monkeypatch.setattr(software.toolchain, "check_tools", lambda **_: None)
    code, told = report(capsys)
    assert code == 0
    assert by_name(told)["Horovod"]["mend"] == "tfpar install-horovod"
    assert "pip will fetch cmake" in by_name(told)["Build tools"]["found"]
    assert list(by_name(told))[-1] == "Processes, tensorflow"
    assert "horovod" not in sum((command for command, _ in trial_commands), [])


def test_tools_that_horovod_needs_are_named(monkeypatch):
    monkeypatch.setattr(software.toolchain.shutil, "which", lambda name: None)
    found = software.check_build_tools(warning("Horovod", "not installed", "build it"))
    assert found is not None and found.status is Status.WARNING
    assert "no C++ compiler, no make" in found.found
    assert "apt-get install g++ make" in found.mend


def test_a_horovod_for_another_tensorflow_is_missing_and_not_tried(
    examined, monkeypatch, trial_commands, capsys
):
    def broken():
        raise TfparError("Horovod cannot be imported: undefined symbol. `tfpar install-horovod")

    monkeypatch.setattr(software.horovod, "verify", broken)
    code, told = report(capsys)
    assert code == 1
    assert by_name(told)["Horovod"]["found"] == "Horovod cannot be imported: undefined symbol"
    assert by_name(told)["Horovod"]["mend"] == "tfpar install-horovod --rebuild"
    assert "Processes, horovod" not in by_name(told)


def test_a_horovod_without_nccl_is_named_where_there_are_gpus(examined):
    assert software.check_horovod(SOUND).status is Status.OK
    found = software.check_horovod(WITH_GPUS)
    assert found.status is Status.WARNING and "--nccl" in found.mend


def test_another_mpi_is_not_open_mpi(monkeypatch):
    monkeypatch.setattr(software.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(software, "run", lambda *_: CommandResult(0, "HYDRA build details:\n", ""))
    assert "HYDRA" in software.check_mpi().found
    monkeypatch.setattr(
        software, "run", lambda *_: CommandResult(None, "", "", "not done after 20 s")
    )
    assert "not done after 20 s" in software.check_mpi().found
    assert software.check_ssh().status is Status.WARNING


def test_lacking_extras_are_named_with_what_they_are_for(monkeypatch):
    installed_versions(monkeypatch, keras_hub=None, scikit_learn="1.5")
    found = software.check_extras()
    assert found.found == "scikit-learn 1.5, no keras-hub"
    assert "tfpar[hub]" in found.mend and "KerasHub" in found.mend


# --- the machine ---------------------------------------------------------------------------------


def test_gpus_are_counted(monkeypatch):
    monkeypatch.setattr(machine, "_driver", lambda: ("570.1", ("H200", "H200")))
    assert machine.check_gpus(WITH_GPUS) == ok(
        "GPUs", "2 x H200, driver 570.1, TensorFlow for CUDA 12.5"
    )


def test_gpus_that_tensorflow_does_not_see_are_a_warning(monkeypatch):
    monkeypatch.setattr(machine, "_driver", lambda: ("570.1", ("H200",)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "and-cuda" in machine.check_gpus(SOUND).mend
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "CUDA_VISIBLE_DEVICES='-1'" in machine.check_gpus(SOUND).found


def test_a_container_with_little_memory_is_a_warning(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_CGROUP_LIMIT", limit)
    limit.write_text("1073741824\n")
    found = machine.check_cpu()
    assert found.status is Status.WARNING and "1.00 GiB" in found.found
    limit.write_text("max\n")
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 17)
    assert machine.check_cpu().status is Status.OK


def test_a_machine_without_a_network_is_enough_for_itself(monkeypatch):
    real = machine.find_network

    def only_here(hosts, interface):
        if list(hosts) != ["localhost"]:
            raise TfparError("No network leads from here to there.")
        return real(["localhost"], interface)

    monkeypatch.setattr(machine, "find_network", only_here)
    found = machine.check_network()
    assert found.status is Status.WARNING
    assert "on this machine; others: No network leads" in found.found


@pytest.mark.parametrize(
    "variables, status, said",
    [
        ({}, Status.OK, "alone"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, Status.OK, "1 of 4.*Open MPI"),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}, Status.OK, "allocation n.1-2."),
        ({"RANK": "x", "WORLD_SIZE": "4"}, Status.MISSING, "RANK='x'"),
    ],
)
def test_the_job_is_told(monkeypatch, variables, status, said):
    monkeypatch.setattr(os, "environ", variables)
    found = machine.check_job()
    assert found.status is status
    assert re.search(said, found.found)


def test_caches_that_cannot_be_written_are_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("TFPAR_CACHE", str(tmp_path / "new" / "folder"))
    assert machine.check_caches().status is Status.OK
    assert not (tmp_path / "new").exists()
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("TFPAR_PLAN_CACHE", str(blocked / "plans"))
    found = machine.check_caches()
    assert found.status is Status.WARNING and "export TFPAR_PLAN_CACHE=" in found.mend


# --- trials --------------------------------------------------------------------------------------


def test_trials_run_alone_whoever_started_the_doctor(monkeypatch, trial_commands):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    trials.try_one_process()
    trials.try_processes("tensorflow", SOUND, default=True)
    assert not any({"RANK", "WORLD_SIZE"} & set(environ) for _, environ in trial_commands)


def test_two_ranks_do_not_share_a_gpu(monkeypatch, trial_commands):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    one_gpu = Probe("2.21.0", "3.15.0", "tensorflow", ("H200",))
    for probe in (one_gpu, WITH_GPUS):
        trials.try_processes("horovod", probe, default=True)
    seen = [environ["CUDA_VISIBLE_DEVICES"] for _, environ in trial_commands]
    assert seen == ["-1", "0,1"]


@pytest.mark.parametrize("default, status", [(True, Status.MISSING), (False, Status.WARNING)])
def test_a_trial_that_fails_says_why_and_how_to_see_more(monkeypatch, default, status):
    said = "tfpar run: rank 1 raised ValueError.\n  rank host\nthe end\n"
    monkeypatch.setattr(trials, "run", lambda *_: CommandResult(1, "", said))
    found = trials.try_processes("tensorflow", SOUND, default=default)
    assert isinstance(found, Finding)
    assert (found.status, found.found) == (status, "rank 1 raised ValueError.")
    assert "-m tfpar run -np 2 -H localhost:2 --backend tensorflow" in found.mend


# --- commands ------------------------------------------------------------------------------------


def test_a_command_that_does_not_end_is_ended_with_all_that_it_started():
    script = "sleep 60 & echo $!; wait"
    ended = run(["/bin/sh", "-c", script], 0.5)
    assert ended.code is None and "not done after" in ended.reason
    assert wait_until(lambda: not psutil.pid_exists(int(ended.out)), 5)


def test_a_command_that_cannot_be_started_is_said_to():
    assert "cannot be started: No such file" in run(["/no/such/program"], 5).reason


def test_the_reason_of_a_failure_is_its_last_line_or_its_signal():
    assert run(["/bin/sh", "-c", "echo out; echo why >&2; exit 3"], 20).reason == "why"
    assert run(["/bin/sh", "-c", "kill -9 $$"], 20).reason == "ended by signal 9"
    assert run(["/bin/sh", "-c", "exit 3"], 20).reason == "exit code 3"


# --- for real ------------------------------------------------------------------------------------


def doctor(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=variables(),
        text=True,
        capture_output=True,
        timeout=time_limit(limit_s),
    )


@pytest.mark.slow
def test_quick_finds_the_tensorflow_that_runs_these_tests():
    import keras
    import tensorflow as tf

    command = [sys.executable, "-m", "tfpar", "doctor", "--quick", "--json"]  # as users start it
    result = doctor(command, limit_s=240)
    assert "Traceback" not in result.stderr
    told = by_name(json.loads(result.stdout))
    assert told["TensorFlow"]["found"].startswith(tf.__version__)
    assert told["Keras"] == {
        "name": "Keras",
        "status": "ok",
        "found": f"{keras.__version__} on tensorflow",
        "mend": "",
    }
    assert "on this machine" in told["Network"]["found"]
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_everything_works_on_the_machine_of_these_tests(tmp_path):
    """The doctor starts what it tries by `sys.executable`."""
    code = (
        "import sys; from tfpar.__main__ import main; "
        "sys.executable = sys.argv[1]; sys.exit(main(['doctor', '--json']))"
    )
    executable = preloaded.executable(tmp_path)
    result = doctor(preloaded.python("-c", code, executable), limit_s=580)
    told = by_name(json.loads(result.stdout))
    assert result.returncode == 0, textwrap.indent(result.stdout, "  ")
    assert "as one device does" in told["One process"]["found"]
    assert told["Processes, tensorflow"]["status"] == "ok"
    if importlib.util.find_spec("horovod") is not None:
        assert "2 ranks exchange and train" in told["Processes, horovod"]["found"]
