"""`tfpar install-horovod`: Horovod's wheel for the TensorFlow found here, built and installed."""

from __future__ import annotations

import argparse

from tfpar.jobs.install import horovod


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of `tfpar`."""
    parser = commands.add_parser(
        "install-horovod",
        help="build Horovod for the TensorFlow found here, and install it",
        description="Build Horovod for the TensorFlow found here, and install it. The wheel is "
        "kept below $TFPAR_CACHE (default: ~/.cache/tfpar).",
    )
    horovod.add_options(parser)
    parser.add_argument(
        "--traceback", action="store_true", help="on failure also show where, as Python does"
    )
    parser.set_defaults(run=horovod.run)
