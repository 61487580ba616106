"""Watches a training: what a step takes, against what its plan promised.

`callback` is `tap.Monitor`, `monitor.monitored_model` a model as it sees it. `meter` times steps,
`figures` says what the times mean; `monitor.step_parts` names the part of a step that takes longer
than predicted, by `monitor.expectation`; `files` keeps all of it; `monitor.correction` makes a
cluster of what was measured, on which `steps.replanning` finds a better plan.
"""
