"""Names that the code of a callback uses, and what follows of them for a job of processes.

A hook's code is followed through the callback's own methods, the functions of its module and what
it was given, and read as Python compiled it; nothing of it runs.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

_TRAINS = re.compile(
    r"fit|evaluate|predict|generate|compile|apply|apply_gradients|setattr|set_(value|state|weights)"
    r"|(train|test|predict)_(on_batch|step)|assign(_add|_sub)?"
)
"""Calls that change what a model computes or learns, or that run steps, in which all ranks meet."""

_GOVERNS = frozenset({"history", "learning_rate", "lr", "momentum", "stop_training", "trainable"})
"""Attributes of models, optimizers and layers that training goes by, when they are set."""

_WRITES = re.compile(
    r"_*((open|File|post|scalar|histogram|add_scalars?|makedirs|mkdir|to_csv|to_json)"
    r"|(log|report|record|track)(_\w+)?|(write|save|dump|upload|publish|send)\w*)"
)
"""Calls that leave something outside of the process: files, folders, lines of a logger."""

_COMPUTES = ("cmath", "jax", "keras", "math", "numpy", "scipy", "tensorflow")
"""Packages whose `log` is the logarithm."""

_TOGETHER = ("horovod", "mpi4py", "tfpar")
"""Packages of what ranks do together, or tell each other apart by."""

_RANKS = re.compile(r"_*((local|global|world)_)?rank|is_(chief|main_process)|process_(id|index)")
"""Names by which code tells ranks apart, and so is meant for each of them."""

_CHEAP = frozenset({"name", "optimizer", "stop_training", "train_function"})
"""Attributes of a model that every rank has by itself."""

_LOADS = re.compile(r"LOAD_(FAST|GLOBAL|NAME|DEREF|CLASSDEREF)")
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_SILENT = frozenset({"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "NOP", "PUSH_NULL", "RESUME"})


class Used(NamedTuple):
    """One use of a name, `base.a.b`, in code: of its value, or to set it.

    Attributes:
        names: the base first: `"self"` for the callback, `""` for a local or an expression.
        value: of the base, where it is known; else None.
        sets: whether the last name is set.
    """

    names: tuple[str, ...]
    value: Any = None
    sets: bool = False


def takes_part_in_training(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback changes training, ends it, runs steps, or tells ranks apart itself."""
    return any(map(_takes_part, _uses(callback)))


