"""The JSON files of a checkpoint: its index, and what each rank says of the part that it wrote.

    checkpoint.json        {"format": 2, "step": 120, "info": {...}, ..., "checksum": "9f86d0..."}

Each holds a checksum of the rest of it, and is read by its schema. Spaces and the order of keys do
not matter. Indexes of format 1 have no checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from tfpar.readable import UnreadableError, convert, parse_json, read_text
from tfpar.spec import TfparError
from tfpar.spec.quantities import Count

FORMAT_VERSION = 2

_CHECKSUM = "checksum"
_FIRST_WITH_CHECKSUM = 2

Counts = tuple[Count, ...]
_FileName = Annotated[
    str, msgspec.Meta(pattern=r"^tensors\.[\w.-]+$", description="the name of a file: tensors.*")
]
_Bundle = Annotated[
    str, msgspec.Meta(pattern=r"^[\w-]*$", description="a name of letters, digits, _ and -")
]


class NewerFormatError(TfparError):
    """An index of a format that only a newer tfpar reads.

    Attributes:
        version: of the format.
    """

    def __init__(self, version: int) -> None:
        super().__init__(f"Format {version} is newer than {FORMAT_VERSION}; upgrade tfpar.")
        self.version = version


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Index of a checkpoint: its step, files and tensors.

    Attributes:
        format: `FORMAT_VERSION` of those that wrote it.
        tfpar: their version.
        step: of training.
        info: what was given to `commit`.
        files: beside the index, with their sizes in bytes.
        tensors: their names.
    """

    format: int
    tfpar: str
    step: Count
    info: dict[str, Any]
    files: dict[_FileName, Count]
    tensors: tuple[str, ...]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Index entry of a tensor: the boxes that one rank wrote of it.

    Attributes:
        shape: of the whole tensor.
        bundle: the files that hold it; empty where other ranks write it.
        joined: TensorFlow reads no slices of it.
        boxes: (begin, size) of each that was written.
    """

    name: str
    shape: Counts
    dtype: str
    bundle: _Bundle
    joined: bool
    boxes: tuple[tuple[Counts, Counts], ...]

    @property
    def is_inside(self) -> bool:
        """Whether its boxes lie in the shape."""
        return all(
            len(begin) == len(size) == len(self.shape)
            and all(b + s <= n for b, s, n in zip(begin, size, self.shape, strict=True))
            for begin, size in self.boxes
        )


class IndexPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Index of one rank's part: the tensors that it wrote, and those that other ranks write."""

    entries: tuple[Entry, ...]


def write_sealed(path: str, content: msgspec.Struct) -> None:
    """Write a file that is whole as soon as it has its name; OSError if it cannot be written."""
    plain = json.loads(json.dumps(msgspec.to_builtins(content)))
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        json.dump({**plain, _CHECKSUM: _checksum_of(plain)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def read_part(path: str) -> IndexPart:
    """Read a part's index as `write_sealed` wrote it; UnreadableError if it was changed since."""
    return convert(_unsealed(_object_of(path)), IndexPart)


def read_index(path: str) -> Index:
    """Read a checkpoint's index as `write_sealed`, or an older tfpar without checksums, wrote it.

    Raises:
        UnreadableError: it is not what was written, or never was an index; says of which key.
        NewerFormatError: a newer tfpar wrote it.
    """
    data = _object_of(path)
    version = data.get("format")
    if type(version) is not int or version < 1:
        raise UnreadableError(f"`format` is {str(version)[:40]!r}, not a version")
    if version > FORMAT_VERSION:
        raise NewerFormatError(version)
    return convert(data if version < _FIRST_WITH_CHECKSUM else _unsealed(data), Index)


def _object_of(path: str) -> dict[str, Any]:
    data = parse_json(read_text(path))
    if not isinstance(data, dict):
        raise UnreadableError("it holds no object")
    return data


def _unsealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The content without its checksum, which has to be that of the content."""
    content = {key: value for key, value in data.items() if key != _CHECKSUM}
    if _CHECKSUM not in data:
        raise UnreadableError(f"`{_CHECKSUM}` is missing")
    if data[_CHECKSUM] != _checksum_of(content):
        raise UnreadableError(f"its `{_CHECKSUM}` is another one: it is not what was written")
    return content


def _checksum_of(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
