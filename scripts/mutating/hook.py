"""Import hook that plants switched faults into the package, in this process and its children.

Each planted place calls `__fault__(number)`, which is true for the one fault that is switched on,
and writes down which faults a process has come past.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from scripts.mutating.operators import plant

ACTIVE = "TFPAR_FAULT"
"""Number of the fault that is switched on."""
REACHED = "TFPAR_FAULTS_REACHED"
"""File to which processes append the numbers of faults that they come past."""
PLANTED = "TFPAR_FAULTS"
"""File of the planted faults: a JSON list of `[module, identity]`."""

_reached: set[int] = set()
_active = -1
_main = -1


def _fault(number: int) -> bool:
    if number not in _reached:
        _reached.add(number)
        if os.getpid() != _main:
            _note(number)
    return number == _active


def _note(number: int) -> None:
    path = os.environ.get(REACHED)
    if path:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, b"%d\n" % number)
        finally:
            os.close(descriptor)


def begin() -> None:
    """Forget what this process has reached: a new test begins. What it reaches is not written."""
    global _main
    _main = os.getpid()
    _reached.clear()


def reached() -> set[int]:
    """What this process has reached since `begin`."""
    return set(_reached)


def switch_on(number: int) -> None:
    """Make one fault real in this process, and in those that it starts."""
    global _active
    _active = number
    os.environ[ACTIVE] = str(number)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, numbers: dict[str, int]) -> None:
        super().__init__(name, path)
        self._numbers = numbers

    def get_code(self, fullname: str) -> CodeType:  # past the cache of compiled modules
        source = self.get_data(self.path).decode()
        tree = plant(source, lambda site: self._numbers.get(site.identity))
        return compile(tree, self.path, "exec")


class Finder:
    """Finds those modules of the package that have faults."""

    def __init__(self, numbers: dict[str, dict[str, int]]) -> None:
        self._numbers = numbers

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        if name not in self._numbers:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin, self._numbers[name])
        return spec


def install() -> None:
    """Plant the faults of the file that the environment names, as modules are imported."""
    global _active
    numbers: dict[str, dict[str, int]] = {}
    with open(os.environ[PLANTED], encoding="utf-8") as file:
        for number, (module, identity) in enumerate(json.load(file)):
            numbers.setdefault(module, {})[identity] = number
    _active = int(os.environ.get(ACTIVE, "-1"))
    builtins.__fault__ = _fault  # type: ignore[attr-defined]
    sys.meta_path.insert(0, Finder(numbers))  # type: ignore[arg-type]
