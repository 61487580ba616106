"""The command `tfpar`: plans made, shown and compared from a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.cli.main import make_parser

__all__ = [
    "make_parser",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.cli.main": ["make_parser"],
    },
)
