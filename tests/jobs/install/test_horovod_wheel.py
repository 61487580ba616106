"""Horovod's wheel: what its cache keys on, when it is built, and what is said when it cannot be.

Nothing is downloaded or compiled: pip finds a made-up source release in a folder, whose setup.py
packs files, and the tools on PATH are scripts that do nothing.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import subprocess
import sys
import tarfile
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.time_limits import time_limit, wait_until
from tfpar.__main__ import main
from tfpar.jobs.install import horovod, toolchain
from tfpar.jobs.install.horovod import BuildLog
from tfpar.jobs.install.patches import PATCHES, patch_sources
from tfpar.jobs.install.wheel_cache import WheelFolder, WheelKey, default_cache
from tfpar.spec import TfparError

KEY = WheelKey("0.28.1", "1a2b", "2.21.0", "cpython-311", "linux-x86_64", mpi=False, nccl=False)
GUARD = "#if TENSORFLOW_VERSION >= 2006000000"

SETUP = """
import sys
from setuptools import setup
if "bdist_wheel" in sys.argv:
    {at_build}
packages = ["horovod", "horovod.tensorflow"]
setup(name="horovod", version="0.28.1", packages=packages, package_data={{"": ["*.cc"]}})
r'''
"""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tools, no network, no cache but the test's own."""
    for name in ("CXX", "CUDA_HOME", "NCCL_HOME", "MAKEFLAGS"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TFPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "registry"))


@pytest.fixture
def add_tool(tmp_path: Path) -> Callable[..., None]:
    def add(name: str, prints: str = "") -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\necho '{prints}'\n")
        path.chmod(0o755)

    return add


@pytest.fixture
def tools(add_tool: Callable[..., None]) -> None:
    add_tool("c++")
    add_tool("make")
    add_tool("cmake", "cmake version 3.25.1")


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a source release where pip finds it; `at_build` is run when its wheel is built."""

    def publish(at_build: str = "pass") -> None:
        root = source_tree(tmp_path / "horovod-0.28.1")
        setup = root / "setup.py"
        setup.write_text(SETUP.format(at_build=at_build) + setup.read_text() + "'''\n")
        for folder in ("horovod", "horovod/tensorflow"):
            (root / folder / "__init__.py").touch()
        (tmp_path / "registry").mkdir()
        archive = tmp_path / "registry" / "horovod-0.28.1.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(root, root.name)
        made = hashlib.sha256(archive.read_bytes()).hexdigest()
        monkeypatch.setattr(horovod, "SOURCES_SHA256", made)

    return publish


def source_tree(root: Path) -> Path:
    """The lines that are patched, each in its file, and nothing else."""
    for patch in PATCHES:
        path = root / patch.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(patch.old)
    return root


def cached(*, of: WheelKey) -> Path:
    """A file in place of the wheel that has been built for `of`."""
    wheel = WheelFolder.make(default_cache(), of).path / "horovod-0.28.1-cp311-linux_x86_64.whl"
    wheel.touch()
    return wheel


@pytest.mark.parametrize(
    "change",
    [
        {"horovod": "0.28.2"},
        {"patch": "2b3c"},
        {"tensorflow": "2.20.0"},
        {"mpi": True},
        {"python": "cpython-312"},
        {"platform": "linux-aarch64"},
        {"nccl": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_version_or_option_is_another_wheel(change):
    assert str(dataclasses.replace(KEY, **change)) != str(KEY)


def test_the_key_tells_what_the_wheel_is_for():
    assert str(KEY) == "horovod-0.28.1-1a2b-tf2.21.0-cpython-311-linux-x86_64-gloo"


def test_mpi_is_built_in_where_its_compiler_is_found(add_tool):
    assert not horovod.wheel_key().mpi
    add_tool("mpicxx")
    assert horovod.wheel_key().mpi
    assert not horovod.wheel_key(mpi=False).mpi


def test_nccl_is_built_in_where_it_and_nvcc_are_found(add_tool, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path / "nccl"))
    (tmp_path / "nccl/include").mkdir(parents=True)
    (tmp_path / "nccl/include/nccl.h").touch()
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path))
    add_tool("nvcc")
    assert horovod.wheel_key().nccl
    environment = toolchain.build_environment(tmp_path, mpi=False, nccl=True)
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environment["HOROVOD_CUDA_HOME"] == str(tmp_path)
    assert environment["HOROVOD_NCCL_HOME"] == str(tmp_path / "nccl")


def test_a_kept_wheel_needs_neither_tools_nor_network():
    wheel = cached(of=horovod.wheel_key())
    assert horovod.build_wheel() == wheel


