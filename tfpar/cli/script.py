"""Functions of a user's script, by `script.py:function` or `package.module:function`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from tfpar.spec import TfparError

_MAX_MESSAGE = 400


@contextlib.contextmanager
def scripts() -> Iterator[Callable[[str], Callable[[], Any]]]:
    """Gives `load(target)`; import path, arguments and modules are as before afterwards."""
    path, arguments, modules = list(sys.path), sys.argv, set(sys.modules)
    loaded: dict[str, ModuleType] = {}

    def load(target: str) -> Callable[[], Any]:
        where, colon, name = target.rpartition(":")
        if not (colon and where and name):
            raise TfparError(
                f"{target!r} names no function. Write script.py:function or "
                f"package.module:function."
            )
        if where not in loaded:
            is_file = where.endswith(".py") or os.sep in where or os.path.exists(where)
            loaded[where] = _run_file(where) if is_file else _import(where)
        return _function(loaded[where], where, name)

    try:
        yield load
    finally:
        sys.path[:], sys.argv = path, arguments
        for module in loaded.values():
            if module.__name__ not in modules:
                sys.modules.pop(module.__name__, None)


def call(target: str, function: Callable[[], Any]) -> Any:
    """`function()`; what it raises is told in one line.

    Raises:
        TfparError: the function raised, or needs arguments.
    """
    with contextlib.suppress(ValueError, TypeError):  # what is written in C may have no signature
        needed = [
            repr(p.name)
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if needed:
            raise TfparError(
                f"{target} is called without arguments, but needs {', '.join(needed)}. Give them "
                f"defaults, or name a function that calls it."
            )
    with _told(target):
        return function()


def _run_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise TfparError(f"There is no script {path!r}. Name a file, as in script.py:function.")
    full = os.path.abspath(path)
    name = os.path.splitext(os.path.basename(full))[0]
    if name in sys.modules:
        raise TfparError(
            f"The script {path!r} would be the module {name!r}, which is imported already. Rename "
            f"the file."
        )
    spec = importlib.util.spec_from_loader(name, SourceFileLoader(name, full))
    assert spec is not None and spec.loader is not None  # a loader is given
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(full))
    sys.argv = [path]
    sys.modules[name] = module
    try:
        with _told(path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    sys.argv = [name]
    try:
        known = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a package that is not there
        known = False
    if not known:
        raise TfparError(
            f"There is no module {name!r} to import from here. Write script.py:function for a "
            f"file, or run where the package is."
        )
    with _told(name):
        return importlib.import_module(name)


def _function(module: ModuleType, where: str, name: str) -> Callable[[], Any]:
    found = getattr(module, name, None)
    # A model can be called too, but is no function that makes one.
    if inspect.isroutine(found) or inspect.isclass(found) or isinstance(found, functools.partial):
        return found
    known = [
        repr(n)
        for n, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    has = f" It has {', '.join(known)}." if known else " It defines no function."
    if found is None:
        raise TfparError(f"There is no function {name!r} in {where!r}.{has}")
    raise TfparError(f"{name!r} in {where!r} is a {type(found).__name__}, not a function.{has}")


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """An exception of the user's code as a TfparError that names it and the line."""
    try:
        yield
    except SystemExit as error:
        raise TfparError(
            f"{what} ends the process (exit code {error.code}). Put what is not for planning under "
            f"`if __name__ == '__main__':`."
        ) from error
    except Exception as error:
        message = " ".join(str(error).split())
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]}..."
        raised = f"{type(error).__name__}{': ' if message else ''}{message}"
        raise TfparError(
            f"{what} raised {raised}{_line(error)} Mend it, or see all of it with --traceback."
        ) from error


def _line(error: BaseException) -> str:
    """Name the innermost line that is neither Python's, an installed package's nor ours."""
    others = (sysconfig.get_path("stdlib"), os.path.dirname(os.path.dirname(__file__)), "<frozen")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others) and "site-packages" not in frame.filename:
            return f" ({os.path.basename(frame.filename)}, line {frame.lineno})."
    return "."
