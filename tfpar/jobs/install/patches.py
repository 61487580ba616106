"""Patches to Horovod's sources, applied before they are compiled.

Its last release was written for TensorFlow 2.12 and Python 3.11; each patch names one line of
those sources and what stands in its place.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from tfpar.spec.errors import TfparError


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """`old`, which is found once in the file `path` of the source tree, becomes `new`."""

    path: str
    old: str
    new: str


_GPU_STREAM = """\
#include "xla/stream_executor/stream.h"
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
"""

PATCHES = (
    # XLA's headers were moved and its registration of custom calls changed in TensorFlow 2.16. The
    # file holds only Horovod's ops for jit_compile=True, which tfpar does not use.
    Patch(
        "horovod/tensorflow/xla_mpi_ops.cc",
        "#if TENSORFLOW_VERSION >= 2006000000\n",
        "#if TENSORFLOW_VERSION >= 2006000000 && TENSORFLOW_VERSION < 2016000000\n",
    ),
    # The groups of a mesh took no notice of HOROVOD_GLOO_IFACE, and bound to what the host name
    # resolves to: the loopback on many machines, where no other machine can reach them.
    Patch(
        "horovod/common/gloo/gloo_context.cc",
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;\n",
        "  device_attr.iface = gloo_iface_ = global_context.gloo_iface_;\n"
        "  auto dev = CreateDevice(device_attr);\n  global_ctx = global_context.ctx;\n",
    ),
    # Over Gloo the list of ranks kept length 0, so that a stalled collective was never spoken of.
    Patch(
        "horovod/common/gloo/gloo_controller.cc",
        "  global_ranks_.reserve(size_);\n",
        "  global_ranks_.resize(size_);\n",
    ),
    # TensorFlow 2.19 no longer has AsGpuStreamValue: the stream itself hands out what CUDA calls
    # it. Only builds with NCCL compile this part.
    Patch(
        "horovod/tensorflow/mpi_ops.cc",
        "\nGpuStreamHandle AsGpuStreamValue(Stream* stream);\n",
        "\ninline GpuStreamHandle AsGpuStreamValue(Stream* stream);\n",
    ),
    Patch(
        "horovod/tensorflow/mpi_ops.cc",
        '#include "tensorflow/compiler/xla/stream_executor/stream.h"\n',
        _GPU_STREAM,
    ),
    # Python 3.12 has no distutils.
    Patch(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable\n",
        "from shutil import which as find_executable\n",
    ),
    # Debug symbols take a quarter of the time and three quarters of the wheel.
    Patch("setup.py", "else 'RelWithDebInfo'\n", "else 'Release'\n"),
    # Gloo would be compiled a second time, for the C++ of other frameworks.
    Patch("setup.py", "'--build', '.']", "'--build', '.', '--target', 'tensorflow']"),
    # What Horovod needs to run it does not need to be built.
    Patch("setup.py", "setup_requires=require_list if is_build_action() else [],\n", "\n"),
)


def patch_version() -> str:
    """A short hash that changes with any patch."""
    return hashlib.blake2b(repr(PATCHES).encode(), digest_size=4).hexdigest()


def patch_sources(root: Path) -> None:
    """Apply `PATCHES` to the source tree `root` (`.../horovod-0.28.1`); those applied are left.

    Raises:
        TfparError: a file is not the one that a patch was made for.
    """
    for patch in PATCHES:
        path = root / patch.path
        text = path.read_text() if path.exists() else ""
        if patch.old not in text and patch.new in text:
            continue
        if text.count(patch.old) != 1:
            raise TfparError(
                f"{root.name} has another {path.name} than tfpar's patch was made for: "
                f"{patch.old.strip()!r} is {'not' if patch.old not in text else 'more than once'} "
                f"in {path}. Let pip find the unchanged sources of the release named."
            )
        path.write_text(text.replace(patch.old, patch.new))