def test_the_wheel_of_another_tensorflow_is_not_taken(monkeypatch):
    cached(of=horovod.wheel_key())
    monkeypatch.setattr(toolchain, "tensorflow_version", lambda: "2.99.0")
    with pytest.raises(TfparError, match="no C\\+\\+ compiler"):
        horovod.build_wheel()


def test_all_patches_are_applied_and_applied_once(tmp_path):
    root = source_tree(tmp_path / "horovod-0.28.1")
    patch_sources(root)
    once = {patch.path: (root / patch.path).read_text() for patch in PATCHES}
    guard = once["horovod/tensorflow/xla_mpi_ops.cc"]
    assert guard == f"{GUARD} && TENSORFLOW_VERSION < 2016000000\n"
    patch_sources(root)
    assert once == {patch.path: (root / patch.path).read_text() for patch in PATCHES}


@pytest.mark.parametrize("text", ["", "#if TENSORFLOW_VERSION >= 3\n", f"{GUARD}\n{GUARD}\n"])
def test_other_sources_are_not_patched(tmp_path, text):
    root = source_tree(tmp_path / "horovod-0.29.0")
    (root / "horovod/tensorflow/xla_mpi_ops.cc").write_text(text)
    with pytest.raises(TfparError, match="horovod-0.29.0 has another xla_mpi_ops.cc"):
        patch_sources(root)


def test_missing_tools_are_named_with_what_to_install():
    with pytest.raises(TfparError) as caught:
        horovod.build_wheel(mpi=True)
    message = str(caught.value)
    for part in ("C++ compiler", "make", "mpicxx", "apt-get install g++ make", "--no-mpi"):
        assert part in message


@pytest.mark.parametrize(
    ("version", "missing"), [("3.25.1", False), ("4.1.0", True), ("3.5.0", True)]
)
def test_an_unfit_cmake_is_replaced_for_the_build(add_tool, version, missing):
    add_tool("cmake", f"cmake version {version}")
    assert any("cmake" in name for name in toolchain.missing_packages()) == missing


def test_the_build_environment_is_not_that_of_make_or_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", "w -- --jobserver-auth=3,4")
    monkeypatch.setenv("HOROVOD_WITHOUT_GLOO", "1")
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "MPI")
    environment = toolchain.build_environment(tmp_path, mpi=False, nccl=False)
    assert environment["MAKEFLAGS"].startswith("-j") and int(environment["MAKEFLAGS"][2:]) >= 1
    assert environment["HOROVOD_WITH_GLOO"] == environment["HOROVOD_WITHOUT_MPI"] == "1"
    assert not {"HOROVOD_WITHOUT_GLOO", "HOROVOD_GPU_OPERATIONS"} & set(environment)


@pytest.mark.slow
def test_two_who_want_the_wheel_build_it_once(tools, publish, tmp_path):
    publish()
    said: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(horovod.build_wheel, say=said.append, limit_s=time_limit(60))
            for _ in range(2)
        ]
        wheels = {future.result(timeout=time_limit(90)) for future in futures}
    assert len(said) == 1 and "build.log" in said[0]
    (wheel,) = wheels
    guard = zipfile.ZipFile(wheel).read("horovod/tensorflow/xla_mpi_ops.cc").decode()
    assert "TENSORFLOW_VERSION < 2016000000" in guard
    assert {p.name for p in wheel.parent.iterdir()} == {"build.log", "lock", wheel.name}
    (tmp_path / "registry/horovod-0.28.1.tar.gz").unlink()
    assert horovod.build_wheel(say=said.append) == wheel
    assert len(said) == 1
    with pytest.raises(TfparError, match="Downloading"):
        horovod.build_wheel(rebuild=True)
    assert horovod.build_wheel() == wheel


@pytest.mark.slow
def test_a_failed_build_tells_why_and_where_its_log_is(tools, publish):
    publish(at_build='sys.exit("common.cc:7:1: fatal error: mpi.h: No such file or directory")')
    with pytest.raises(TfparError) as caught:
        horovod.build_wheel()
    message = str(caught.value)
    log = WheelFolder.make(default_cache(), horovod.wheel_key()).log
    assert "fatal error: mpi.h" in message and str(log) in message
    assert "subprocess-exited-with-error" not in message
    assert "fatal error: mpi.h" in log.read_text()
    assert not list(log.parent.glob("*.whl"))


