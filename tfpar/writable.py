"""Whether a file could be written: asked before long work whose result goes there."""

from __future__ import annotations

import os


def why_not_writable(path: str) -> str:
    """Why no file can be written at `path`; nothing if one can."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        return "it is a folder"
    if not os.path.isdir(folder):
        return f"there is no folder {folder!r}"
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        return "it may not be written"
    return ""
