"""Every module serves somebody who uses tfpar."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTED = re.compile(r"^\s*(?:from|import) (tfpar(?:\.\w+)*)", re.MULTILINE)


def modules() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "tfpar").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def named(path: Path) -> Iterator[str]:
    """What a module imports, or names as text, as what is imported late or started is."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]


def test_every_module_is_reached_from_a_public_entry_point():
    """From the package's exports, the command, or what a page has users import."""
    known = modules()
    pages = (path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    waiting = [
        "tfpar",
        "tfpar.__main__",
        *(name for page in pages for name in IMPORTED.findall(page)),
    ]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        while name and name not in known:
            name = name.rpartition(".")[0]
        if not name or name in reached:
            continue
        reached.add(name)
        waiting += [*named(known[name]), name.rpartition(".")[0]]
    assert len(known) > 300
    assert known.keys() - reached == set()


def test_tools_import_what_there_is():
    """Benchmarks and scripts import much of it late, and not all of them run as tests."""
    wanted = set()
    for folder in ("benchmarks", "scripts", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfpar"):
                    wanted |= {f"{node.module}:{name.name}" for name in node.names}
    assert len(wanted) > 100
    for name in sorted(wanted):
        try:
            pkgutil.resolve_name(name)
        except AttributeError:
            importlib.import_module(name.replace(":", "."))
