"""Random ops that are functions of a key: every rank draws the whole, and takes its part.

The numbers are those of one device, whatever the mesh. Stateful generators have no rule: one
rank runs them for all.
"""

from __future__ import annotations

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, replicate_rule


@rule(
    "StatelessRandomGetKeyCounter", "StatelessRandomGetAlg", "StatelessRandomGetKeyCounterAlg",
    "StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal",
    "StatelessRandomUniformInt", "StatelessRandomUniformFullInt",
    "StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2",
    "StatelessRandomUniformIntV2", "StatelessRandomUniformFullIntV2",
)  # fmt: skip
def _whole(op: Op, constants: Constants) -> OpRule:
    return replicate_rule(op)
