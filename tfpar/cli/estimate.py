"""`tfpar estimate`: will it fit, and how fast."""

from __future__ import annotations

import argparse

from tfpar.cli.plan import plan_of
from tfpar.report.estimate import estimate
from tfpar.spec import MemoryLimitError


def run(options: argparse.Namespace) -> int:
    """Print the estimate; 0 if the model fits, 1 if no plan does.

    Raises:
        TfparError: the model cannot be planned at all.
    """
    try:
        print(estimate(plan_of(options)))
    except MemoryLimitError as error:
        print(f"Does not fit: {error}")
        return 1
    return 0
