"""Installation of Horovod, built for the TensorFlow found here: no registry has it ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.jobs.install.toolchain import CMAKE_REQUIREMENT, PYTHON_NEEDS

__all__ = [
    "CMAKE_REQUIREMENT",
    "PYTHON_NEEDS",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.jobs.install.toolchain": ["CMAKE_REQUIREMENT", "PYTHON_NEEDS"],
    },
)
