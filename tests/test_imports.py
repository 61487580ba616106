"""Who may import what: packages, planning without TensorFlow, and tests through doors."""

import ast
import contextlib
import functools
import importlib
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from tests.conftest import NEED_TENSORFLOW, WITHOUT_TENSORFLOW

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGES = (
    "cluster",
    "compile",
    "constraints",
    "cost",
    "ir",
    "jobs.launch",
    "observability.report",
    "pipeline",
    "planning",
    "plans",
    "propagation",
    "rules",
    "spec",
)
MODULES = ("options", "hints", "progress")


def modules() -> list[str]:
    """Every module that has to do without TensorFlow."""
    found = [f"tfpar.{name}" for name in MODULES]
    for package in PACKAGES:
        for folder, _, files in os.walk(os.path.join(ROOT, "tfpar", *package.split("."))):
            prefix = os.path.relpath(folder, ROOT).replace(os.sep, ".")
            found += [f"{prefix}.{f[:-3]}" for f in sorted(files) if f.endswith(".py")]
    return [name.removesuffix(".__init__") for name in found]


def imported(code: str) -> subprocess.CompletedProcess:
    check = "import sys; assert not {'tensorflow', 'keras'} & set(sys.modules), 'loaded'"
    return subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"], cwd=ROOT, capture_output=True, text=True
    )


def test_planning_imports_no_tensorflow():
    assert len(modules()) > 20
    result = imported("\n".join(f"import {name}" for name in modules()))
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_planning_names_import_no_tensorflow():
    result = imported("from tfpar import Mesh, split, Plan, shard, Shard, make_rule")
    assert result.returncode == 0, result.stderr


def test_whatever_is_exported_exists():
    import tfpar

    for path in pathlib.Path(ROOT, "tfpar").rglob("__init__.py"):
        package = importlib.import_module(
            path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        )
        assert all(hasattr(package, name) for name in getattr(package, "__all__", ())), package
    assert tfpar.__all__ == sorted([*tfpar._EXPORTS, *tfpar._MODULES])


# --- layers ---------------------------------------------------------------------------------

