"""The acceptance kit with two stages and four microbatches.

Half of the kit's ranks run the first stage, the others the second.

PYTHONPATH=. python ../shared/acceptance/run.py --api tests.kit_stages ...
"""

from __future__ import annotations

from typing import Any

import tfpar


def auto_parallel(*arguments: Any, **keywords: Any) -> Any:
    """`tfpar.auto_parallel` with a pipeline."""
    pipeline = tfpar.Pipeline(stages=2, microbatches=4)
    return tfpar.auto_parallel(*arguments, pipeline=pipeline, **{"verbose": 0, **keywords})


def __getattr__(name: str) -> Any:
    return getattr(tfpar, name)
