"""Horovod's wheel for the TensorFlow installed beside this interpreter: built, kept, installed.

Horovod's last release does not compile against TensorFlow 2.16 and later as it is: its sources are
downloaded with pip, patched (`tfpar.jobs.install.patches`) and compiled here, with Gloo, with MPI
where `mpicxx` is on PATH and with NCCL where `nvcc` and NCCL's header are found. The wheel is kept
below $TFPAR_CACHE; the next call with the same versions and options needs neither network nor
compiler.

A wheel with NCCL has been built and imported (CUDA 13, TensorFlow 2.21); it has never run on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfpar.jobs.install import toolchain
from tfpar.jobs.install.patches import patch_sources, patch_version
from tfpar.jobs.install.wheel_cache import WheelFolder, WheelKey, default_cache
from tfpar.progress import reporting
from tfpar.spec.errors import TfparError

logger = logging.getLogger("tfpar")

HOROVOD_VERSION = "0.28.1"
SOURCES_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""The hash of the sources of that version, as they were released."""
TIME_LIMIT_S = 1800.0

# What Horovod imports as it runs; the extra `tfpar[horovod]` holds the same.
RUNTIME_NEEDS = ("cloudpickle", "packaging", "psutil", "pyyaml")

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_VERIFY_LIMIT_S = 300.0
_VERIFY = """
import json
import horovod, horovod.runner.launch, horovod.tensorflow as hvd
print(json.dumps({"version": horovod.__version__, "gloo": bool(hvd.gloo_built()),
                  "mpi": bool(hvd.mpi_built()), "nccl": bool(hvd.nccl_built())}))
"""


@dataclasses.dataclass(frozen=True, slots=True)
class InstalledHorovod:
    """The Horovod that this interpreter imports, and the libraries that it was built with."""

    version: str
    gloo: bool
    mpi: bool
    nccl: bool

    def __str__(self) -> str:
        libraries = {"Gloo": self.gloo, "MPI": self.mpi, "NCCL": self.nccl}
        return f"Horovod {self.version} with " + ", ".join(n for n, has in libraries.items() if has)


def wheel_key(*, mpi: bool | None = None, nccl: bool | None = None) -> WheelKey:
    """The key of the wheel for this interpreter; None: with MPI or NCCL if they are found."""
    return WheelKey(
        horovod=HOROVOD_VERSION,
        patch=patch_version(),
        tensorflow=toolchain.tensorflow_version(),
        python=str(sys.implementation.cache_tag),
        platform=sysconfig.get_platform(),
        mpi=toolchain.has_mpi() if mpi is None else mpi,
        nccl=toolchain.has_nccl() if nccl is None else nccl,
    )


def build_wheel(
    *,
    mpi: bool | None = None,
    nccl: bool | None = None,
    rebuild: bool = False,
    cache: Path | None = None,
    limit_s: float = TIME_LIMIT_S,
    say: Callable[[str], object] = logger.info,
    tell: Callable[[str], object] = lambda doing: None,
) -> Path:
    """The wheel for this interpreter and its TensorFlow, from the cache or built.

    Args:
        mpi, nccl: build it in; None: if it is found on this machine.
        rebuild: build even if the cache has it.
        cache: the folder for wheels (default: $TFPAR_CACHE, or ~/.cache/tfpar).
        limit_s: seconds for the build, and for another process that builds the same.
        say: told, before a build, what takes so long.
        tell: reports progress: what is done next, for whoever waits.

    Raises:
        TfparError: a tool is missing, or download or build failed; with the path of the log.
    """
    key = wheel_key(mpi=mpi, nccl=nccl)
    folder = WheelFolder.make(cache or default_cache(), key)
    wheel = folder.wheel()
    if wheel and not rebuild:
        return wheel
    with folder.locked(limit_s):
        wheel = folder.wheel()  # perhaps built by whom this one waited for
        if wheel and not rebuild:
            return wheel
        toolchain.check_tools(mpi=key.mpi, nccl=key.nccl)
        say(
            f"Building Horovod {key.horovod} for TensorFlow {key.tensorflow}, which takes minutes; "
            f"log: {folder.log}"
        )
        folder.log.write_text("")
        with tempfile.TemporaryDirectory(prefix="tfpar-horovod-") as scratch:
            log = BuildLog(folder.log, time.monotonic() + limit_s, tell)
            return folder.put(_build(key, Path(scratch), log))


