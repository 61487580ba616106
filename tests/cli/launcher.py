"""`tfpar run` alone, as a process of its own: `python -m tests.cli.launcher run ...`."""

from __future__ import annotations

import argparse
import sys

from tfpar.cli import run
from tfpar.spec import TfparError


def main() -> int:
    parser = argparse.ArgumentParser("tfpar")
    run.add_parser(parser.add_subparsers(dest="command", required=True))
    options = parser.parse_args()
    try:
        return options.run(options)
    except TfparError as error:
        print(f"tfpar run: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