def writes(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback leaves something outside of the process."""
    return any(map(_writes, _uses(callback)))


def reads_model(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Whether a hook reads of the model what only all ranks together may have, such as weights."""
    return any(
        u.names[0] == "self"
        and u.names[1:2] in (("model",), ("_model",))
        and not _CHEAP.issuperset(u.names[2:3] or [""])
        for u in _Reader(callback).attribute(hook)
    )


def own_hooks(callback: keras.callbacks.Callback) -> list[str]:
    """The hooks that do something: they are not those that all callbacks inherit."""
    hooks = [n for n in dir(keras.callbacks.Callback) if n.startswith(("on_", "set_"))]
    return [n for n in hooks if _is_own(getattr(callback, n), n)]


def _is_own(hook: Callable[..., Any], name: str) -> bool:
    return getattr(hook, "__func__", None) is not getattr(keras.callbacks.Callback, name)


def _uses(callback: keras.callbacks.Callback) -> Iterator[Used]:
    reader = _Reader(callback)
    for hook in own_hooks(callback):
        yield from reader.attribute(hook)


def _takes_part(used: Used) -> bool:
    last = used.names[-1]
    if used.sets:
        return last in _GOVERNS
    if _RANKS.fullmatch(last):
        return _package(used.value) not in _COMPUTES
    return _TRAINS.fullmatch(last) is not None or _package(used.value) in _TOGETHER


def _writes(used: Used) -> bool:
    first, last = used.names[0], used.names[-1]
    if used.sets or _WRITES.fullmatch(last) is None:
        return False
    if first == "self" and len(used.names) == 2:
        return False  # a method, whose code says what it does, or data
    return last != "log" or _package(used.value) not in _COMPUTES


class _Reader:
    """Reads the code of one callback; what it has read, it reads no more."""

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        self._callback = callback
        outside = keras.callbacks.Callback.__mro__
        self._classes = [cls for cls in type(callback).__mro__ if cls not in outside]
        self._packages = {_package(cls) for cls in self._classes}
        self._modules: set[str] = set()  # of functions that it was given
        self._seen: set[types.CodeType] = set()

    def attribute(self, name: str) -> Iterator[Used]:
        """List what an attribute of the callback uses: a method of all its classes, a function."""
        held = vars(self._callback).get(name)
        if held is not None:
            self._modules.add(getattr(held, "__module__", None) or "")
            yield from self._object(held, (name,))
        else:
            yield from self._methods(name)

    def _methods(self, name: str) -> Iterator[Used]:
        for cls in self._classes:
            for function in _functions(vars(cls).get(name)):
                yield from self._function(function, is_method=True)

    def _object(self, value: Any, names: tuple[str, ...]) -> Iterator[Used]:
        """List what the code of a callable uses, one that is no method; else its name."""
        while isinstance(value, functools.partial):
            value = value.func
            self._modules.add(getattr(value, "__module__", None) or "")
        bound = getattr(value, "__self__", None)
        function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
        if isinstance(function, types.FunctionType) and self._is_followed(function):
            yield from self._function(function, is_method=bound is self._callback)
        elif callable(value):
            yield Used((*names[:-1], getattr(value, "__name__", names[-1])), bound or value)

    def _is_followed(self, function: types.FunctionType) -> bool:
        return _package(function) in self._packages or function.__module__ in self._modules

    def _function(self, function: types.FunctionType, is_method: bool) -> Iterator[Used]:
        code = function.__code__
        if code in self._seen:
            return
        self._seen.add(code)
        me = code.co_varnames[0] if is_method and code.co_argcount else ""
        known = {**vars(builtins), **function.__globals__}
        for name in code.co_cellvars:  # its own, of which functions in it know
            known.pop(name, None)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not set yet
                known[name] = cell.cell_contents
        for used in _names_in(code, me):
            yield from self._follow(used, me, known)

    def _follow(self, used: Used, me: str, known: dict[str, Any]) -> Iterator[Used]:
        """A use with its base told, or what the callable uses that it names."""
        first, *rest = used.names
        if me and first == me:
            yield used._replace(names=("self", *rest))
            if len(rest) == 1 and not used.sets:
                yield from self.attribute(rest[0])
            return
        value = known.get(first)
        if value is self._callback:
            yield used._replace(names=("self", *rest))
        elif rest:
            yield used._replace(value=value)
            if not first and not used.sets:  # of `super()`, it may be
                yield from self._methods(rest[0])
        elif callable(value):
            yield from self._object(value, used.names)
        elif _RANKS.fullmatch(first):
            yield used


def _names_in(code: types.CodeType, me: str) -> Iterator[Used]:
    """The names that code uses and sets, and those of the functions in it.

    Args:
        me: its name of the callback; `""` if it has none.
    """
    chain: list[str] = []
    for step in dis.get_instructions(code):
        name = step.opname
        if name in _SILENT:
            continue
        if name in _ATTRIBUTES:
            chain = [*(chain or [""]), step.argval]
            continue
        if name == "STORE_ATTR":
            yield Used((*(chain or [""]), step.argval), sets=True)
        elif chain:
            yield Used(tuple(chain))
        chain = []
        if _LOADS.search(name):
            loaded = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
            chain = [loaded if loaded == me or "FAST" not in name else ""]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant, me)


def _functions(member: Any) -> Iterator[types.FunctionType]:
    """The functions behind a member of a class."""
    if isinstance(member, property):
        members: list[Any] = [member.fget, member.fset]
    else:
        members = [getattr(member, "__func__", member)]
    for one in members:
        function = inspect.unwrap(one) if callable(one) else one
        if isinstance(function, types.FunctionType):
            yield function


def _package(value: Any) -> str:
    """The package of a module, a function or a class, or of an object's class."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0]
