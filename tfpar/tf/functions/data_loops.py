"""Datasets and iterators as arguments of a `tap.function`.

They are read outside of the steps, on the host. A function that takes elements with `next` is one
step, which is fed those elements. In a function that loops over data, `for batch in dataset`, each
pass through the loop's body is a step; what stands before and after the loop runs on the host.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfpar.spec import CaptureError
from tfpar.tf.capture.step import argument_specs
from tfpar.tf.functions.call import CallArguments
from tfpar.tf.interop.autograph import (
    FunctionScope,
    Undefined,
    UndefinedReturnValue,
    on_enumerate,
    on_loop,
)
from tfpar.tf.variables.tracing_context import capturing

if TYPE_CHECKING:
    from tfpar.tf.functions.step_function import StepFunction

logger = logging.getLogger("tfpar")


def call_with_data(function: StepFunction, call: CallArguments) -> Any:
    """Call `function` where there are datasets or iterators among its arguments."""
    sources: Sequence[Any] = call.sources
    if all(isinstance(s, tf.data.Iterator) for s in sources):
        if call.key not in function.elements_taken:
            sources = [_Probed(s) for s in sources]
            function.elements_taken[call.key] = _probe(function, call, sources)
        counts = function.elements_taken[call.key]
        if counts is not None:
            return _read_step(function, call, sources, counts)
    host = _Host(function)
    args, kwargs = call.with_tensors(call.tensors, [Data(s, host) for s in sources])
    result = function.traced(*args, **kwargs)
    if not host.steps:
        logger.warning(
            "%s is given data and has no loop over it that could be run in steps: it ran on one "
            "device. Write `for batch in dataset:` in it (with AutoGraph), or give it batches.",
            function.name,
        )
    return tf.nest.map_structure(_returned, result)


def _returned(value: Any) -> Any:
    """A result as a `tf.function` gives it: numbers, strings and variables as tensors."""
    counts = isinstance(value, (bool, int, float, complex, str, bytes, tf.Variable))
    return tf.convert_to_tensor(value) if counts else value


# --- elements taken with next: one step ----------------------------------------------


def _probe(
    function: StepFunction, call: CallArguments, sources: Sequence[_Probed]
) -> tuple[int, ...] | None:
    """Count the elements that a step takes of each iterator; None if it loops over one."""
    graph = tf.__internal__.FuncGraph(function.name)
    with function.session.scope(), capturing(), graph.as_default():
        args, kwargs = call.with_tensors(call.tensors, sources)
        for source in sources:
            source.graph = graph
        try:
            function.traced(*args, **kwargs)
        except Exception:
            if not any(source.looped for source in sources):
                raise
            return None
    return tuple(len(source.taken) for source in sources)


def _read_step(
    function: StepFunction, call: CallArguments, sources: Iterable[Any], counts: Sequence[int]
) -> Any:
    """Run the step on the next elements."""

    def run(tensors: Sequence[Any], elements: Sequence[Sequence[Any]]) -> Any:
        args, kwargs = call.with_tensors(tensors, [_Fed(taken) for taken in elements])
        return function.traced(*args, **kwargs)

    elements = [[_next(s) for _ in range(n)] for s, n in zip(sources, counts, strict=True)]
    return function.step(call.key, run)(list(call.tensors), elements)


def _next(source: Iterator[Any]) -> Any:
    """The next element; of a source that is at its end the error that a `tf.function` has."""
    try:
        return next(source)
    except StopIteration:
        raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None


class _Source(abc.ABC):
    """Stand-in for an iterator while a function is traced."""

    graph: Any = None

    def __iter__(self) -> _Source:
        return self

    def get_next(self) -> Any:
        return next(self)

    def _check_graph(self) -> None:
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise CaptureError(
                "next(iterator) stands in a loop or a branch on tensors. A step is fed what it "
                "reads: take elements outside of it, or loop over the data itself, "
                "`for batch in iterator:`."
            )

    @abc.abstractmethod
    def __next__(self) -> Any:
        """The next element, as the step reads it."""


class _Probed(_Source):
    """Iterator that takes real elements, and gives them once more when it is read."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self.taken: list[Any] = []
        self.looped = False

    def __next__(self) -> Any:
        if self.graph is None or tf.executing_eagerly():
            return self.taken.pop(0) if self.taken else next(self._iterator)
        self._check_graph()
        with tf.init_scope():
            self.taken.append(_next(self._iterator))
        return self.taken[-1]

    def loop(self, *_: Any) -> None:
        self.looped = True
        raise CaptureError("a loop over data")  # which `_probe` catches


class _Fed(_Source):
    """Elements that the step which is traced is fed."""

    def __init__(self, elements: Sequence[Any]) -> None:
        self._elements = iter(elements)
        self.graph = tf.compat.v1.get_default_graph()

    def __next__(self) -> Any:
        self._check_graph()
        return next(self._elements)


# --- loops over data: a step for each pass -------------------------------------------


