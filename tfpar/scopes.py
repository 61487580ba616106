"""Stack of open `auto_parallel` blocks, which enclose what is built: the one piece of global state.

Blocks nest, each thread (and task) has a stack of its own, and a thread begins with the stack of
the thread that started it, for as long as those blocks are open.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from tfpar.tf.session import Session

active: contextvars.ContextVar[tuple[Session, ...]] = contextvars.ContextVar("active", default=())
"""The stack of scopes that were entered here."""

_inherited: contextvars.ContextVar[tuple[Session, ...]] = contextvars.ContextVar(
    "inherited", default=()
)
"""The stack of the thread that started this one, at that time."""

_open: weakref.WeakSet[Session] = weakref.WeakSet()
"""The sessions whose blocks are open, of all threads."""


def _of_block_alone(around: Session | None) -> Session | None:
    return around


session_in_force: Callable[[Session | None], Session | None] = _of_block_alone
"""Find the session of what is built inside of a block, or of none: where Keras is in use, a
distribution may be in force (`tfpar.distribution`)."""


def enclosing() -> Session | None:
    """Return the session of the innermost block around here; without one, that of the
    `keras.distribution` in force.

    Raises:
        ArgumentError: both are there, and differ.
    """
    own = active.get()
    if own:
        return session_in_force(own[-1])
    return session_in_force(next((s for s in reversed(_inherited.get()) if s in _open), None))


def open_elsewhere() -> Session | None:
    """Return a session whose block is open in another thread, if none is around here."""
    return None if enclosing() is not None else next(iter(_open), None)


@contextlib.contextmanager
def block(session: Session) -> Iterator[Session]:
    """Open the scope of a session, as `auto_parallel` does; threads started inside inherit it."""
    _open.add(session)
    try:
        with session.scope():
            yield session
    finally:
        _open.discard(session)


def install_threads() -> None:
    """Let threads inherit the stack of who starts them; idempotent."""
    start = threading.Thread.start
    if getattr(start, "_tfpar", False):
        return

    @functools.wraps(start)
    def inheriting(self: threading.Thread) -> None:
        stack = active.get() or _inherited.get()
        if stack:
            self.run = functools.partial(_run_inside, self, stack)  # type: ignore[method-assign]
        start(self)

    inheriting._tfpar = True  # type: ignore[attr-defined]
    threading.Thread.start = inheriting  # type: ignore[method-assign]


def _run_inside(thread: threading.Thread, stack: tuple[Session, ...]) -> None:
    """Run a thread that was started inside of blocks with their stack."""

    def create(next_creator: Any, **arguments: Any) -> Any:
        session = enclosing()
        if session is None:
            return next_creator(**arguments)
        return session.create_variable(next_creator, **arguments)

    del thread.run  # its own again: what it holds need not outlive it
    token = _inherited.set(stack)
    try:
        with tf.variable_creator_scope(create):
            thread.run()
    finally:
        _inherited.reset(token)
