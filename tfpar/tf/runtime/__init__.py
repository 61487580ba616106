"""Runtime: links compiled steps into TensorFlow functions, and runs them on the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.tf.runtime.backends.in_process import InProcessProgram
    from tfpar.tf.runtime.backends.process import ProcessProgram
    from tfpar.tf.runtime.executable import Executable
    from tfpar.tf.runtime.ranks import Ranks

__all__ = [
    "Executable",
    "InProcessProgram",
    "ProcessProgram",
    "Ranks",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.tf.runtime.backends.in_process": ["InProcessProgram"],
        "tfpar.tf.runtime.backends.process": ["ProcessProgram"],
        "tfpar.tf.runtime.executable": ["Executable"],
        "tfpar.tf.runtime.ranks": ["Ranks"],
    },
)
