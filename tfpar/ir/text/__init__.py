"""Graphs as text, which reads back exactly.

One op a line, in graph order, with the dtype and shape of what it makes:

    graph(%x) {
      variable "dense/kernel": float32[4,2] = %kernel, trainable
      %x: float32[8,4] = Placeholder {dtype = float32}
      %kernel: resource[4,2] = Placeholder {dtype = resource}
      %dense/Read: float32[4,2] = ReadVariableOp(%kernel) {dtype = float32}
      %dense/MatMul: float32[8,2] = MatMul(%x, %dense/Read) {T = float32, transpose_a = false}
      return(%dense/MatMul)
    }

`%name:1` is the second result of an op, `?` a size that is not known, `[*]` a shape of unknown
rank. Behind an op stand its attributes, then `stateful`, then `after(...)`: what it waits for.
`effects(...)` lists the ops that run although nothing reads them. `function @body(...) {...}` is a
body of a loop, a branch or a call. Of a step, a semicolon parts the arguments from what is read
from outside, and `gradient "dense/kernel" = %values` marks a gradient (the rows of a sparse one
follow as `, %indices`). What stands behind `//` is a comment.
"""

from tfpar.ir.text.reader import parse_graph, parse_step
from tfpar.ir.text.writer import format_graph, format_step

__all__ = ["format_graph", "format_step", "parse_graph", "parse_step"]
