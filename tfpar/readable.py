"""Reading of text, JSON and TOML files: whatever is wrong with one is an `UnreadableError`.

`convert` makes typed values of what JSON and TOML hold, by a schema: msgspec structs, dataclasses
and NamedTuples. msgspec checks; only what it refuses is looked through again, for the first key
that is wrong and what it has to be.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
import tomlkit
import tomlkit.exceptions

from tfpar.spec import TfparError
from tfpar.spec.arguments import shown

T = TypeVar("T")

KeyPath = tuple[str | int, ...]
"""Keys of objects and positions in lists, from the outermost."""

ReadCustom = Callable[[Any, Any], Any]
"""Makes a value of a type (the first argument) that JSON does not have, and which may have a text
`expected`: what it has to be. A ValueError says what is wrong with it."""


class UnreadableError(TfparError, ValueError):
    """A file or a text that cannot be read. It says why; its reader says of which file."""


class FieldError(UnreadableError):
    """A key that is missing, not known, or of a value that it may not have.

    Attributes:
        path: where it is.
        problem: what is wrong with it: `is missing`, `is 3; it must be a string`.
    """

    def __init__(self, path: KeyPath, problem: str) -> None:
        super().__init__(f"{format_path(path)} {problem}")
        self.path, self.problem = path, problem


def read_text(path: str | os.PathLike[str], encoding: str = "utf-8") -> str:
    """Read the text of a file.

    Raises:
        UnreadableError: there is none, it may not be read, or it is no text.
    """
    try:
        with open(path, encoding=encoding) as file:
            return file.read()
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise UnreadableError(f"it is not UTF-8 text (byte {error.start})") from error
    except ValueError as error:  # a path with a NUL or half a surrogate pair in it
        raise UnreadableError(f"this is no path: {error}") from error


def parse_json(text: str) -> Any:
    """Parse a JSON text to its value.

    Raises:
        UnreadableError: it is malformed, too deep, has a key twice in one object, a number of more
            digits than Python reads, or text that is not Unicode (half a surrogate pair).
    """
    try:
        found = json.loads(text, object_pairs_hook=_object)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UnreadableError(f"{error.msg} ({where})") from None
    except (ValueError, RecursionError) as error:
        raise UnreadableError(str(error)) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text to its tables.

    Raises:
        UnreadableError: as `parse_json`.
    """
    try:
        return tomlkit.parse(text).unwrap()
    except (ValueError, RecursionError, tomlkit.exceptions.TOMLKitError) as error:
        raise UnreadableError(str(error)) from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice[:80]!r} twice")
    return found


# --- schemas -----------------------------------------------------------------------------


def convert(
    data: Any, kind: type[T], read_custom: ReadCustom | None = None, *, lax: bool = False
) -> T:
    """Make the `kind` that `data`, of JSON or TOML, describes.

    Args:
        lax: keys that a dataclass does not have are passed over.

    Raises:
        FieldError: names the key, and says what it has to be: in the words of the description
            (`msgspec.Meta`) of its type, where that has one.
    """
    try:
        found = msgspec.convert(data, kind, dec_hook=read_custom)
    except msgspec.ValidationError as error:
        raise _locate_error(data, kind, read_custom, (), error) from None
    except RecursionError as error:
        raise UnreadableError(str(error)) from None
    unknown = None if lax else _find_unknown_key(data, kind, ())
    if unknown is not None:
        raise unknown
    return found


def format_path(path: KeyPath) -> str:
    """`variables['m/kernel'].shape[0]`; of the whole, `the content`."""
    found = ""
    for step in path:
        is_name = isinstance(step, str) and step.isidentifier()
        found += f".{step}" if is_name else f"[{step!r}]"
    return found.removeprefix(".") or "the content"


def describe_unknown_key(key: str, known: Iterable[str]) -> str:
    """Say what is wrong with a key that is none of the `known` ones."""
    near = difflib.get_close_matches(key, [*known], n=2)
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    return f"is not known{meant}; there are {', '.join(known)}"


class _Field(NamedTuple):
    kind: Any
    is_required: bool


def _locate_error(
    data: Any, kind: Any, read_custom: ReadCustom | None, path: KeyPath, error: Exception
) -> FieldError:
    """Locate the first of the innermost places where `data` is no `kind`.

    msgspec, which says so by `error`, names neither keys of mappings nor values.
    """
    for step, part, its_kind in _iterate_parts(data, kind):
        try:
            msgspec.convert(part, its_kind, dec_hook=read_custom)
        except msgspec.ValidationError as of_part:
            return _locate_error(part, its_kind, read_custom, (*path, step), of_part)
    fields = _list_fields(kind) if isinstance(data, Mapping) else {}
    if fields and not dataclasses.is_dataclass(_strip(kind)):
        for key in data:
            if key not in fields:
                return FieldError((*path, key), describe_unknown_key(str(key), fields))
    for key, field in fields.items():
        if field.is_required and key not in data:
            expected = _describe_kind(field.kind)
            return FieldError(
                (*path, key), "is missing" + (f"; it must be {expected}" if expected else "")
            )
    cause = error.__cause__
    if isinstance(cause, FieldError):
        return FieldError((*path, *cause.path), cause.problem)
    problem = (
        f"is {shown(data)}; it must be {_describe_kind(kind)}" if cause is None else str(cause)
    )
    return FieldError(path, problem)


