"""Saving and loading a parallel model: whole files from sharded weights, and back.

Of several processes the first one writes, and the others hand it their shards, one variable after
another. A file takes its name only once it is complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from tfpar.tf.keras.model import ParallelModel

SAVING = ("save", "save_weights", "export", "load_weights")


class ModelFileMethods:
    """Replacements of a model's own file methods, with the same arguments.

    Args:
        state: of the model.
    """

    def __init__(self, state: ParallelModel) -> None:
        self._state = state
        self.writing = False  # this process: Keras's own functions are at work

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        self.write(self._own("save"), filepath, args, kwargs)

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        self.write(self._own("save_weights"), filepath, args, kwargs)

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Functions of a SavedModel read whole variables; whoever writes it has them meanwhile."""
        self.write(self._own("export"), filepath, args, kwargs, self._state.whole)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Load weights; every rank reads what it stores."""
        self._state.load_weights(os.fspath(filepath), *args, **kwargs)

    def write(
        self,
        original: Callable[..., Any],
        filepath: Any,
        args: tuple,
        kwargs: dict[str, Any],
        prepared: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        """Have `original`, a function of Keras's, write the model once.

        Args:
            args, kwargs: for `original`, behind the model and the path.
            prepared: what it runs in.
        """
        path, model = os.fspath(filepath), self._state.model

        def write() -> None:
            keeps = kwargs.get("overwrite", True) is False and os.path.exists(path)
            several = path.endswith(".json") or kwargs.get("max_shard_size") is not None
            # Keras asks; object stores have no half-written files; of several, one names the rest.
            plainly = keeps or "://" in path or several
            file = contextlib.nullcontext(path) if plainly else complete(path)
            with prepared(), self._at_work(), file as name:
                original(model, name, *args, **kwargs)

        world = self._state.world
        if world is None:
            write()
        else:
            world.lead.write(path, f"{original.__name__}({path!r})", write)

    def _own(self, method: str) -> Callable[..., Any]:
        """The method as the model's class has it."""
        return getattr(type(self._state.model), method)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        self.writing = True
        try:
            yield
        finally:
            self.writing = False


@contextlib.contextmanager
def complete(path: str) -> Iterator[str]:
    """A name beside `path`; what lies there at the end takes the place of `path`."""
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".tmp-{uuid.uuid4().hex[:8]}-{name}")
    try:
        yield temporary
        if os.path.isdir(path) and os.path.isdir(temporary):  # folders do not replace each other
            aside = f"{temporary}-old"
            os.rename(path, aside)
            os.rename(temporary, path)
            shutil.rmtree(aside)
        elif os.path.exists(temporary):
            os.replace(temporary, path)
    finally:
        if os.path.isdir(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
        elif os.path.exists(temporary):
            os.remove(temporary)
