"""Lazy exports of packages: a name is imported from its module when it is first used (PEP 562).

So a package exports what others may use, and importing one of its modules still loads no other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(package: str, exports: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that exports names of its modules.

    None of them may be the name of a module in the package, which stands in its place once it is
    imported; the package imports such a name at once.

    Args:
        exports: names by the module that has them.
    """
    module_of = {name: module for module, names in exports.items() for name in names}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return find
