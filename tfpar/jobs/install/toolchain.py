"""Toolchain that compiles Horovod: tools on PATH, and environment variables of its build."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

from tfpar.spec.errors import TfparError

_CMAKE_RANGE = (3, 13), (4, 0)  # Gloo's build files ask for policies that CMake 4 dropped
CMAKE_REQUIREMENT = "cmake>=3.13,<4"
PYTHON_NEEDS = ("setuptools", "wheel", "packaging")
_USERS = ("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_", "HOROVOD_BUILD_")
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu")


def tensorflow_version() -> str:
    """The version of the TensorFlow that is installed beside this interpreter.

    Raises:
        TfparError: there is none.
    """
    for name in _TENSORFLOWS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise TfparError("Horovod is built for one TensorFlow, and none is installed here. Install it.")


def has_mpi() -> bool:
    """Whether an MPI compiler is on PATH."""
    return shutil.which("mpicxx") is not None


def has_nccl() -> bool:
    """Whether CUDA's compiler and NCCL's header are found."""
    return _cuda_home() is not None and _nccl_home() is not None


def check_tools(*, mpi: bool, nccl: bool) -> None:
    """Make sure that a build can start.

    Raises:
        TfparError: names all that is missing, and what to install.
    """
    compilers = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"]
    needs = [
        ("C++ compiler", any(shutil.which(c) for c in compilers if c), "g++"),
        ("make", shutil.which("make"), "make"),
        ("MPI compiler (mpicxx)", not mpi or has_mpi(), "libopenmpi-dev"),
        ("CUDA compiler (nvcc)", not nccl or _cuda_home(), "cuda-toolkit"),
        ("NCCL header (nccl.h)", not nccl or _nccl_home(), "libnccl-dev"),
    ]
    missing = [(what, package) for what, found, package in needs if not found]
    if not missing:
        return
    hints = ["apt-get install " + " ".join(package for _, package in missing)]
    hints += ["--no-mpi builds without MPI"] * (mpi and not has_mpi())
    hints += ["HOROVOD_NCCL_HOME names NCCL's folder"] * (nccl and not _nccl_home())
    raise TfparError(
        f"Horovod's wheel cannot be built, there is no {', no '.join(w for w, _ in missing)}. "
        f"Install what is missing (Debian, Ubuntu: {'; '.join(hints)}) and try again."
    )


def missing_packages() -> list[str]:
    """Requirements that the build has and this machine has not: CMake and Python packages."""
    return [
        *([] if _cmake() else [CMAKE_REQUIREMENT]),
        *(name for name in PYTHON_NEEDS if not _installed(name)),
    ]


def build_environment(extra_packages: Path, *, mpi: bool, nccl: bool) -> dict[str, str]:
    """The environment of the build.

    Horovod's build asks the interpreter that runs it for TensorFlow, so that this one's is built
    for. `extra_packages` is the folder into which `missing_packages()` have been installed.
    """
    # What Horovod is built with is said here alone; where CUDA and NCCL lie, the user may say.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HOROVOD_") or name.startswith(_USERS)
    }
    paths = [str(extra_packages), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_CMAKE": _cmake() or str(extra_packages / "bin" / "cmake"),
        "CMAKE_GENERATOR": "Unix Makefiles",
        # Under `make`, an inherited MAKEFLAGS names job slots that this build cannot use.
        "MAKEFLAGS": f"-j{_num_cores()}",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    cuda, nccl_home = _cuda_home(), _nccl_home()
    if nccl and cuda and nccl_home:
        environment |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": cuda,
            "CUDAToolkit_ROOT": cuda,
            "HOROVOD_NCCL_HOME": nccl_home,
        }
    return environment


def _cmake() -> str | None:
    path = os.environ.get("HOROVOD_CMAKE") or shutil.which("cmake")
    if not path:
        return None
    try:
        text = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"version (\d+)\.(\d+)", text)
    low, high = _CMAKE_RANGE
    return path if found and low <= (int(found[1]), int(found[2])) < high else None


def _cuda_home() -> str | None:
    homes = [os.environ.get("HOROVOD_CUDA_HOME"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc:
        homes.append(str(Path(nvcc).resolve().parents[1]))
    return next((home for home in homes if home and Path(home, "bin", "nvcc").exists()), None)


def _nccl_home() -> str | None:
    homes = [os.environ.get("HOROVOD_NCCL_HOME"), os.environ.get("NCCL_HOME"), "/usr", "/usr/local"]
    homes.append(_cuda_home())
    return next((home for home in homes if home and Path(home, "include", "nccl.h").exists()), None)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
