"""Programs and packages: those that tfpar needs, and those that it can use."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tfpar.jobs.doctor.command import run
from tfpar.jobs.doctor.finding import Finding, missing, ok, warning
from tfpar.jobs.doctor.probe import Probe
from tfpar.jobs.install import horovod, toolchain
from tfpar.spec.errors import TfparError

_LIMIT_S = 20.0
_PIP = f"{sys.executable} -m pip install"
_USE_TENSORFLOW = "export KERAS_BACKEND=tensorflow"
_EXTRAS = {
    "keras-hub": ("hub", "KerasHub's models"),
    "scikit-learn": ("examples", "the examples' data sets"),
}


def check_python() -> Finding:
    """The interpreter's version against what tfpar declares."""
    version, wanted = platform.python_version(), _declared("Requires-Python")
    if wanted and not SpecifierSet(wanted).contains(version):
        mend = f"Make a virtual environment with Python {wanted}, and install tfpar into it."
        return missing("Python", f"{version}; tfpar needs {wanted}", mend)
    return ok("Python", f"{version}, {sys.executable}")


def check_tensorflow(probe: Probe) -> Finding:
    """Whether it is installed, in the declared range, and can be loaded."""
    try:
        version = toolchain.tensorflow_version()
    except TfparError:
        return missing("TensorFlow", "not installed", f"{_PIP} '{_requirement('tensorflow')}'")
    if not probe.tensorflow:
        mend = f"{_PIP} --force-reinstall 'tensorflow=={version}'"
        return missing("TensorFlow", f"{version} cannot be loaded: {probe.error}", mend)
    return _in_range("TensorFlow", version)


def check_keras(probe: Probe) -> Finding:
    """Whether it is installed, in the declared range, and on TensorFlow."""
    try:
        version = importlib.metadata.version("keras")
    except importlib.metadata.PackageNotFoundError:
        return missing("Keras", "not installed", f"{_PIP} '{_requirement('keras')}'")
    if not probe.keras:
        if not probe.tensorflow:
            return missing("Keras", f"{version}; TensorFlow is not there", "Mend TensorFlow first.")
        mend = _USE_TENSORFLOW  # a package of another backend may be what is lacking
        if os.environ.get("KERAS_BACKEND") == "tensorflow":
            mend = f"{_PIP} --force-reinstall 'keras=={version}'"
        return missing("Keras", f"{version} cannot be loaded: {probe.error}", mend)
    found = _in_range("Keras", version, f" on {probe.backend}")
    if not found.mend and probe.backend != "tensorflow":
        by = "KERAS_BACKEND" if os.environ.get("KERAS_BACKEND") else "~/.keras/keras.json"
        said = f"{found.found}, as {by} says; tfpar needs TensorFlow"
        return missing("Keras", said, _USE_TENSORFLOW)
    return found


def check_horovod(probe: Probe) -> Finding:
    """Whether it is installed and works with this TensorFlow."""
    if importlib.util.find_spec("horovod") is None:
        found = "not installed; ranks use TensorFlow's own collectives"
        return warning("Horovod", found, "tfpar install-horovod")
    if not probe.keras:  # which Horovod imports
        return warning("Horovod", "installed; Keras is not there", "Mend Keras first.")
    try:
        installed = horovod.verify()
    except TfparError as error:
        # What makes it needed is that it is there: `tfpar run` takes it by default.
        why = str(error).split(" `tfpar")[0].rstrip(".")
        return missing("Horovod", why, "tfpar install-horovod --rebuild")
    if probe.gpus and not installed.nccl:
        mend = "Install CUDA's compiler and NCCL, then: tfpar install-horovod --rebuild --nccl"
        return warning("Horovod", f"{installed}; without NCCL GPUs talk through the host", mend)
    return ok("Horovod", str(installed))


def check_build_tools(horovod_found: Finding) -> Finding | None:
    """Check the tools that build Horovod; None where it need not be built."""
    if not horovod_found.mend:
        return None
    mpi, nccl = toolchain.has_mpi(), toolchain.has_nccl()
    try:
        toolchain.check_tools(mpi=mpi, nccl=nccl)
    except TfparError as error:
        what, _, mend = str(error).partition(". ")
        return warning("Build tools", what, mend)
    libraries = "Gloo" + ", MPI" * mpi + ", NCCL" * nccl
    fetched = toolchain.missing_packages()
    needs = f"; pip will fetch {', '.join(fetched)}" if fetched else ""
    return ok("Build tools", f"all there for Horovod with {libraries}{needs}")


def check_mpi() -> Finding:
    """Open MPI's launcher."""
    mend = "Only for `tfpar run --mpi` (Debian, Ubuntu): apt-get install openmpi-bin"
    if shutil.which("mpirun") is None:
        return warning("Open MPI", "no mpirun on PATH", mend)
    ended = run(["mpirun", "--version"], _LIMIT_S)
    first = (ended.out.strip() or ended.reason).splitlines()[0]
    if ended.code != 0 or "Open MPI" not in first:
        return warning("Open MPI", f"mpirun is not Open MPI's: {first}", mend)
    return ok("Open MPI", first)


def check_ssh() -> Finding:
    """Check ssh, which starts ranks on other machines."""
    if shutil.which("ssh") is None:
        mend = "Only for ranks on other machines (Debian, Ubuntu): apt-get install openssh-client"
        return warning("ssh", "not on PATH", mend)
    ended = run(["ssh", "-V"], _LIMIT_S)
    if ended.code != 0:
        return warning("ssh", f"does not run: {ended.reason}", "Install OpenSSH's client anew.")
    return ok("ssh", (ended.err.strip() or ended.out.strip()).split(",")[0])


def check_extras() -> Finding:
    """Packages that tfpar's extras name."""
    found, lacking = [], []
    for package in _EXTRAS:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lacking.append(package)
    if not lacking:
        return ok("Extras", ", ".join(found))
    names = ",".join(_EXTRAS[package][0] for package in lacking)
    uses = " and ".join(_EXTRAS[package][1] for package in lacking)
    absent = [f"no {package}" for package in lacking]
    return warning("Extras", ", ".join(found + absent), f"Only for {uses}: {_PIP} 'tfpar[{names}]'")


def _in_range(name: str, version: str, more: str = "") -> Finding:
    requirement = _requirement(name.lower())
    wanted = Requirement(requirement).specifier
    if not wanted.contains(version, prereleases=True):
        found = f"{version}{more}; tfpar needs {wanted}"
        return missing(name, found, f"{_PIP} --upgrade '{requirement}'")
    return ok(name, f"{version}{more}")


def _requirement(package: str) -> str:
    """Return tfpar's requirement of a package, as `keras>=3.8`.

    The installed tfpar declares it, so that pyproject.toml is its only place; the package's name
    alone if tfpar is not installed.

    The installed tfpar says it, so that pyproject.toml is its only place.
    """
    try:
        declared = map(Requirement, importlib.metadata.requires("tfpar") or ())
    except importlib.metadata.PackageNotFoundError:
        return package
    return next((str(r) for r in declared if r.name == package and not r.marker), package)


def _declared(field: str) -> str:
    try:
        return importlib.metadata.metadata("tfpar")[field]
    except importlib.metadata.PackageNotFoundError:
        return ""
