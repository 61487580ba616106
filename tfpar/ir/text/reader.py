"""Text to graphs; the form is described in `tfpar.ir.text`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from tfpar.ir.graph import Gradient, Graph, Op, Tensor, Variable
from tfpar.ir.step import StepGraph
from tfpar.ir.text.line import LineCursor, Reference
from tfpar.spec.errors import GraphTextError


def parse_graph(text: str) -> Graph:
    """Parse the graph that `format_graph` has written.

    Raises:
        GraphTextError: the text is malformed; says in which line.
    """
    return parse_step(text).graph


def parse_step(text: str) -> StepGraph:
    """Parse the step that `format_step` has written.

    Raises:
        GraphTextError: the text is malformed; says in which line.
    """
    lines = _lines(text)
    head = next(lines)
    head.take("graph")
    try:
        step = _Block(lines, {}).read(head)
    except RecursionError:
        raise GraphTextError("The graph's text has lists or blocks in too many others.") from None
    rest = next(lines)
    if not rest.ended:
        raise rest.error("nothing more after the graph's last '}'")
    return step


def _lines(text: str) -> Iterator[LineCursor]:
    """Lines that hold something, then empty ones for ever, so that what is missing has a place."""
    rows = text.split("\n")
    for number, row in enumerate(rows, 1):
        line = LineCursor(row, number)
        if not line.ended:
            yield line
    while True:
        yield LineCursor("", len(rows))


@dataclasses.dataclass
class _Pending:
    """An op whose inputs are not bound yet: they may come later."""

    op: Op
    inputs: list[Reference]
    control: list[Reference]
    line: LineCursor


class _Block:
    """Reads one graph: first every op, then what refers to ops.

    Args:
        around: the functions of the graph around; a body without bodies of its own shares them.
    """

    def __init__(self, lines: Iterator[LineCursor], around: dict[str, Graph]) -> None:
        self.lines = lines
        self.around = around
        self.graph = Graph(functions=around)
        self.ops: dict[str, Op] = {}
        self.pending: list[_Pending] = []
        self.binders: list[Callable[[], None]] = []
        self.gradients: list[Gradient] = []

    def read(self, head: LineCursor) -> StepGraph:
        """The graph whose head, but for the word before its inputs, is still to be read."""
        arguments, others = head.inputs()
        head.take("{")
        head.end()
        returned = False
        while True:
            line = next(self.lines)
            if line.skip("}"):
                line.end()
                break
            returned |= self._statement(line)
        if not returned:
            raise line.error("'return(...)' before '}'")
        self._bind(head, [*arguments, *others])
        return StepGraph(self.graph, len(arguments), gradients=self.gradients)

    def _statement(self, line: LineCursor) -> bool:
        """Read one line; whether it was the return."""
        if line.at_reference():
            self._op(line)
        elif line.skip("variable"):
            self._variable(line)
        elif line.skip("gradient"):
            name = line.text()
            line.take("=")
            tensors = list(line.separated(line.reference))
            line.end()
            self.binders.append(
                lambda: self.gradients.append(Gradient(name, *self._tensors(tensors, line)))
            )
        elif line.skip("effects"):
            effects = line.listed(line.reference)
            line.end()
            self.binders.append(
                lambda: self.graph.effects.extend(self._op_of(r, line) for r in effects)
            )
        elif line.skip("return"):
            outputs = line.listed(line.reference)
            line.end()
            self.binders.append(lambda: self.graph.outputs.extend(self._tensors(outputs, line)))
            return True
        elif line.skip("function"):
            self._function(line)
        else:
            raise line.error("an op, a variable, 'return(...)' or '}'")
        return False

    def _function(self, line: LineCursor) -> None:
        name = line.function()
        if self.graph.functions is self.around:
            self.graph.functions = {}
        if name in self.graph.functions:
            raise line.wrong(f"there is a function {name!r} already")
        inner = _Block(self.lines, self.graph.functions)
        self.graph.functions[name] = inner.graph
        inner.read(line)

    def _variable(self, line: LineCursor) -> None:
        name = line.text()
        line.take(":")
        dtype, shape = line.kind()
        line.take("=")
        handle = line.reference()
        trainable, offloaded, place = False, False, ""
        while line.skip(","):
            if line.skip("trainable"):
                trainable = True
            elif line.skip("offloaded"):
                offloaded = True
            else:
                line.take("place")
                place = line.text()
        line.end()

        def bind() -> None:
            (tensor,) = self._tensors([handle], line)
            self.graph.variables.append(
                Variable(name, shape, dtype, trainable, tensor, place, offloaded)
            )

        self.binders.append(bind)

    def _op(self, line: LineCursor) -> None:
        name = line.reference().op
        line.take(":")
        kinds = line.listed(line.kind) if line.at("(") else [line.kind()]
        line.take("=")
        op = Op(name, line.name())
        if name in self.ops:
            raise line.wrong(f"there is an op {name!r} already")
        inputs = line.listed(line.reference) if line.at("(") else []
        if line.at("{"):
            op.attrs = line.attributes()
        op.stateful = line.skip("stateful")
        control = line.listed(line.reference) if line.skip("after") else []
        line.end()
        for dtype, shape in kinds:
            op.add_output(shape, dtype)
        self.ops[name] = op
        self.graph.ops.append(op)
        self.pending.append(_Pending(op, inputs, control, line))

    def _bind(self, head: LineCursor, inputs: Iterable[Reference]) -> None:
        for pending in self.pending:
            pending.op.inputs = self._tensors(pending.inputs, pending.line)
            pending.op.control = [self._op_of(r, pending.line) for r in pending.control]
        self.graph.inputs = self._tensors(inputs, head)
        for bind in self.binders:
            bind()

    def _op_of(self, reference: Reference, line: LineCursor) -> Op:
        op = self.ops.get(reference.op)
        if op is None:
            raise line.wrong(f"there is no op {reference.op!r}")
        return op

    def _tensors(self, references: Iterable[Reference], line: LineCursor) -> list[Tensor]:
        found = []
        for reference in references:
            op = self._op_of(reference, line)
            if reference.result >= len(op.outputs):
                raise line.wrong(
                    f"op {reference.op!r} has {len(op.outputs)} results, and result "
                    f"{reference.result} is read"
                )
            found.append(op.outputs[reference.result])
        return found
