"""`verify`: the model on the mesh against the same model on one device, step by step.

**What is compared.** The mesh trains as it always does. Each of its steps is then taken once more
on one device, from the very state that the mesh had before it, so that no difference is carried on
from step to step. Compared are

* the gradients that enter the optimizers,
* what the step returns: the loss and the metrics,
* every variable after the step: weights, moving statistics, optimizer slots and counters, loss
  scale, seeds, metrics, whatever else the step touches.

On one device the optimizers are given the mesh's gradients in place of their own. So gradients are
judged as gradients, and updates as what the optimizer makes of equal gradients: an optimizer that
divides a gradient by its own size (Adam) cannot turn a rounding into a whole step.

If its gradients are not finite, as where a loss scale is too large yet, a step judges nothing of
them: it is compared for the rest, and another is taken in its place.

Steps of a graph (`GraphProgram.verify`) are compared likewise, what they fetch as what a step
returns; their gradients are not known apart.

**Against which noise.** Sharing out work changes the order in which numbers are added up, and
nothing else. What that can do is measured: on one device the step is run a few times with noise in
every op that adds up (`observability.verification.noise`). Operands and results are moved by about
a rounding *of their own dtype*, so that where a step computes in 16 bits the noise is that of 16
bits, and the runs show how the model carries it on. A difference is put down to rounding while
three sizes of it are at most `compare.NOISE_FACTOR` times those of the noise, each measured per
variable and step: its root mean square finds what is a little wrong everywhere, its largest entry
what is wrong in one row of a table, and its scale (the factor by which the whole is larger) what is
less wrong in each entry than 16 bits resolve. A few roundings of the stored dtype are always
granted. Where noise never shows, as in counters and seeds, nothing else is: integers must be equal.

Noise is what at least two noisy runs show, in entries that are finite, so that no run by itself
explains anything.

The ops of a graph are left as they are: there, values of variables are moved by more roundings
(`observability.verification.sessions`).

What a rounding can tip over (the larger of two equal numbers) the noise, which is larger than
what the mesh does, tips over more often. Before anything is said to differ, more noise is measured.

**What cannot be told.** Where noise is as large as the thing itself, any difference might pass.
Then the noise is made sixteen times larger. If what it does grows along, the thing is small only
since larger ones cancel in it (a gradient that is zero but for roundings, say), beside which an
error would be seen: it is judged by their size. If not, a step amplifies roundings without bound:
the verdict is `noise`. What is infinite or no number on one device too
is `not finite`. Neither is judged, and a report with either is not true. Every verdict has a
resolution: the smallest relative error that would have been seen.
"""

from tfpar.observability.verification.compare import ArrayDifference, Verdict
from tfpar.observability.verification.report import OutputReport, VariableReport, Verification
from tfpar.observability.verification.run import verify

__all__ = [
    "ArrayDifference",
    "OutputReport",
    "VariableReport",
    "Verdict",
    "Verification",
    "verify",
]