BELOW = {
    "lazy": "",
    "spec": "",
    "scopes": "",
    "progress": "spec",
    "writable": "spec",
    "readable": "spec",
    "ir": "spec",
    "rules": "ir spec",
    "propagation": "ir rules spec",
    "cluster": "readable spec writable",
    "pipeline": "ir readable spec",
    "cost": "cluster ir pipeline propagation rules spec",
    "constraints": "ir spec",
    "plans": "cluster constraints cost ir pipeline propagation readable spec writable",
    "compile.local": "ir pipeline propagation rules spec",
    "planning": (
        "cluster compile.local constraints cost ir pipeline plans progress propagation "
        "readable rules spec"
    ),
    "compile": "compile.local ir pipeline planning plans propagation spec",
    "hints": "constraints plans readable spec",
    "settings": "cluster compile.local constraints ir pipeline planning plans spec",
    "options": "cluster pipeline planning plans settings spec",
    "layers": "constraints scopes spec",
    "distribution": (
        "constraints options plans scopes settings spec tf.distributed tf.interop tf.keras "
        "tf.session"
    ),
    "api": (
        "compile distribution observability.report options plans scopes settings spec tf.capture "
        "tf.functions tf.graph_program tf.keras tf.runtime tf.session tf.traced"
    ),
    "cli": (
        "api cluster constraints hints jobs jobs.calibration jobs.doctor jobs.install "
        "jobs.launch observability.report observability.timeline observability.verification "
        "options pipeline planning plans progress readable settings spec tf.capture "
        "tf.distributed tf.keras tf.runtime tf.session tf.traced writable"
    ),
    "jobs.calibration": (
        "cluster compile.local cost ir planning progress settings spec tf.distributed "
        "tf.interop tf.runtime writable"
    ),
    "jobs.doctor": "jobs.install jobs.launch spec tf.distributed tf.runtime",
    "jobs.install": "progress spec",
    "jobs.launch": "pipeline spec",
    "observability.monitor": (
        "cluster compile.local cost ir jobs.calibration planning plans spec tf.capture "
        "tf.distributed tf.interop tf.keras tf.runtime tf.steps"
    ),
    "observability.report": "cluster cost ir pipeline plans propagation readable rules spec",
    "observability.timeline": (
        "cluster compile compile.local cost ir jobs.launch observability.report spec "
        "tf.distributed tf.interop writable"
    ),
    "observability.verification": (
        "ir observability.report spec tf.capture tf.interop tf.keras tf.steps"
    ),
    "tf.capture": "ir spec tf.interop tf.variables",
    "tf.checkpoint": "readable spec tf.variables",
    "tf.distributed": "jobs.launch pipeline spec tf.interop tf.runtime",
    "tf.functions": (
        "ir plans spec tf.capture tf.interop tf.keras tf.runtime tf.session tf.steps tf.variables"
    ),
    "tf.graph_program": (
        "observability.verification options plans settings spec tf.capture tf.session "
        "tf.steps tf.variables"
    ),
    "tf.interop": "ir",
    "tf.keras": (
        "ir jobs.launch observability.timeline plans scopes spec tf.capture tf.checkpoint "
        "tf.distributed tf.functions tf.interop tf.runtime tf.session tf.steps tf.variables"
    ),
    "tf.runtime": (
        "cluster compile compile.local ir jobs.launch spec tf.distributed tf.interop tf.variables"
    ),
    "tf.session": (
        "cluster constraints observability.timeline pipeline planning plans scopes settings "
        "spec tf.distributed tf.interop tf.keras tf.runtime tf.variables"
    ),
    "tf.steps": (
        "cluster compile compile.local constraints cost ir observability.report "
        "observability.timeline pipeline planning plans progress propagation spec tf.capture "
        "tf.distributed tf.interop tf.runtime tf.session tf.variables"
    ),
    "tf.traced": (
        "cluster compile constraints ir options planning plans progress settings spec "
        "tf.capture tf.distributed tf.keras tf.runtime tf.session tf.steps"
    ),
    "tf.variables": "compile.local ir propagation rules spec tf.interop",
}
"""What each room may import. Planning knows nothing of how plans are shown, what shows them nothing
of how they were found, and a plan neither."""

HOUSES = {"tf", "jobs", "observability"}
"""Rooms that have rooms of their own."""

EVERYWHERE = {"lazy"}
"""Rooms that any may import."""

SEAMS = {("tfpar/plans/plan.py", "observability.report")}
"""Imports upwards that a function makes when it is called; see there."""


def room_of(module: str) -> str:
    """The package of `BELOW` that a module is in, or else the first one."""
    parts = module.split(".")[1:]
    two = ".".join(parts[:2])
    return two if parts[0] in HOUSES or two in BELOW else parts[0]


def rooms_for(package: str) -> set[str]:
    """What a room may import."""
    return {package, *EVERYWHERE, *BELOW[package].split()}