def test_other_sources_of_the_version_are_not_built(tools, publish, monkeypatch):
    publish()
    monkeypatch.setattr(horovod, "SOURCES_SHA256", "0" * 64)
    with pytest.raises(TfparError, match="not those that were released.*PIP_FIND_LINKS"):
        horovod.build_wheel()


def test_a_registry_out_of_reach_is_named(tools):
    with pytest.raises(TfparError, match="(?s)horovod==0.28.1 failed.*build.log.*PIP_FIND_LINKS"):
        horovod.build_wheel()


def test_a_command_past_its_time_is_ended_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.defpath)
    log = BuildLog(tmp_path / "log", time.monotonic() + 0.5)
    command = ["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"]
    begin = time.monotonic()
    with pytest.raises(TfparError, match="Compiling took too long"):
        log.run(command, doing="Compiling", environment=os.environ, mend="")
    assert time.monotonic() - begin < time_limit(20)
    pid = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not _alive(pid), 20)


def test_whoever_waits_is_told_of_each_command(tmp_path):
    told: list[str] = []
    log = BuildLog(tmp_path / "log", time.monotonic() + time_limit(60), told.append)
    for doing in ("Downloading", "Compiling"):
        log.run([sys.executable, "-c", ""], doing=doing, environment=os.environ, mend="")
    assert told == ["Downloading", "Compiling"]


def test_who_waits_too_long_for_another_build_is_told_whose(tmp_path):
    folder = WheelFolder.make(tmp_path, KEY)
    with folder.locked(1):
        with pytest.raises(TfparError, match=rf"pid {os.getpid()}\).*more than 0 s.*lock"):
            with folder.locked(0.3):
                pass
    with folder.locked(0.3):
        pass


def test_the_lock_of_a_killed_build_is_free(tmp_path):
    folder = WheelFolder.make(tmp_path, KEY)
    hold = f"""
        import sys, time
        from pathlib import Path
        from tfpar.jobs.install.wheel_cache import WheelFolder
        with WheelFolder(Path({str(folder.path)!r})).locked(1):
            print("held", flush=True)
            time.sleep(60)
        """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(hold)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(TfparError, match=f"pid {holder.pid}"):
            with folder.locked(0):
                pass
    finally:
        holder.kill()
        holder.wait(10)
    with folder.locked(5):
        pass


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TFPAR_CACHE", str(tmp_path / "file"))
    with pytest.raises(TfparError, match="(?s)file/wheels.*Set TFPAR_CACHE"):
        horovod.build_wheel()


def fake_installed(folder: Path, monkeypatch: pytest.MonkeyPatch, init: str) -> None:
    package = folder / "site" / "horovod"
    (package / "runner").mkdir(parents=True)
    (package / "__init__.py").write_text(init)
    (package / "runner" / "__init__.py").touch()
    (package / "runner" / "launch.py").touch()
    (package / "tensorflow.py").write_text(
        "def gloo_built(): return True\ndef mpi_built(): return False\ndef nccl_built(): return 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))


def test_what_is_installed_says_what_it_was_built_with(tmp_path, monkeypatch):
    fake_installed(tmp_path, monkeypatch, "__version__ = '0.28.1'\n")
    installed = horovod.verify(limit_s=time_limit(60))
    assert installed == horovod.InstalledHorovod("0.28.1", gloo=True, mpi=False, nccl=False)
    assert str(installed) == "Horovod 0.28.1 with Gloo"


def test_an_installed_horovod_that_cannot_be_imported_is_told(tmp_path, monkeypatch):
    fake_installed(tmp_path, monkeypatch, "raise ImportError('libmpi.so.40: no such file')\n")
    with pytest.raises(TfparError, match="libmpi.so.40: no such file.*--rebuild"):
        horovod.verify(limit_s=time_limit(60))


def test_an_import_that_hangs_is_ended(tmp_path, monkeypatch):
    fake_installed(tmp_path, monkeypatch, "import time\ntime.sleep(60)\n")
    with pytest.raises(TfparError, match="more than 1 s"):
        horovod.verify(limit_s=1)


def test_the_command_copies_the_wheel_where_it_is_asked_to(tmp_path, capsys):
    wheel = cached(of=horovod.wheel_key())
    folder = tmp_path / "out" / "here"
    assert main(["install-horovod", "--no-mpi", "--wheel-only", str(folder)]) == 0
    copy = folder / wheel.name
    assert copy.exists() and capsys.readouterr().out == f"{copy}\n"


def test_the_module_fails_with_one_line_and_exit_code_2(capsys):
    assert horovod.main(["--mpi"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "mpicxx" in error


def _alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
