"""The lock that `make` installs from agrees with pyproject.toml, for every Python."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import tomlkit
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tfpar.jobs.install import CMAKE_REQUIREMENT, PYTHON_NEEDS

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PROJECT = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8")).unwrap()
MINORS = [
    name.removeprefix("Programming Language :: Python :: ")
    for name in PROJECT["project"]["classifiers"]
    if re.search(r":: Python :: 3\.\d+$", name)
]
PYTHONS = [f"{minor}.{patch}" for minor in MINORS for patch in (0, 99)]
LINUX = {
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "extra": "",
}
RENEW = "run `make lock`"


@cache
def entries() -> list[tuple[Requirement, list[str]]]:
    """What is locked, and its hashes."""
    lines = re.sub(r"#.*", "", LOCK).replace("\\\n", " ").splitlines()
    found = [line.split("--hash=") for line in lines if line.strip()]
    return [(Requirement(first), [part.strip() for part in parts]) for first, *parts in found]


def locked(python: str) -> dict[str, Version]:
    """The versions that are installed on this Python."""
    where = LINUX | {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    found: dict[str, Version] = {}
    for entry, _ in entries():
        if entry.marker is None or entry.marker.evaluate(where):
            (pin,) = entry.specifier
            assert pin.operator == "==" and canonicalize_name(entry.name) not in found
            found[canonicalize_name(entry.name)] = Version(pin.version)
    return found


def asked() -> list[Requirement]:
    """All that pyproject.toml names."""
    project = PROJECT["project"]
    lists = [
        project["dependencies"],
        *project["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
        PROJECT["build-system"]["requires"],
    ]
    return [Requirement(text) for names in lists for text in names]


@pytest.mark.parametrize("python", PYTHONS)
def test_each_dependency_is_locked_within_its_bounds(python):
    versions = locked(python)
    for dependency in asked():
        version = versions.get(canonicalize_name(dependency.name))
        assert version is not None, f"{dependency} is not in the lock: {RENEW}"
        assert version in dependency.specifier, f"{version} is locked, not {dependency}: {RENEW}"


def test_every_file_is_known_by_its_hash_and_none_by_where_it_lies():
    assert len(entries()) > 50
    for entry, hashes in entries():
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", h) for h in hashes), entry.name
    assert "://" not in LOCK and "index-url" not in LOCK


def test_it_is_made_for_the_pythons_that_are_supported():
    supported = SpecifierSet(PROJECT["project"]["requires-python"])
    minors = [f"3.{minor}" for minor in range(30) if f"3.{minor}" in supported]
    assert minors == MINORS
    (only,) = PROJECT["tool"]["uv"]["environments"]
    assert f"python_version < '3.{int(minors[-1][2:]) + 1}'" in only
    assert f"--python-version {minors[0]} " in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_what_builds_horovod_is_locked():
    group = {str(Requirement(text)) for text in PROJECT["dependency-groups"]["build"]}
    assert str(Requirement(CMAKE_REQUIREMENT)) in group
    assert set(PYTHON_NEEDS) <= {Requirement(text).name for text in group}


def test_nightly_takes_the_lock_for_versions_that_it_has():
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))
    for run in workflow["jobs"]["all"]["strategy"]["matrix"]["include"]:
        versions = locked(f"{run['python']}.99")
        same = all(versions[n] in SpecifierSet(f"=={run[n]}") for n in ("tensorflow", "keras"))
        assert run["lock"] == ("requirements.lock" if same else "")
