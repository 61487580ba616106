"""As if what goes between ranks took its time, in steps and in whatever is timed."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator

from tfpar.tf.runtime import InProcessProgram, ProcessProgram


@contextlib.contextmanager
def slow_all_reduces(
    program: type[InProcessProgram] | type[ProcessProgram], seconds: float
) -> Iterator[None]:
    """Each all-reduce of programs made inside takes so much longer."""
    made, called = program.__init__, program.__call__
    reduces: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def make(self, programs, *arguments, **keywords):
        of_all = programs.programs.values()
        ops = [op for one in of_all for graph in one.graphs() for op in graph.ops]
        reduces[self] = sum(op.type == "AllReduce" for op in ops)
        made(self, programs, *arguments, **keywords)

    def call(self, inputs, handles):
        time.sleep(seconds * reduces[self])
        return called(self, inputs, handles)

    program.__init__, program.__call__ = make, call  # type: ignore[method-assign]
    try:
        yield
    finally:
        program.__init__, program.__call__ = made, called  # type: ignore[method-assign]
