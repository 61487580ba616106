"""Watches a training: what a step takes, against what its plan promised.

`callback` is `tap.Monitor`. `meter` times steps, `figures` says what the times mean, `parts` which
part of a step takes longer than predicted, `files` keeps all of it, and `corrected` makes a cluster
of what was measured, on which `steps.replanned` finds a better plan.
"""