def install(
    wheel: Path,
    *,
    limit_s: float = TIME_LIMIT_S,
    tell: Callable[[str], object] = lambda doing: None,
) -> InstalledHorovod:
    """Install `wheel` into this interpreter's environment, and what it needs that is missing.

    pip's output is kept in `install.log` beside the wheel.

    Raises:
        TfparError: pip failed, or the installed Horovod cannot be imported.
    """
    log = BuildLog(wheel.parent / "install.log", time.monotonic() + limit_s, tell)
    # By force: the build for another TensorFlow has the same version.
    command = [*_PIP, "install", "--no-index", "--no-deps", "--force-reinstall", str(wheel)]
    needs = [*_PIP, "install", *RUNTIME_NEEDS]
    mend = "Install it by hand with pip."
    log.run(command, doing=f"Installing {wheel.name}", environment=os.environ, mend=mend)
    log.run(needs, doing="Installing what Horovod needs", environment=os.environ, mend=mend)
    return verify()


def verify(*, limit_s: float = _VERIFY_LIMIT_S) -> InstalledHorovod:
    """Import Horovod in a process of its own and ask what it was built with.

    Raises:
        TfparError: it cannot be imported, or not within `limit_s` seconds.
    """
    mend = "`tfpar install-horovod --rebuild` builds it anew."
    try:
        result = subprocess.run(
            [sys.executable, "-c", _VERIFY],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise TfparError(f"Importing Horovod took more than {limit_s:.0f} s. {mend}") from None
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise TfparError(f"Horovod cannot be imported: {lines[-1]}. {mend}")
    return InstalledHorovod(**json.loads(result.stdout.splitlines()[-1]))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that `run` takes."""
    parser.add_argument("--rebuild", action="store_true", help="build even if a wheel is kept")
    parser.add_argument(
        "--mpi", action=argparse.BooleanOptionalAction, help="with MPI (default: if mpicxx is here)"
    )
    parser.add_argument(
        "--nccl",
        action=argparse.BooleanOptionalAction,
        help="with NCCL (default: if nvcc and nccl.h are here)",
    )
    parser.add_argument(
        "--wheel-only", type=Path, metavar="DIR", help="copy the wheel to DIR and install nothing"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT_S,
        metavar="SECONDS",
        help="for the build (default: %(default).0f)",
    )


def run(options: argparse.Namespace) -> int:
    """Build and install as the options say; returns the exit code."""
    with reporting("installing Horovod") as report:
        wheel = build_wheel(
            mpi=options.mpi,
            nccl=options.nccl,
            rebuild=options.rebuild,
            limit_s=options.time_limit,
            say=lambda text: print(text, flush=True),
            tell=report.tell,
        )
        if options.wheel_only:
            options.wheel_only.mkdir(parents=True, exist_ok=True)
            done = str(shutil.copy(wheel, options.wheel_only))
        else:
            found = install(wheel, limit_s=options.time_limit, tell=report.tell)
            done = f"Installed {found} from {wheel}"
    print(done)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m tfpar.jobs.install.horovod`: the same as `tfpar install-horovod`."""
    parser = argparse.ArgumentParser("tfpar.jobs.install.horovod", description=__doc__)
    add_options(parser)
    try:
        return run(parser.parse_args(argv))
    except TfparError as error:
        print(error, file=sys.stderr)
        return 2


def _build(key: WheelKey, scratch: Path, log: BuildLog) -> Path:
    """The path, below `scratch`, of the wheel that has been built."""
    packages = scratch / "packages"
    environment = toolchain.build_environment(packages, mpi=key.mpi, nccl=key.nccl)
    missing = toolchain.missing_packages()
    if missing:
        log.run(
            [*_PIP, "install", "--target", str(packages), *missing],
            doing=f"Installing what the build of Horovod needs ({', '.join(missing)})",
            environment=environment,
            mend="Let pip reach a package registry, or install them by hand.",
        )
    source = f"horovod=={key.horovod}"
    log.run(
        [
            *_PIP,
            "download",
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            ":all:",
            "--dest",
            str(scratch),
            source,
        ],
        doing=f"Downloading the sources of {source}",
        environment=environment,
        mend="Let pip reach a package registry, or fetch the .tar.gz elsewhere and name its folder "
        "in PIP_FIND_LINKS.",
    )
    root = _unpack(scratch / f"horovod-{key.horovod}.tar.gz", scratch)
    patch_sources(root)
    log.run(
        # By itself an older pip calls setup.py, and prints a program of its own if that fails.
        [
            *_PIP,
            "wheel",
            "--use-pep517",
            "--verbose",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            str(scratch / "wheel"),
            str(root),
        ],
        doing=f"Building {source} for TensorFlow {key.tensorflow}",
        environment=environment,
        mend="Mend what the log names"
        + (", or leave MPI out with --no-mpi." if key.mpi else ".")
        + (" --no-nccl leaves NCCL out." if key.nccl else ""),
    )
    return next((scratch / "wheel").glob("*.whl"))


def _unpack(archive: Path, folder: Path) -> Path:
    if not archive.exists():
        raise TfparError(f"pip downloaded no {archive.name}. Name a folder in PIP_FIND_LINKS.")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SOURCES_SHA256:
        raise TfparError(
            f"The sources that pip found are not those that were released: {archive.name} has the "
            f"SHA-256 {found}, the release {SOURCES_SHA256}. Look at where pip takes packages from "
            "(`pip config list`), or name a folder with the released file in PIP_FIND_LINKS."
        )
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:  # Python 3.10 before 3.10.12
            tar.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


# --- Commands of a build: run with a time limit, all they print kept in one file ---

_TELLING = re.compile(r"\berror\b|fatal|killed|no such file|not found|cannot|could not", re.I)
# What pip, make and setuptools add once a command below them has failed.
_ECHO = re.compile(
    r"subprocess-exited-with-error|failed (building|to build)|this error originates|\*\*\* \[|"
    r"CalledProcessError|see above for output|exit code|exit status|build failed|"
    r"finished with status",
    re.I,
)
_NUM_LINES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class BuildLog:
    """Log of a build, whose commands run one by one until `deadline` (of `time.monotonic()`).

    Attributes:
        path: of the file.
        tell: reports progress: what is done, as each command begins.
    """

    path: Path
    deadline: float
    tell: Callable[[str], object] = lambda doing: None

    def run(
        self, command: Sequence[str], *, doing: str, environment: Mapping[str, str], mend: str
    ) -> None:
        """Run `command`; what it prints is added to the file.

        Raises:
            TfparError: it failed or took too long. The message begins with `doing`, quotes the
                lines that tell why, and ends with `mend`.
        """
        self.tell(doing)
        with self.path.open("a") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            begin = log.tell()
            # A session of its own: a compiler started by make must not outlive the time limit.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(max(0.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(process)
                raise TfparError(
                    f"{doing} took too long and was stopped; log: {self.path}. Give it more with "
                    f"--time-limit SECONDS, or look for what it waits for."
                ) from None
            except BaseException:
                _kill(process)
                raise
        if code:
            lines = " | ".join(self._telling(begin))
            raise TfparError(f"{doing} failed: {lines} (whole log: {self.path}). {mend}")

    def _telling(self, begin: int) -> list[str]:
        """The last lines, from byte `begin` on, that name an error; the last ones if none does."""
        text = self.path.read_bytes()[begin:].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if _TELLING.search(line) and not _ECHO.search(line)]
        return [line[:300] for line in (telling or lines)[-_NUM_LINES:]]


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
