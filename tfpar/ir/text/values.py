"""Text form of names, types and attribute values.

| value | text |
| --- | --- |
| `DType` | `float32` |
| `ShapeAttr`, `UnknownShape` | `shape[2,?]`, `shape[*]` |
| `FunctionRef` | `@body` |
| bytes, str | `b"SAME"`, `"sum"` |
| bool, None, numbers | `true`, `none`, `3`, `0.5`, `-inf` |
| list, tuple | `[1, 2]`, `(1, 2)` |
| array | `dense<float32[2]: 1.0 2.0>` |
| array of one value | `dense<float32[2,2]: all 0.0>` |
| large array | `dense<float32[64,64]: zlib "eJx...">`, its bytes |
| numpy scalar | `scalar<int64[]: 3>` |
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

import numpy as np

from tfpar.ir.builder import numpy_dtype
from tfpar.ir.graph import DType, FunctionRef, Shape, ShapeAttr, Tensor, UnknownShape

MOST_INLINE = 16
"""Arrays of more values are written as their bytes."""

BARE_NAME = r"[A-Za-z0-9_.][\w./>#\-]*"
WORD = r"[A-Za-z_][\w.]*"


def name_text(name: str) -> str:
    return name if re.fullmatch(BARE_NAME, name) else json.dumps(name)


def tensor_text(tensor: Tensor) -> str:
    index = f":{tensor.index}" if tensor.index else ""
    return f"%{name_text(tensor.op.name)}{index}"


def shape_text(shape: Shape) -> str:
    if shape is None:
        return "[*]"
    return f"[{','.join('?' if n is None else str(n) for n in shape)}]"


def attributes_text(attrs: dict[str, Any]) -> str:
    """Attributes by name: TensorFlow gives them in another order in each process."""
    pairs = (f"{_key_text(key)} = {value_text(value)}" for key, value in sorted(attrs.items()))
    return f"{{{', '.join(pairs)}}}"


def _key_text(key: str) -> str:
    return key if re.fullmatch(WORD, key) else json.dumps(key)


def value_text(value: Any) -> str:
    """Format an attribute's value.

    Raises:
        TypeError: no attribute has a value of this type.
    """
    if value is None:
        return "none"
    if isinstance(value, np.generic):
        return f"scalar<{_array_text(np.asarray(value))}>"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, DType):
        return str(value)
    if isinstance(value, FunctionRef):
        return f"@{name_text(value)}"
    if isinstance(value, bytes):
        return f"b{json.dumps(value.decode('latin-1'))}"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, ShapeAttr):
        return f"shape{shape_text(tuple(None if n == -1 else n for n in value))}"
    if isinstance(value, UnknownShape):
        return "shape[*]"
    if isinstance(value, np.ndarray):
        return f"dense<{_array_text(value)}>"
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(value_text, value))})"
    raise TypeError(f"an attribute of type {type(value).__name__} has no text form: {value!r}")


# --- arrays ----------------------------------------------------------------------------


def _array_text(array: np.ndarray) -> str:
    start = f"{_array_dtype(array)}{shape_text(array.shape)}:"
    flat = array.reshape(-1)
    if array.dtype.kind in "OSU":
        return " ".join([start, *(value_text(v) for v in flat.tolist())])
    if flat.size > 1 and _all_alike(flat):
        texts = _element_texts(flat[:1])
        if texts is not None:
            return f"{start} all {texts[0]}"
    texts = _element_texts(flat) if flat.size <= MOST_INLINE else None
    if texts is not None:
        return " ".join([start, *texts])
    packed = base64.b64encode(zlib.compress(array.tobytes())).decode()
    return f'{start} zlib "{packed}"'


def _all_alike(flat: np.ndarray) -> bool:
    data = flat.tobytes()
    return data == data[: flat.itemsize] * flat.size


def _array_dtype(array: np.ndarray) -> str:
    """`float32`; `U5` and `S5` for texts and bytes of up to 5."""
    name: str = array.dtype.str[1:] if array.dtype.kind in "SU" else array.dtype.name
    return name


def _element_texts(flat: np.ndarray) -> list[str] | None:
    """The shortest decimals that read back to the last bit; None where there are none."""
    if flat.dtype.kind == "c":
        return None
    texts = [str(v).lower() for v in flat]
    read = elements(_array_dtype(flat), texts)
    return texts if read.tobytes() == flat.tobytes() else None


def elements(dtype: str, texts: list[Any]) -> np.ndarray:
    """Return the flat array of these values, as they are written in text.

    Args:
        texts: decimals, `true` and `false`; of arrays of strings, the strings.
    """
    kind = array_dtype(dtype)
    if kind.kind == "O":
        made = np.empty(len(texts), object)
        made[:] = texts
        return made
    if kind.kind in "SU":
        return np.array(texts, kind)
    if kind.kind == "b":
        return np.array([t == "true" for t in texts], kind)
    read = int if kind.kind in "iu" else float
    return np.array([read(t) for t in texts], kind)


def array_dtype(name: str) -> np.dtype:
    return np.dtype(name) if re.fullmatch(r"[SU]\d+", name) else numpy_dtype(name)


def unpacked(dtype: str, packed: str) -> np.ndarray:
    """Return the flat array whose bytes were packed."""
    data = zlib.decompress(base64.b64decode(packed, validate=True))
    array: np.ndarray = np.frombuffer(data, array_dtype(dtype)).copy()
    return array