def imports(path: str):
    """(package of tfpar, whether only a function imports it), but for what only types need."""
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        waiting = [(ast.parse(file.read()), False)]
    while waiting:
        node, late = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        names = []
        if isinstance(node, ast.ImportFrom):
            whole = node.module == "tfpar"
            names = [f"tfpar.{n.name}" for n in node.names] if whole else [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [n.name for n in node.names]
        for name in names:
            if name.startswith("tfpar."):
                yield room_of(name), late
        late = late or isinstance(node, ast.FunctionDef)
        waiting += [(child, late) for child in ast.iter_child_nodes(node)]


def files_of(package: str) -> list[str]:
    """The modules of a package, or the module of that name."""
    module = "/".join(["tfpar", *package.split(".")])
    if os.path.exists(os.path.join(ROOT, f"{module}.py")):
        return [f"{module}.py"]
    found = [
        os.path.relpath(os.path.join(folder, file), ROOT).replace(os.sep, "/")
        for folder, _, files in os.walk(os.path.join(ROOT, module))
        for file in sorted(files)
        if file.endswith(".py")
    ]
    inner = [name.replace(".", "/") for name in BELOW if name.startswith(f"{package}.")]
    return [path for path in found if not any(path.startswith(f"tfpar/{name}/") for name in inner)]


@pytest.mark.parametrize("package", BELOW)
def test_packages_import_only_what_is_below(package):
    paths = files_of(package)
    assert paths
    wrong = {
        (path, name)
        for path in paths
        for name, late in imports(path)
        if name not in rooms_for(package) and not (late and (path, name) in SEAMS)
    }
    assert not wrong


def test_every_room_has_a_row():
    """A folder or module of `tfpar`; of `tf`, `jobs` and `observability`, one in it."""
    found = set()
    for folder, prefix in (("", ""), *((name, f"{name}.") for name in HOUSES)):
        for entry in os.scandir(os.path.join(ROOT, "tfpar", folder)):
            name = entry.name.removesuffix(".py")
            if entry.is_dir() or entry.name.endswith(".py"):
                found.add(f"{prefix}{name}")
    inside = {name for name in found if name.rpartition(".")[2].startswith("__")}
    assert found - inside - HOUSES == BELOW.keys() - {"compile.local"}


@pytest.mark.slow
def test_seams_are_needed():
    found = {
        (path, name)
        for package in BELOW
        for path in files_of(package)
        for name, late in imports(path)
        if late and name not in rooms_for(package)
    }
    assert found == SEAMS


# --- tests speak through doors --------------------------------------------------------------

TESTED = {"plan": {"constraints", "plans"}, "rewrite": {"compile"}}
"""Packages that a folder of tests is of, where it has another name."""

OF_NO_PACKAGE = {"benchmarks", "docker", "docs", "e2e", "gpu", "graphs", "preloaded"}
"""Folders of tests of what packages do together."""

REPLACED = {
    ("tests/cli/test_estimate.py", "tfpar.tf.capture.step"),
    ("tests/cli/test_estimate.py", "tfpar.tf.interop"),
    ("tests/docs/test_docs.py", "tfpar.rules"),
    ("tests/e2e/test_effect_order.py", "tfpar.compile.local.microbatches"),
    ("tests/e2e/test_interrupted_search.py", "tfpar.planning.pipeline_search"),
    ("tests/e2e/test_interrupted_search.py", "tfpar.planning.step_search"),
    ("tests/e2e/test_pipelines.py", "tfpar.tf.steps.step_planner"),
    ("tests/e2e/test_trials.py", "tfpar.tf.steps"),
    ("tests/observability/verification/tampering.py", "tfpar.tf.runtime.backends"),
    ("tests/observability/verification/tampering.py", "tfpar.tf.runtime.function_def"),
}
"""Where tests put an error, a count or a Ctrl-C into the insides of another package."""


def packages_of(path: str) -> set[str]:
    """The packages that a file of tests is of, whose insides it may know."""
    folders = path.split("/")[1:-1]
    if folders[:1] == ["captured"]:
        folders = folders[1:]
    if not folders or folders[0] in OF_NO_PACKAGE:
        return set()
    return TESTED.get(folders[0], {folders[0]})


@functools.cache
def exports(module: str) -> frozenset[str] | None:
    """The names that a package exports; None of what is no package."""
    path = os.path.join(ROOT, *module.split("."), "__init__.py")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        for node in ast.parse(file.read()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return frozenset(ast.literal_eval(node.value))
    return frozenset()


def is_door(module: str, name: str) -> bool:
    """Whether `module` gives `name` to others: a package that exports it, or a room of one file."""
    exported = exports(module)
    if exported is None:
        return module == "tfpar.__main__" or module.removeprefix("tfpar.") in BELOW
    return name in exported or f"{module}.{name}".removeprefix("tfpar.") in BELOW


def taken(code: str):
    """(module, name) of what a test imports, or replaces by its path; in its programs, too."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (n.name.rpartition(".")[::2] for n in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", n.name) for n in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            path = node.args[0]
            if isinstance(path, ast.Constant):
                yield path.value.rpartition(".")[::2]
        elif isinstance(node, ast.Constant) and "tfpar." in str(node.value):
            with contextlib.suppress(SyntaxError):
                yield from taken(textwrap.dedent(str(node.value)))


@pytest.mark.slow
def test_tests_take_what_other_packages_export():
    """So what moves inside of a package breaks the tests of that package alone."""
    wrong = set()
    for found in pathlib.Path(ROOT, "tests").rglob("*.py"):
        path = found.relative_to(ROOT).as_posix()
        mine = tuple(f"tfpar.{package}." for package in packages_of(path))
        for module, name in taken(found.read_text(encoding="utf-8")):
            of_tfpar = f"{module}.".startswith("tfpar.")
            if of_tfpar and not f"{module}.{name}.".startswith(mine) and not is_door(module, name):
                wrong.add((path, module))
    assert wrong == REPLACED


def test_lazy_exports_are_no_names_of_modules():
    """A module that is imported stands in their place."""
    hidden = set()
    for package in (f.parent for f in pathlib.Path(ROOT, "tfpar").rglob("__init__.py")):
        code = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
        at_once = {a.name for n in code.body if isinstance(n, ast.ImportFrom) for a in n.names}
        for name in exports(package.relative_to(ROOT).as_posix().replace("/", ".")):
            if name not in at_once and (package / f"{name}.py").exists():
                hidden.add(f"{package.name}.{name}")
    assert hidden == {"ir.traits", "tfpar.layers"}, "exported as modules"


# --- insides of TensorFlow and Keras --------------------------------------------------------

INSIDES = ("keras.src", "tensorflow.python")


def insides(code: str) -> list[str]:
    """What `code` takes of them: by imports, by attributes, or by names in strings."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [n.name for n in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{n.name}" for n in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node).replace("tf.", "tensorflow.", 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return [name for name in found if f"{name}.".startswith(tuple(f"{i}." for i in INSIDES))]


@pytest.mark.parametrize(
    "code",
    [
        "import keras.src",
        "from keras import src",
        "from keras.src.saving import saving_lib",
        "def late():\n    from tensorflow.python.eager import context",
        "import tensorflow.python.eager.context as c",
        "import importlib\nimportlib.import_module('tensorflow.python.eager')",
        "import tensorflow as tf\ntf.python.eager",
        "import keras\nkeras.src.models",
    ],
)
def test_insides_are_found_however_they_are_taken(code):
    assert insides(code)


def test_what_is_exported_is_no_inside():
    assert not insides("import keras\nfrom tensorflow import pythonic\nkeras.source('keras.sr')")


@pytest.mark.slow
def test_only_interop_takes_insides_of_tensorflow_and_keras():
    takers = set()
    for folder, _, files in os.walk(os.path.join(ROOT, "tfpar")):
        for file in files:
            path = os.path.join(folder, file)
            if file.endswith(".py"):
                with open(path, encoding="utf-8") as opened:
                    if insides(opened.read()):
                        takers.add(os.path.relpath(folder, ROOT).replace(os.sep, "/"))
    assert takers == {"tfpar/tf/interop"}


@pytest.mark.slow
def test_suites_of_what_needs_no_tensorflow_need_none():
    """They are collected where it cannot be imported; `conftest` sees to it that they run so. What
    does need it says so in the names of its files."""
    code = f"""
import sys
sys.modules["tensorflow"] = sys.modules["keras"] = None
import pytest
suites = [f"tests/{{name}}" for name in {WITHOUT_TENSORFLOW}]
ignored = [f"--ignore-glob=*/{{name}}" for name in {NEED_TENSORFLOW}]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--collect-only", *suites, *ignored]))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:]
