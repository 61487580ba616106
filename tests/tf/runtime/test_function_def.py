"""Functions as TensorFlow is given them."""

from __future__ import annotations

import pytest
from tensorflow.python.eager import context

from tfpar.tf.runtime.function_def import FunctionWriter


@pytest.mark.parametrize("inline", [True, False])
def test_a_function_that_is_called_often_is_there_once(inline):
    """Neither put in the place of its calls nor copied for each, which Grappler else does."""
    writer = FunctionWriter(f"called_{inline}")
    writer.output(writer.argument("x", "float32"), "float32")
    function = writer.register(inline=inline)
    attrs = context.context().get_function_def(function.name).attr
    for name in ("_noinline", "_nospecialize"):
        assert (name in attrs and attrs[name].b) == (not inline)
