"""The faults that are planted: drawn from the package by a hash, the same for the same code."""

from __future__ import annotations

import hashlib
import json
import pathlib
from dataclasses import dataclass
from typing import Any

from scripts.mutating.operators import Site, sites_of

ROOT = pathlib.Path(__file__).parents[2]

AREAS: dict[str, tuple[str, ...]] = {
    "rules": ("rules",),
    "cost": ("cost", "cluster"),
    "propagation": ("propagation", "spec"),
    "rewriting": ("compile",),
    "runtime": ("tf/runtime", "tf/steps", "tf/variables", "tf/keras", "tf/checkpoint"),
    "planning": ("search", "constraints", "pipeline", "planning*.py"),
    "launching": ("jobs/launch", "tf/distributed"),
}
"""Folders and modules of the package, by what they do."""


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        area: what the module does, one of `AREAS`.
        module: its name, as it is imported.
    """

    area: str
    module: str
    site: Site

    @property
    def key(self) -> str:
        return f"{self.module}|{self.site.identity}"

    def __str__(self) -> str:
        path = self.module.replace(".", "/") + ".py"
        text = self.site.text.replace("\n", " ")
        return f"{path}:{self.site.line} {self.site.scope}: {self.site.operator} in `{text[:80]}`"


def draw(number: int) -> list[Fault]:
    """As many faults of each area, those whose hashes are the smallest.

    So the draw is random, and yet stays the same where code does: an edit in one function moves no
    fault of another.
    """
    found: list[Fault] = []
    for area, patterns in AREAS.items():
        faults = [
            Fault(area, ".".join(path.relative_to(ROOT).with_suffix("").parts), site)
            for path in _files(patterns)
            for site in sites_of(path.read_text())
        ]
        found += sorted(faults, key=lambda fault: _hash(fault.key))[:number]
    return found


def write(faults: list[Fault], path: pathlib.Path) -> None:
    """The file that `hook.install` reads."""
    path.write_text(json.dumps([(fault.module, fault.site.identity) for fault in faults]))


def as_row(fault: Fault) -> dict[str, Any]:
    return {"area": fault.area, "fault": str(fault), "key": fault.key}


def _files(patterns: tuple[str, ...]) -> list[pathlib.Path]:
    package = ROOT / "tfpar"
    found: set[pathlib.Path] = set()
    for pattern in patterns:
        for path in package.glob(pattern):
            found.update(path.rglob("*.py") if path.is_dir() else [path])
    return sorted(path for path in found if path.name != "__init__.py")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
