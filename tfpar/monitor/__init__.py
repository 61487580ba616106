"""Watches a training: what a step takes, against what its plan promised.

`callback` is `tap.Monitor`, `watched` a model as it sees it. `meter` times steps, `figures` says
what the times mean; `parts` names the part of a step that takes longer than predicted, by
`expected`; `files` keeps all of it; `corrected` makes a cluster of what was measured, on which
`steps.replanned` finds a better plan.
"""
