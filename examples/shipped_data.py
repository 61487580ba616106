"""Data that every installation has: the source text of Python's library, and handwritten digits."""

from __future__ import annotations

import collections
import pathlib
import re
import sysconfig

import numpy as np

LIBRARY = pathlib.Path(sysconfig.get_paths()["stdlib"])
MODULES = ("ast.py", "inspect.py", "argparse.py", "typing.py", "tarfile.py", "pydoc.py")


def library_text() -> bytes:
    """Some 800 KB of Python."""
    return b"".join((LIBRARY / name).read_bytes() for name in MODULES)


def next_bytes(sequences: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of bytes of the library's text, and for each byte the one that follows."""
    text = np.frombuffer(library_text(), np.uint8)[: sequences * length + 1].astype("int32")
    return text[:-1].reshape(-1, length), text[1:].reshape(-1, length)


def next_words(
    samples: int, context: int, classes: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Windows of words of the whole library, the word that follows each, and what the words are.

    A word is its place among all, the most frequent first; only the first `classes` count.
    """
    words = [
        word
        for path in sorted(LIBRARY.rglob("*.py"))
        if "site-packages" not in path.parts
        for word in re.findall(r"\w+", path.read_text(encoding="utf-8", errors="ignore"))
    ]
    names = [word for word, _ in collections.Counter(words).most_common(classes)]
    place = {word: i for i, word in enumerate(names)}
    ids = np.array([place[word] for word in words if word in place], "int32")
    starts = np.random.default_rng(0).integers(0, len(ids) - context, samples)
    windows = ids[starts[:, None] + np.arange(context + 1)]
    return windows[:, :-1], windows[:, -1], names


def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images of 8 x 8 from 0 to 1, and which digit each is (scikit-learn ships them)."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images.reshape(-1, 8, 8, 1) / 16.0).astype("float32"), labels.astype("int32")
