"""Planning is free of TensorFlow: these packages never import it."""

import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGES = ("spec", "ir", "rules", "propagation", "cost", "search", "rewrite", "report", "launch")
MODULES = ("plans", "constraints", "options")


def modules() -> list[str]:
    """Every module that has to do without TensorFlow."""
    found = [f"tfpar.{name}" for name in MODULES]
    for package in PACKAGES:
        for folder, _, files in os.walk(os.path.join(ROOT, "tfpar", package)):
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


@pytest.mark.parametrize("name", ["Mesh", "split", "Plan", "shard", "Shard", "make_rule"])
def test_planning_names_import_no_tensorflow(name):
    result = imported(f"from tfpar import {name}")
    assert result.returncode == 0, result.stderr


def test_whatever_is_exported_exists():
    import tfpar

    assert all(getattr(tfpar, name) is not None for name in tfpar.__all__)
