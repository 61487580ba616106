"""`python -m tfpar.jobs.doctor.alone`: two ranks in this process train a tiny model."""

from __future__ import annotations

import tfpar as tap
from tfpar.jobs.doctor.training import check_training


def main() -> None:
    """Train a tiny model by two ranks in this process; raises whatever goes wrong."""
    first, *_, last = check_training(tap.split([2]))
    print(f"two ranks in one process train as one device does (loss {first:.3f}, {last:.3f})")


if __name__ == "__main__":
    main()
