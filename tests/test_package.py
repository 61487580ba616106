"""The package as users install it: a wheel and an sdist, away from this checkout and its tests."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import tomlkit
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tfpar
from tests.time_limits import time_limit

ROOT = Path(__file__).parents[1]
PROJECT = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8")).unwrap()["project"]
EXTRAS = PROJECT["optional-dependencies"]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--no-index", "--quiet")

TRAIN = """
import numpy as np
import quickstart
import tfpar as tap

data = np.random.rand(16, 8, 8, 1).astype("float32"), np.arange(16) % 10
with tap.auto_parallel(quickstart.MESH, cluster="dgx-a100", verbose=0):
    model = quickstart.build_convnet()
history = model.fit(*data, batch_size=16, verbose=0).history
alone = quickstart.build_convnet().fit(*data, batch_size=16, verbose=0).history
np.testing.assert_allclose(history["loss"], alone["loss"], rtol=1e-2)
tap.plan_of(model).save("plan.json")
print(tap.__file__)
"""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("package")]


def run(*command: str | Path, **options) -> str:
    """What it prints; a command that fails is an error with what it said."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=time_limit(240),
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folders of a wheel of the sources, of an sdist, and of a wheel of that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    # A copy, since a build leaves files beside the sources, and takes up those of the last one.
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", ignore=left_out)
    build = [*PIP, "wheel", *OFFLINE, "--no-deps", "--no-build-isolation", "--wheel-dir"]
    make_sdist = "from setuptools import build_meta; build_meta.build_sdist('../sdist')"
    run(sys.executable, "-c", make_sdist, cwd=source)
    run(*build, folder / "wheel", source)
    (sdist,) = (folder / "sdist").iterdir()
    run(*build, folder / "wheel_of_sdist", sdist)
    return folder


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    """The programs of an environment with the wheel, and with the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    run(*PIP, "--python", folder / "bin/python", "install", *OFFLINE, "--no-deps", wheel(dist))
    # Later, so that pip sees no other tfpar. What an editable one leaves there is not read.
    paths = "".join(f"{sysconfig.get_path(name)}\n" for name in ("purelib", "platlib"))
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "needs.pth").write_text(paths)
    return folder / "bin"


def wheel(dist: Path, folder: str = "wheel") -> Path:
    (only,) = (dist / folder).iterdir()
    return only


def names(path: Path) -> set[str]:
    return set(zipfile.ZipFile(path).namelist())


@pytest.fixture
def away(monkeypatch, tmp_path):
    """A folder to work in, outside of the checkout and with no way to it."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_wheel_has_all_of_the_package_and_nothing_else(dist):
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tfpar").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"tfpar/py.typed", "tfpar/cluster/presets/dgx-a100.toml"} < here
    found = {name for name in names(wheel(dist)) if ".dist-info/" not in name}
    assert found == here


def test_an_sdist_makes_the_same_wheel(dist):
    (sdist,) = (dist / "sdist").iterdir()
    assert sdist.name == f"tfpar-{tfpar.__version__}.tar.gz"
    assert names(wheel(dist, "wheel_of_sdist")) == names(wheel(dist))
    with tarfile.open(sdist) as tar:
        found = {Path(name).parts[1] for name in tar.getnames() if "/" in name}
    sources = {"tfpar", "pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md"}
    assert found == sources | {"MANIFEST.in", "PKG-INFO", "setup.cfg", "tfpar.egg-info"}


def test_a_wheel_names_what_it_needs_by_extra(dist):
    with zipfile.ZipFile(wheel(dist)) as file:
        (path,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(file.read(path))
    assert metadata["Version"] == tfpar.__version__
    needs = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    assert set(metadata.get_all("Provides-Extra")) == set(EXTRAS)
    for extra, asked in {"": PROJECT["dependencies"], **EXTRAS}.items():
        found = {
            (canonicalize_name(need.name), need.specifier)
            for need in needs
            if (need.marker is None) == (not extra)
            and (need.marker is None or need.marker.evaluate({"extra": extra}))
        }
        wanted = [Requirement(text) for text in asked]
        assert found == {(canonicalize_name(need.name), need.specifier) for need in wanted}


def test_pip_resolves_the_extras_by_name(dist, installed, away):
    """All that they need is in this environment, so that pip asks no registry."""
    resolve = [*PIP, "--python", installed / "python", "install", "--dry-run", "--no-index"]
    links = ["--find-links", wheel(dist).parent]
    said = run(*resolve, *links, "tfpar[horovod,examples,hub,plots]")
    assert "does not provide the extra" not in said and "Would install" not in said
    with pytest.raises(AssertionError, match="packaging==1"):  # it does look at what there is
        run(*resolve, *links, "tfpar[horovod]", "packaging==1")


def test_the_quickstart_s_model_trains_and_is_reported(installed, away):
    """Presets of clusters and the page of a report are files of the package, too."""
    for name in ("quickstart.py", "shipped_data.py"):
        shutil.copy(ROOT / "examples" / name, away)
    said = run(installed / "python", "-c", TRAIN)
    assert Path(said.strip()).is_relative_to(installed.parent)
    run(installed / "tfpar", "report", "plan.json", "-o", "report.html")
    assert "</html>" in (away / "report.html").read_text(encoding="utf-8")
    assert run(installed / "tfpar", "--version") == f"tfpar {tfpar.__version__}\n"


def test_horovod_is_installed_by_an_installed_wheel(installed, away, monkeypatch):
    """A made-up wheel takes the place of one that was built; tests/jobs/install builds."""
    monkeypatch.setenv("TFPAR_CACHE", str(away))
    monkeypatch.setenv("PATH", str(away))  # without a compiler
    monkeypatch.delenv("CXX", raising=False)
    install = [installed / "tfpar", "install-horovod", "--no-mpi", "--wheel-only", away / "kept"]
    with pytest.raises(AssertionError, match="no C.* compiler, no make. Install what is missing"):
        run(*install)
    (folder,) = (away / "wheels").iterdir()
    (folder / "horovod-0.28.1-py3-none-any.whl").touch()
    assert Path(run(*install).strip()) == away / "kept" / "horovod-0.28.1-py3-none-any.whl"
