"""Folders of checkpoints: one for each checkpoint, named by step; the name says if it is complete.

    run/step-00000120/                  complete
    run/step-00000240.1/                complete; step 240, saved a second time
    run/step-00000360.tmp-4f1c/         being written, or left by a run that was killed

A folder gets a name without `.tmp-` by one atomic rename, after all it holds has been
written through to the disk, and loses it by one before anything in it is deleted. So whoever
looks sees whole checkpoints only, at any moment. Ranks share the file system; one run at a time
writes to a folder of checkpoints (`lock`).
"""

from __future__ import annotations

import os
import re
import shutil

from tfpar.spec import TfparError

DESCRIPTION = "checkpoint.json"
TENSORS = "tensors"

_COMPLETE = re.compile(r"step-(\d+)(?:\.(\d+))?$")
_TEMPORARY = re.compile(r"step-(\d+)(?:\.\d+)?\.tmp-(.+)$")


def temporary_folder(folder: str, step: int, token: str) -> str:
    """The folder in which all ranks write the checkpoint of `step` until it is committed.

    Args:
        token: what tells this run from those before it, the same on all ranks: drawn at
            random by one of them and sent to the others.

    Raises:
        TfparError: a negative step, or a token that cannot be part of a file name.
    """
    if step < 0:
        raise TfparError(f"A checkpoint's step is at least 0; got {step}.")
    if not re.fullmatch(r"\w+", token):
        raise TfparError(f"A token is made of letters and digits; got {token!r}.")
    return os.path.join(os.path.abspath(folder), f"step-{step:08d}.tmp-{token}")


def checkpoints(folder: str) -> list[str]:
    """Paths of the complete checkpoints, the last saved step at the end."""
    return [path for _, _, path in _complete(folder)]


def latest(folder: str) -> str | None:
    """The complete checkpoint of the greatest step; None if there is none."""
    return next(reversed(checkpoints(folder)), None)


def prune(folder: str, keep: int) -> None:
    """Delete all but the last `keep` complete checkpoints.

    Raises:
        TfparError: `keep` is less than 1.
    """
    if keep < 1:
        raise TfparError(f"prune(keep={keep}) would delete every checkpoint; keep at least 1.")
    for path in checkpoints(folder)[:-keep]:
        _delete(path)


def discard(temporary: str) -> None:
    """Delete a folder that will not become a checkpoint, if it is there."""
    step_of(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def step_of(temporary: str) -> int:
    """The step of a path that `temporary_folder` gave; TfparError for any other."""
    return _parsed(temporary)[0]


def step_in(path: str) -> int | None:
    """The step that the name of a complete checkpoint's folder says; None for any other name."""
    match = _COMPLETE.match(_name_of(path))
    return int(match[1]) if match else None


def is_temporary(path: str) -> bool:
    """Whether the name of a folder says that it is no checkpoint yet, or any more."""
    return _TEMPORARY.match(_name_of(path)) is not None


def _name_of(path: str) -> str:
    return os.path.basename(os.path.abspath(path))


def publish(temporary: str) -> str:
    """Give a finished folder its final name, and delete what it replaces; returns the path.

    A step that was saved before is not replaced in place: the new one gets the next
    version, so that one of the two is there at every moment.
    """
    folder, (step, token) = os.path.dirname(os.path.abspath(temporary)), _parsed(temporary)
    taken = [version for at, version, _ in _named(folder) if at == step]
    version = f".{max(taken) + 1}" if taken else ""
    final = os.path.join(folder, f"step-{step:08d}{version}")
    sync(temporary)
    os.rename(temporary, final)
    sync(folder)
    for at, _, path in _complete(folder):
        if at == step and path != final:
            _delete(path)
    _sweep(folder, step, token)
    return final


def sync(path: str) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named(folder: str) -> list[tuple[int, int, str]]:
    """(step, version, path) of what has the name of a complete checkpoint, in this order."""
    if not os.path.isdir(folder):
        return []
    matches = filter(None, map(_COMPLETE.match, os.listdir(folder)))
    return sorted((int(m[1]), int(m[2] or 0), os.path.join(folder, m[0])) for m in matches)


def _complete(folder: str) -> list[tuple[int, int, str]]:
    """List the folders of `_named` that are checkpoints."""
    return [f for f in _named(folder) if os.path.isfile(os.path.join(f[2], DESCRIPTION))]


def _sweep(folder: str, step: int, token: str) -> None:
    """Delete what dead runs left, and this run's own attempts up to `step`."""
    for name in os.listdir(folder):
        match = _TEMPORARY.match(name)
        if match and (match[2] != token or int(match[1]) <= step):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def _delete(path: str) -> None:
    """Delete a complete checkpoint; it stops being one before its first file goes."""
    doomed = f"{path}.tmp-deleted"
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _parsed(temporary: str) -> tuple[int, str]:
    match = _TEMPORARY.match(os.path.basename(temporary))
    if match is None:
        raise TfparError(f"{temporary!r} is not a temporary checkpoint folder (step-N.tmp-TOKEN).")
    return int(match[1]), match[2]