class Data:
    """A dataset or an iterator as a function sees it that runs on the host."""

    def __init__(self, source: Any, host: _Host) -> None:
        self._source = source
        self._host = host

    def __iter__(self) -> Data:
        return Data(iter(self._source), self._host)

    def __next__(self) -> Any:
        if not tf.executing_eagerly():
            raise CaptureError(
                "next(iterator) stands in a loop over data, whose body is a step. Loop over both, "
                "`for a, b in tf.data.Dataset.zip(first, second):`."
            )
        return next(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._source, name)
        if not callable(found):
            return found

        def method(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            data = isinstance(result, (tf.data.Dataset, tf.data.Iterator))
            return Data(result, self._host) if data else result

        return method

    def loop(
        self,
        extra_test: Callable[[], Any] | None,
        body: FunctionType,
        get_state: Callable[[], tuple],
        set_state: Callable[[tuple], None],
        symbols: tuple[str, ...],
        options: dict[str, Any],
    ) -> None:
        """`for batch in self`, as AutoGraph hands it on (`tf.interop.autograph.on_loop`)."""
        run = _Body(self._host, body, get_state, set_state, symbols)
        if extra_test is not None and not extra_test():
            return
        for batch in self._source:
            run(batch)
            if extra_test is not None and not extra_test():
                return


class _Host:
    """One call of a function on the host; `steps` counts what of it ran on the mesh."""

    def __init__(self, function: StepFunction) -> None:
        self.function = function
        self.steps = 0


class _Body:
    """The body of a loop: a step from a batch and the loop's state to the state after it.

    Args:
        symbols: the names whose values are the state.
    """

    def __init__(
        self,
        host: _Host,
        body: FunctionType,
        get_state: Callable[[], tuple],
        set_state: Callable[[tuple], None],
        symbols: Sequence[str],
    ) -> None:
        self._host, self._body = host, body
        self._get_state, self._set_state = get_state, set_state
        self._symbols = symbols
        cells = zip(body.__code__.co_freevars, body.__closure__ or (), strict=True)
        self._cells = {name: cell for name, cell in cells if name not in symbols and _is_read(cell)}

    def __call__(self, batch: Any) -> None:
        function, state = self._host.function, tuple(map(_carried, self._get_state()))
        held = {name: cell.cell_contents for name, cell in self._cells.items()}
        call = CallArguments.of(function.name, (batch, state), held)

        def run(*tensors: Any) -> Any:
            (batch, state), held = call.with_tensors(tensors)
            before = {name: tf.nest.flatten(value) for name, value in held.items()}
            with self._standing_in(state, held):
                self._body(batch)
                after = CallArguments.of(function.name, tuple(map(_carried, self._get_state())), {})
            for name, value in held.items():
                if list(map(id, tf.nest.flatten(value))) != list(map(id, before[name])):
                    raise CaptureError(
                        f"The loop over data in {function.name!r} changes {name!r} in place. "
                        f"Assign what it carries round (`total = total + loss`), or collect in a "
                        f"tf.Variable or a Keras metric."
                    )
            function.states[_place(key, tensors)] = after
            return list(after.tensors)

        key = (self._body.__code__, call.key)
        tensors = function.step(key, run)(*call.tensors)
        self._host.steps += 1
        after = function.states[_place(key, call.tensors)]
        self._set_state(after.with_tensors(tensors)[0])

    @contextlib.contextmanager
    def _standing_in(self, state: tuple, held: dict[str, Any]) -> Iterator[None]:
        """Let the body read, while a step is traced, what the step is fed."""
        before = self._get_state(), {name: cell.cell_contents for name, cell in self._cells.items()}
        try:
            self._fill(state, held)
            yield
        finally:
            self._fill(*before)

    def _fill(self, state: tuple, held: dict[str, Any]) -> None:
        self._set_state(state)
        for name, value in held.items():
            self._cells[name].cell_contents = value


def _is_read(cell: CellType) -> bool:
    """Whether the loop's body can read the cell: it is filled, and not AutoGraph's own."""
    try:
        return not isinstance(cell.cell_contents, (FunctionScope, Undefined, UndefinedReturnValue))
    except ValueError:
        return False


def _carried(value: Any) -> Any:
    """A value as a loop carries it round: a number as a tensor, not traced for each value."""
    if isinstance(value, UndefinedReturnValue):
        return _NOT_RETURNED
    if isinstance(value, Undefined):
        return _undefined(value.symbol_name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return tf.convert_to_tensor(value) if number else value


@functools.cache
def _undefined(symbol: str) -> Undefined:
    """One object for all of AutoGraph's that mean the same."""
    return Undefined(symbol)


_NOT_RETURNED = UndefinedReturnValue()


def _place(key: Any, tensors: Sequence[Any]) -> Any:
    """Return the key, in `StepFunction.states`, of a loop's state after tensors of these specs."""
    return key, repr(argument_specs(tuple(tensors)))


def _loop(data: Any, *arguments: Any) -> None:
    data.loop(*arguments)


def _enumerate(data: Data, start: int = 0) -> Data:
    return data.enumerate(start)


on_loop(Data, _loop)
on_loop(_Probed, _loop)
on_enumerate(Data, _enumerate)
