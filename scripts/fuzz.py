"""Mutate every file that tfpar reads and every option that it takes, and see how it ends.

    python -m scripts.fuzz [--cases 2000] [--seed 0] [--case N] [KIND ...]

A case is a valid file with something changed in it, or a valid call with one odd argument. It ends
well, or by a TfparError: whatever else it does is a fault (another exception, more than its time
or memory, the end of the process), and so is a file that was accepted and does not work. Cases are
drawn by kind, seed and number: `--case` tries one again, and shows what it raises.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from scripts.fuzzing.kinds import KINDS  # noqa: E402
from scripts.fuzzing.trials import Outcome, replay, run  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Try the cases; returns 1 if there is a fault."""
    options = _parser().parse_args(argv)
    faults = 0
    for name in options.kinds or KINDS:
        if options.case is not None:
            replay(KINDS[name], options.case, options.seed)
            continue
        begin = time.monotonic()
        outcome = run(KINDS[name], range(options.cases), options.seed)
        faults += len(outcome.faults)
        _show(name, outcome, time.monotonic() - begin)
    return 1 if faults else 0


def _show(name: str, outcome: Outcome, seconds: float) -> None:
    print(
        f"{name}: {outcome.accepted} accepted, {outcome.refused} refused, "
        f"{len(outcome.faults)} faults; {seconds:.1f} s",
        flush=True,
    )
    for (kind, where), faults in outcome.by_place().items():
        first = faults[0]
        print(f"  {len(faults)} x {kind} at {where}, such as case {first.case}: {first.error}")
        print(f"      {first.drawn}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--cases", type=int, default=2000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0, help="draws other cases")
    parser.add_argument("--case", type=int, help="only this one, in this process")
    return parser


if __name__ == "__main__":
    sys.exit(main())
