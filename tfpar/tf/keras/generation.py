"""KerasHub's `generate` on a mesh: its function of one batch as a step like any other.

The loop over tokens is part of the step. Weights that are split stay where they are; what the loop
needs whole is gathered once, before it begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfpar.tf.functions.call import CallArguments
from tfpar.tf.steps import CompiledFunction

if TYPE_CHECKING:
    from tfpar.tf.keras.model import ParallelModel


class GenerateFunction:
    """Function that takes the place of `tf.function(model.generate_step)`.

    As there, tensors are fed, everything else is a constant of the step, and Python control flow on
    tensors becomes ops.

    Args:
        state: of the model.
    """

    def __init__(self, state: ParallelModel) -> None:
        self._state = state
        self._steps: dict[Any, CompiledFunction] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = CallArguments.of("generate", args, kwargs)
        if call.key not in self._steps:
            self._steps[call.key] = self._step(call)
        return self._steps[call.key](*call.tensors)

    def _step(self, call: CallArguments) -> CompiledFunction:
        state, context = self._state, tf.__internal__.autograph.control_status_ctx()
        generate_step = tf.__internal__.autograph.tf_convert(state.model.generate_step, context)

        def run(*tensors: Any) -> Any:
            args, kwargs = call.with_tensors(tensors)
            return generate_step(*args, **kwargs)

        return CompiledFunction(
            state.program,
            run,
            names=state.variable_name,
            part=True,
            jit_compile=state.model.jit_compile,
            name="generate_step",
        )
