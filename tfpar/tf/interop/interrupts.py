"""Ctrl-C while TensorFlow makes a graph: raised where an op is made, until tracing has ended.

Python raises KeyboardInterrupt wherever it is. While a graph is made that is often where the
exception gets lost: in a `__del__`, in a bare `except:` of Keras, in C++ that calls Python, which
makes a SystemError of it. Then a whole model is traced before Ctrl-C shows.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tfpar.tf.interop.watched_ops import watched_ops


class Interrupt:
    """Ctrl-C of which nobody has heard yet."""

    def __init__(self) -> None:
        self._is_pending = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed; again at each call."""
        if self._is_pending:
            raise KeyboardInterrupt

    def press(self) -> None:
        self.check()  # pressed again: at once, wherever this is
        self._is_pending = True

    def on_op(self, *arguments: Any, **names: Any) -> None:
        self.check()


@contextlib.contextmanager
def raise_at_ops(*, at_the_end: bool = False) -> Iterator[Callable[[], None]]:
    """Turn Ctrl-C, while open, into a KeyboardInterrupt of the next op that this thread makes.

    Whoever swallows it gets another one at the op after that, and one is raised at the end at the
    latest. A second Ctrl-C does not wait. Where Python does not handle Ctrl-C (in other threads,
    under handlers of the user's own) nothing changes.

    Args:
        at_the_end: raise it there only; for what must not be left half done, and takes no time.

    Yields:
        Raises KeyboardInterrupt if one is waiting for an op.
    """
    interrupt = Interrupt()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt.check
        return
    with contextlib.ExitStack() as watching:

        def on_signal(number: int, frame: Any) -> None:
            interrupt.press()
            if not at_the_end:  # from now on: watching costs a twentieth of tracing
                watching.enter_context(watched_ops(interrupt.on_op))

        signal.signal(signal.SIGINT, on_signal)
        try:
            yield interrupt.check
        except Exception:
            interrupt.check()  # what came of it where it was swallowed
            raise
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.check()
