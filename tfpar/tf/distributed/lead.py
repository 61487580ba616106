"""Actions that one rank runs for all, such as writing a file, while the other ranks serve it.

The first rank runs the action. Where that needs the others (a sharded value is read, weights
are loaded) it names a method, and they call it too; at the end they learn how it went.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfpar.spec import TfparError

if TYPE_CHECKING:
    from tfpar.tf.distributed.world import World


class Lead:
    """The first rank's lead over the others."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._registered = 0
        self._leading = ""  # what runs here and is served
        self._alone = ""  # what runs here and is not

    def register(self, thing: Any) -> int:
        """A key for an object under which every rank knows its own; called in the same order."""
        self._registered += 1
        self._known[self._registered] = thing
        return self._registered

    def run(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on the first rank; every rank gets its result, a JSON value.

        Raises:
            TfparError: on the other ranks, if it failed on the first.
        """
        if self._leading:
            return action()
        if self._world.rank:
            return self._follow(what)
        self._leading = what
        try:
            result = action()
        except BaseException as error:
            self._say(what, {"failed": f"{type(error).__name__}: {error}"})
            raise
        else:
            self._say(what, {"done": result})
            return result
        finally:
            self._leading = ""

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Run a block on this rank that the others do not serve: what needs them is refused."""
        around, self._alone = self._alone, "" if self._leading else what
        try:
            yield
        finally:
            self._alone = around

    def check_together(self, what: str) -> None:
        """Check that all ranks can do `what` together: one that leads the others cannot.

        Raises:
            TfparError: this rank leads, or runs something alone.
        """
        if self._leading or self._alone:
            raise TfparError(
                f"{self._leading or self._alone} runs on rank 0 only, and takes a {what}, which "
                f"all ranks take together. Let every rank run it: tap.on_every_rank(callback)."
            )

    def check_served(self) -> None:
        """Check that the other ranks can meet this one.

        Raises:
            TfparError: it runs something alone.
        """
        if self._alone:
            raise TfparError(
                f"{self._alone} runs on rank 0 only, and needs the other ranks, as whoever reads "
                f"or saves split weights does. Let them serve it: tap.on_first_rank(callback)."
            )

    def write(self, path: str, what: str, action: Callable[[], Any]) -> Any:
        """Run an action that writes `path`, as `run` does; ranks with other paths write theirs."""
        if not self._leading:
            with self._world.at(what):
                paths = self._world.exchange.messages(path)
            if len(set(paths)) > 1:
                return action()
        return self.run(what, action)

    def ask(self, key: int, method: str, *arguments: Any) -> None:
        """On the leading rank, have the other ranks call the method of their own object too.

        Whoever calls it goes on to run the same method, so that the ranks meet in it.

        Raises:
            TfparError: in a graph, which may run at any time; where no other rank serves this one.
        """
        self.check_served()
        if self._leading:
            if not tf.executing_eagerly():
                raise TfparError(
                    "What one rank does for all (saving, exporting) traces a tf.function that "
                    "reads weights which are split over processes; the other ranks cannot take "
                    "part in it. Use model.export or model.save, which hand it whole weights."
                )
            self._say(method, {"call": [key, method, arguments]})

    def _say(self, what: str, message: dict[str, Any]) -> None:
        with self._world.at(what):
            self._world.exchange.message(message)

    def _follow(self, what: str) -> Any:
        while True:
            with self._world.at(what):
                told = self._world.exchange.message(None)
            if "failed" in told:
                raise TfparError(f"{what} failed on rank 0: {told['failed']}")
            if "done" in told:
                return told["done"]
            key, method, arguments = told["call"]
            getattr(self._known[key], method)(*arguments)
