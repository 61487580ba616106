"""From a captured step to the program of every rank; free of TensorFlow.

The passes, in their order; each leaves a graph that can be printed (`tfpar.ir.text`):

1. order effects, inline calls, split bundles, trim, predicate branches, fold constants, split block
   sums: the step as it is planned (`simplify_step`);
2. fuse attention: where the plan has it on blocks of its scores (`fuse_attention_step`);
3. recompute: what the plan computes again is cloned into the backward pass (`recompute_step`);
4. offload: what the plan has in host memory is read and written there (`offload_step`);
5. gather weights: those that the plan stores in parts are gathered for each pass (`gather_step`);
6. propagate: a spec for every tensor, and the reshards; rewrite: local shapes, and collectives as
   ops; early collectives, pack collectives: when they start, and how few (`compile_step`).

Planning happens between the first and the second.
"""

from tfpar.compile.lower import ActorLayout, CompiledStep, CompileOptions, compile_step
from tfpar.compile.simplify import (
    fuse_attention_step,
    gather_step,
    offload_step,
    prepare_step,
    recompute_step,
    simplify_step,
)

__all__ = [
    "ActorLayout",
    "CompileOptions",
    "CompiledStep",
    "compile_step",
    "fuse_attention_step",
    "gather_step",
    "offload_step",
    "prepare_step",
    "recompute_step",
    "simplify_step",
]
