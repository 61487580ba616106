"""`python -m tfpar` is the command `tfpar`."""

import sys

from tfpar.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
