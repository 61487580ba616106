"""Atomic writing of files, and a check before long work that its result can be written."""

from __future__ import annotations

import contextlib
import os

from tfpar.spec import TfparError


def write_whole(
    what: str, path: str, content: str | bytes, error_type: type[TfparError] = TfparError
) -> None:
    """Write a file, of text in UTF-8.

    Args:
        what: names the file in errors.

    Raises:
        TfparError: it cannot be written; of `error_type`.
    """
    partial = f"{path}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise error_type(f"Cannot write the {what} {path!r}: {error.strerror}.") from error


def check_writable(
    what: str, path: str, *, advice: str = "", error_type: type[TfparError] = TfparError
) -> None:
    """Raise as `write_whole` would if a file could not be written at `path` now."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        problem = "it is a folder"
    elif not os.path.isdir(folder):
        problem = f"there is no folder {folder!r}"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        problem = "it may not be written"
    else:
        return
    raise error_type(f"Cannot write the {what} {path!r}: {problem}.{advice and ' '}{advice}")
