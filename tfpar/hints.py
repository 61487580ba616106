"""Constraints files in TOML: each table is a call of a function that makes a constraint.

    [[shard]]
    pattern = "block_.*/fc1/kernel"
    dim = 1
    axis = "model"

    [[keep]]
    plan = "old.json"
    pattern = "embeddings"

Tables are called as the functions are, and keys as their arguments. TOML has no None: what may be
None is left out. `batch(*axes)` takes a list, `axes`. The path of a plan starts at the file.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from tfpar.constraints import (
    Constraint,
    batch,
    constraints_of,
    context_parallel,
    fsdp,
    replicate,
    shard,
    shard_output,
    stage,
)
from tfpar.plans import keep
from tfpar.readable import (
    FieldError,
    UnreadableError,
    convert,
    describe_unknown_key,
    parse_toml,
    read_text,
)
from tfpar.spec import ArgumentError, TfparError


def _schema(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """Make the schema of a table: its keys are the arguments of a function, which checks them."""
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            fields.append((name, list[Any]))
        elif parameter.default is not parameter.empty:
            fields.append((name, Any, parameter.default))
        elif "None" in str(parameter.annotation):
            fields.append((name, Any, None))
        else:
            fields.append((name, Any))
    return msgspec.defstruct(
        function.__name__, fields, forbid_unknown_fields=True, kw_only=True, frozen=True
    )


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (shard, replicate, fsdp, context_parallel, shard_output, batch, stage, keep)
}
_SCHEMAS = {name: _schema(function) for name, function in _FUNCTIONS.items()}


def read_hints(path: str | os.PathLike[str]) -> tuple[Constraint, ...]:
    """Read the constraints that a TOML file describes, in its order of functions.

    Raises:
        TfparError: it cannot be read, or a table or key is unknown, missing or wrong; names the
            file, the table and the key, and what is allowed.
    """
    path = os.fspath(path)
    try:
        known = parse_toml(read_text(path))
    except UnreadableError as error:
        raise TfparError(f"Cannot read the constraints file {path!r}: {error}.") from None
    found: list[Constraint] = []
    for name, given in known.items():
        if name not in _FUNCTIONS:
            problem = describe_unknown_key(name, _FUNCTIONS)
            raise TfparError(
                f"{path}: the constraint {name!r} {problem}, as tables such as [[shard]]."
            )
        for where, table in _tables(path, name, given):
            found += constraints_of(where, _call(where, path, name, table))
    return tuple(found)


def _tables(path: str, name: str, given: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tables of one name, and the name of each in messages: `hints.toml: [[shard]] 2`."""
    several = given if isinstance(given, list) else [given]
    for number, table in enumerate(several, 1):
        where = f"{path}: [[{name}]]" + (f" {number}" if len(several) > 1 else "")
        if not isinstance(table, dict):
            raise TfparError(f"{where} is no table; write its keys below a line [[{name}]].")
        yield where, table


def _call(where: str, path: str, name: str, table: dict[str, Any]) -> Any:
    """Call the function of that name with the keys of a table."""
    try:
        given = msgspec.structs.asdict(convert(table, _SCHEMAS[name]))
        if isinstance(given.get("plan"), str):
            given["plan"] = os.path.join(os.path.dirname(path), given["plan"])
        several = given.pop("axes", ())
        return _FUNCTIONS[name](*several, **given)
    except FieldError as error:
        raise TfparError(f"{where}: {error}.") from None
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from None
    except TfparError as error:
        raise TfparError(f"{where}: {error}") from None
