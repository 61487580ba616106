"""The acceptance kit with the batch in four microbatches.

PYTHONPATH=. python ../shared/acceptance/run.py --api tests.kit_microbatches ...
"""

from __future__ import annotations

from typing import Any

import tfpar


def auto_parallel(*arguments: Any, **keywords: Any) -> Any:
    """`tfpar.auto_parallel` whose ranks compute their parts in four microbatches."""
    return tfpar.auto_parallel(
        *arguments, pipeline=tfpar.Pipeline(microbatches=4), **{"verbose": 0, **keywords}
    )


def __getattr__(name: str) -> Any:
    return getattr(tfpar, name)