def _find_unknown_key(data: Any, kind: Any, path: KeyPath) -> FieldError | None:
    """Find a key that a dataclass does not have, which msgspec passes over."""
    if not _has_dataclass(kind):
        return None
    fields = _list_fields(kind) if isinstance(data, Mapping) else {}
    for key in data if fields else ():
        if key not in fields:
            return FieldError((*path, key), describe_unknown_key(key, fields))
    parts = _iterate_parts(data, kind)
    errors = (_find_unknown_key(part, its_kind, (*path, step)) for step, part, its_kind in parts)
    return next(filter(None, errors), None)


def _iterate_parts(data: Any, kind: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """Yield the parts of `data`: their steps, themselves, and what they have to be."""
    args, fields = get_args(_strip(kind)), _list_fields(kind)
    if isinstance(data, Mapping):
        for key, value in data.items():
            if fields and key in fields:
                yield key, value, fields[key].kind
            elif get_origin(_strip(kind)) is dict:
                yield key, key, args[0]
                yield key, value, args[1]
    elif isinstance(data, list | tuple):
        if args[1:] == (...,) or get_origin(_strip(kind)) is list:
            yield from ((index, value, args[0]) for index, value in enumerate(data))
        elif get_origin(_strip(kind)) is tuple:
            yield from zip(range(len(args)), data, args, strict=False)
        elif _is_tuple(_strip(kind)):
            for value, (name, field) in zip(data, fields.items(), strict=False):
                yield name, value, field.kind


@functools.cache
def _has_dataclass(kind: Any) -> bool:
    bare = _strip(kind)
    inner = (*get_args(bare), *(field.kind for field in _list_fields(kind).values()))
    return dataclasses.is_dataclass(bare) or any(map(_has_dataclass, inner))


@functools.cache
def _list_fields(kind: Any) -> Mapping[str, _Field]:
    """Return the fields of a struct, a dataclass or a NamedTuple, by their names in files."""
    kind = _strip(kind)
    if get_origin(kind) is not None or not isinstance(kind, type):  # of list[int] both are so
        return {}
    fields = getattr(msgspec.inspect.type_info(kind), "fields", ())
    hints = typing.get_type_hints(kind, include_extras=True) if fields else {}
    return {field.encode_name: _Field(hints[field.name], field.required) for field in fields}


def _is_tuple(kind: Any) -> bool:
    """Whether it is a NamedTuple: a list in files."""
    return hasattr(kind, "_field_defaults")


def _strip(kind: Any) -> Any:
    """Strip a type of annotations and of None."""
    if get_origin(kind) is Annotated:
        return _strip(get_args(kind)[0])
    choices = _list_choices(kind)
    return kind if choices == [kind] else _strip(choices[0])


def _list_choices(kind: Any) -> list[Any]:
    """List the types of a union except None; of another type itself."""
    if get_origin(kind) not in (Union, types.UnionType):
        return [kind]
    none = (type(None), msgspec.UnsetType)
    return [each for each in get_args(kind) if each not in none]


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}


def _describe_kind(kind: Any) -> str:
    """Say what a value of a type is, in words."""
    if get_origin(kind) is Annotated:
        said = [meta.description for meta in kind.__metadata__ if meta.description]
        return said[0] if said else _describe_kind(get_args(kind)[0])
    if _list_choices(kind) != [kind]:
        return ", or ".join([*map(_describe_kind, _list_choices(kind)), "null"])
    if get_origin(kind) is Literal:
        allowed = [*map(repr, get_args(kind))]
        return f"one of {', '.join(allowed)}" if len(allowed) > 1 else allowed[0]
    fields, args = _list_fields(kind), get_args(kind)
    if _is_tuple(kind):
        least = sum(field.is_required for field in fields.values())
        return (
            f"a list of {least} to {len(fields)}" if least < len(fields) else f"a list of {least}"
        )
    if fields or get_origin(kind) is dict:
        return "an object with fields"
    if get_origin(kind) is tuple and args[1:] != (...,):
        return f"a list of {len(args)}"
    return "a list" if args else _WORDS.get(kind) or str(getattr(kind, "expected", ""))
