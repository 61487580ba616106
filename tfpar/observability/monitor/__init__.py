"""Monitoring of a training: measured times of steps against the plan's prediction.

`observability.monitor.callback` is `tap.Monitor`, `observability.monitor.monitored_model` a model
as it sees it. `observability.monitor.figures` times steps, `observability.monitor.figures` says
what the times mean; `observability.monitor.step_parts` names the part of a step that takes longer
than predicted, by `observability.monitor.expectation`; `observability.monitor.files` keeps all of
it; `observability.monitor.correction` makes a cluster of what was measured, on which
`tf.steps.replanning` finds a better plan.
"""
