"""Files of text, JSON and TOML, read so that whatever is wrong with one is an `UnreadableError`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import tomlkit
import tomlkit.exceptions

from tfpar.spec import TfparError


class UnreadableError(TfparError, ValueError):
    """A file or a text that cannot be read. It says why; its reader says of which file."""


def read_text(path: str | os.PathLike[str], encoding: str = "utf-8") -> str:
    """The text of a file.

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
    """The value that a JSON text holds.

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
    """The tables that a TOML text holds.

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
