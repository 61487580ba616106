"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os

from tfpar.spec import PlanError


def write_whole(what: str, path: str, text: str) -> None:
    """Write `text` in UTF-8; `what` names the file in errors.

    Raises:
        PlanError: it cannot be written.
    """
    partial = f"{path}.{os.getpid()}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise PlanError(f"Cannot write the {what} file {path!r}: {error.strerror}.") from error
