"""What describes the project agrees with it: folder maps, versions, workflows, layout."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import tomlkit
import yaml

import tfpar
from tests.test_imports import MODULES, PACKAGES
from tests.time_limits import time_limit

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
HOUSES = ("tf", "jobs", "observability")
"""Packages of packages, each of which is on the maps."""
FOLDERS = {
    str(p.parent.relative_to(ROOT))
    for pattern in ("*", *(f"{house}/*" for house in HOUSES))
    for p in ROOT.glob(f"tfpar/{pattern}/__init__.py")
}
ENTRY = r"tfpar/[a-z_0-9]+(?:/[a-z_0-9]+)*(?:\.py)?"


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def project() -> dict:
    return tomlkit.parse(text("pyproject.toml")).unwrap()


def in_contributing() -> list[str]:
    block = re.search(r"```\n(tfpar/.*?)```", text("CONTRIBUTING.md"), re.DOTALL)
    assert block is not None
    return re.findall(rf"^{ENTRY}", block[1], re.MULTILINE)


def in_architecture() -> list[str]:
    rows = re.findall(r"^\| (`tfpar/.*?) \|", text("docs/architecture.md"), re.MULTILINE)
    return re.findall(rf"`({ENTRY})`", " ".join(rows))


@pytest.mark.parametrize("read", [in_contributing, in_architecture])
def test_every_folder_is_on_the_map_and_there(read):
    named = read()
    assert len(named) == len(set(named))
    assert {n for n in named if not n.endswith(".py")} - {"tfpar/compile/local"} == FOLDERS
    assert all((ROOT / n).exists() for n in named)


def test_no_two_public_classes_have_one_name():
    """In a traceback or a list of completions a class stands without its module."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in (ROOT / "tfpar").rglob("*.py"):
        names = re.findall(r"^class ([A-Za-z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE)
        for name in names:
            modules[name].append(str(path.relative_to(ROOT)))
    assert len(modules) > 200
    assert not {name: found for name, found in modules.items() if len(found) > 1}


def test_no_docstring_opens_with_a_clause():
    """A module or class is named by a noun, and what a function does by a verb."""
    clause = re.compile(r'(?:\A|:(?: +#.*)?\n+) *r?"""((?:What|How|Which|Where)\b.*)')
    assert len(clause.findall('"""How to."""\ndef f():\n    """What f is."""\n')) == 2
    opened = {
        f"{path.relative_to(ROOT)}: {line}"
        for path in (ROOT / "tfpar").rglob("*.py")
        for line in clause.findall(path.read_text(encoding="utf-8"))
    }
    assert not opened


def test_nothing_follows_the_program_of_a_module():
    """A module that runs as a program would end before what stands below is defined."""
    programs = 0
    for path in (ROOT / "tfpar").rglob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        at = [i for i, s in enumerate(body) if isinstance(s, ast.If) and "__name__" in ast.dump(s)]
        programs += len(at)
        assert at in ([], [len(body) - 1]), path
    assert programs > 1


def test_the_version_is_in_one_place_and_in_the_recipe():
    described = project()
    assert "version" in described["project"]["dynamic"]
    assert described["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "tfpar.__version__"}
    assert yaml.safe_load(text("conda/recipe.yaml"))["context"]["version"] == tfpar.__version__


def bounds(name: str) -> tuple[list[int], list[int]]:
    (found,) = (d for d in project()["project"]["dependencies"] if d.startswith(name))
    low, high = re.fullmatch(rf"{name}>=([\d.]+),<([\d.]+)", found).groups()
    return [int(n) for n in low.split(".")], [int(n) for n in high.split(".")]


def nightly() -> list[dict]:
    return yaml.safe_load(text(".github/workflows/nightly.yml"))["jobs"]["all"]["strategy"][
        "matrix"
    ]["include"]


def test_nightly_runs_what_readme_names_within_the_bounds():
    tested = re.search(r"Tested with (.*?)\. ", text("README.md"), re.DOTALL)
    assert tested is not None
    pattern = r"TensorFlow ([\d.]+) and Keras ([\d.]+)\s+\(Python ([\d.]+)\)"
    named = set(re.findall(pattern, tested[1]))
    assert named == {(m["tensorflow"][:-2], m["keras"][:-2], m["python"]) for m in nightly()}
    for at, name in enumerate(("tensorflow", "keras")):
        versions = sorted([int(n) for n in v[at].split(".")] for v in named)
        low, high = bounds(name)
        assert versions[0] == low
        assert [versions[-1][0], versions[-1][1] + 1] == high


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_fit_their_schema_and_call_what_there_is(path):
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    subprocess.run(
        [*check, "vendor.github-workflows", str(path)], check=True, timeout=time_limit(60)
    )
    makefile = text("Makefile")
    settings = r"(?:[A-Z]+=(?:\S+|\$\{\{.*?\}\})? )*"
    targets = re.findall(rf"make {settings}([a-z-]+)$", path.read_text(), re.MULTILINE)
    assert targets and all(re.search(rf"^{t}:", makefile, re.MULTILINE) for t in targets)


def test_no_line_keeps_a_layout_of_its_own():
    mark = "fmt: " + "skip"
    for folder in ("tfpar", "tests", "benchmarks", "scripts", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            code = path.read_text(encoding="utf-8")
            assert mark not in code and mark.replace("skip", "off") not in code, path


def test_files_that_programs_start_are_there():
    path, module = re.compile(r'\bROOT((?: / "[^"]+")+)'), re.compile(r'"(tests(?:\.\w+)+)"')
    missing = []
    for folder in ("tests", "benchmarks", "scripts"):
        for file in (ROOT / folder).rglob("*.py"):
            code = file.read_text(encoding="utf-8")
            named = ["/".join(re.findall(r'"(.+?)"', found)) for found in path.findall(code)]
            named += [found.replace(".", "/") for found in module.findall(code)]
            missing += [(str(file), name) for name in named if not _is_there(ROOT / name)]
    assert not missing


def _is_there(path: Path) -> bool:
    """Whether there is such a file, folder or module."""
    return path.exists() or path.with_suffix(".py").exists()


def test_time_limits_of_tests_scale_with_the_machine():
    limit = re.compile(r"\btimeout=(?!0\.)\d")  # fractions of a second are there to be exceeded
    for path in (ROOT / "tests").rglob("*.py"):
        found = limit.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: tests.time_limits.time_limit scales it"


def test_type_hints_are_shipped():
    assert (ROOT / "tfpar" / "py.typed").exists()
    assert "py.typed" in project()["tool"]["setuptools"]["package-data"]["tfpar"]


def test_mypy_is_strict_with_what_imports_no_tensorflow():
    (strict,) = project()["tool"]["mypy"]["overrides"]
    checked = {name.removesuffix(".*") for name in strict["module"]}
    assert {f"tfpar.{name}" for name in (*PACKAGES, *MODULES)} <= checked
    assert all(
        value is (key != "implicit_reexport") for key, value in strict.items() if key != "module"
    )
