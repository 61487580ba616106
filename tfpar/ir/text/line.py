"""One line of a graph's text, read from left to right."""

from __future__ import annotations

import binascii
import json
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tfpar.ir.graph import DType, FunctionRef, Shape, ShapeAttr, UnknownShape
from tfpar.ir.text.values import BARE_NAME, WORD, elements, unpacked
from tfpar.spec.errors import GraphTextError

_Value = TypeVar("_Value")

_STRING = r'"(?:[^"\\]|\\.)*"'
_SPACE = re.compile(r"(?:\s+|//.*)*")
_NAME = re.compile(rf"(?:{BARE_NAME}|{_STRING})")
_TEXT = re.compile(_STRING)
_KEY = re.compile(WORD)
_NUMBER = re.compile(r"-?(?:inf|nan|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)(?![\w.])")
_ELEMENT = re.compile(r"[^\s<>]+")
_WORDS = {"none": None, "true": True, "false": False}


class Reference(NamedTuple):
    """A tensor or an op by its name."""

    op: str
    result: int = 0


class LineCursor:
    """A line with a place in it. Spaces and comments are passed over.

    Every method that reads raises a GraphTextError where something else stands.
    """

    def __init__(self, row: str, number: int) -> None:
        self.row = row
        self.number = number
        self.place = 0
        self._pass_space()

    def _pass_space(self) -> None:
        found = _SPACE.match(self.row, self.place)
        if found is not None:
            self.place = found.end()

    @property
    def ended(self) -> bool:
        return self.place == len(self.row)

    def wrong(self, what: str) -> GraphTextError:
        return GraphTextError(f"Line {self.number} of the graph's text: {what}.")

    def error(self, expected: str) -> GraphTextError:
        rest = self.row[self.place : self.place + 40]
        found = repr(rest) if rest else "its end"
        return self.wrong(f"expected {expected}, found {found}")

    # --- signs ---------------------------------------------------------------------------

    def at(self, sign: str) -> bool:
        return self.row.startswith(sign, self.place)

    def at_reference(self) -> bool:
        return self.at("%")

    def skip(self, sign: str) -> bool:
        """Pass over `sign` if it is what comes; a word only where it ends."""
        end = self.place + len(sign)
        longer = sign.isalpha() and re.match(r"[\w.]", self.row[end : end + 1])
        if not self.at(sign) or longer:
            return False
        self.place = end
        self._pass_space()
        return True

    def take(self, sign: str) -> None:
        if not self.skip(sign):
            raise self.error(repr(sign))

    def end(self) -> None:
        if not self.ended:
            raise self.error("the end of the line")

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self.row, self.place)
        if found is None:
            raise self.error(what)
        self.place = found.end()
        return found.group()

    def _read(self, pattern: re.Pattern[str], what: str) -> str:
        found = self._match(pattern, what)
        self._pass_space()
        return found

    def separated(self, read: Callable[[], _Value]) -> Iterator[_Value]:
        """Read one or more items, between commas."""
        yield read()
        while self.skip(","):
            yield read()

    def listed(
        self, read: Callable[[], _Value], opened: str = "(", closed: str = ")"
    ) -> list[_Value]:
        self.take(opened)
        found = [] if self.at(closed) else list(self.separated(read))
        self.take(closed)
        return found

    # --- names ---------------------------------------------------------------------------

    def text(self) -> str:
        return self._decoded(self._read(_TEXT, "a text in quotes"))

    def _decoded(self, quoted: str) -> str:
        try:
            found: str = json.loads(quoted)
        except ValueError:
            raise self.wrong(f"{quoted} is no text") from None
        return found

    def name(self) -> str:
        found = self._read(_NAME, "a name")
        return self._decoded(found) if found.startswith('"') else found

    def reference(self) -> Reference:
        if not self.at("%"):
            raise self.error("'%' and a name")
        self.place += 1
        found = self._match(_NAME, "a name")
        name = self._decoded(found) if found.startswith('"') else found
        index = re.compile(r":(\d+)").match(self.row, self.place)
        if index is not None:
            self.place = index.end()
        self._pass_space()
        return Reference(name, self._integer(index.group(1)) if index is not None else 0)

    def function(self) -> str:
        self.take("@")
        return self.name()

    def inputs(self) -> tuple[list[Reference], list[Reference]]:
        """Read the inputs before the semicolon, and the control inputs behind it."""
        self.take("(")
        found: list[list[Reference]] = []
        for _ in range(2):
            found.append(list(self.separated(self.reference)) if self.at("%") else [])
            if not self.skip(";"):
                break
        self.take(")")
        return found[0], found[1] if len(found) > 1 else []

    # --- types and values ----------------------------------------------------------------

    def kind(self) -> tuple[str, Shape]:
        """Read a dtype with a shape."""
        return self._read(_KEY, "a dtype"), self.shape()

    def shape(self) -> Shape:
        if self.skip("[*]"):
            return None
        return tuple(self.listed(self._size, "[", "]"))

    def _size(self) -> int | None:
        if self.skip("?"):
            return None
        return self._integer(self._read(re.compile(r"-?\d+"), "a size"))

    def _integer(self, digits: str) -> int:
        try:
            return int(digits)
        except ValueError:  # of more digits than Python reads
            raise self.wrong(f"a number has {len(digits)} digits") from None

    def attributes(self) -> dict[str, Any]:
        def pair() -> tuple[str, Any]:
            key = self.text() if self.at('"') else self._read(_KEY, "the name of an attribute")
            self.take("=")
            return key, self.value()

        return dict(self.listed(pair, "{", "}"))

    def value(self) -> Any:
        if self.at("["):
            return self.listed(self.value, "[", "]")
        if self.at("("):
            return tuple(self.listed(self.value))
        if self.at("@"):
            return FunctionRef(self.function())
        if self.at('"'):
            return self.text()
        if self.at('b"'):
            self.take("b")
            return self.text().encode("latin-1")
        if self.skip("shape"):
            shape = self.shape()
            return (
                UnknownShape()
                if shape is None
                else ShapeAttr(-1 if n is None else n for n in shape)
            )
        for form in ("dense", "scalar"):
            if self.skip(form):
                array = self._array()
                return array[()] if form == "scalar" else array
        number = _NUMBER.match(self.row, self.place)
        if number is not None:
            text = self._read(_NUMBER, "a number")
            return self._integer(text) if re.fullmatch(r"-?\d+", text) else float(text)
        word = self._read(_KEY, "a value")
        return _WORDS[word] if word in _WORDS else DType(word)

    def _array(self) -> np.ndarray:
        self.take("<")
        dtype, shape = self.kind()
        self.take(":")
        try:
            if self.skip("zlib"):
                flat = unpacked(dtype, self.text())
            elif self.skip("all"):
                flat = elements(dtype, [self._element()]).repeat(int(np.prod(shape)))
            else:
                texts = []
                while not self.at(">"):
                    texts.append(self._element())
                flat = elements(dtype, texts)
            array = flat.reshape(shape)
        except (ValueError, TypeError, OverflowError, binascii.Error, zlib.error) as error:
            if isinstance(error, GraphTextError):
                raise
            raise self.wrong(f"no array of {dtype} and shape {shape}: {error}") from error
        self.take(">")
        return array

    def _element(self) -> Any:
        if self.at('"') or self.at('b"'):
            return self.value()
        return self._read(_ELEMENT, "a value of the array")
