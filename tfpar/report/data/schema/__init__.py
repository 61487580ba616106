"""`Report`: what there is to show of a plan, and how it is written.

`summary`, `explain`, the page, the timeline, `compare` and `--json` read this and nothing else. A
`Report` is what one version of the format says; as JSON it is an object with the fields below, by
their names. Seconds are of one training step on a rank, bytes of a rank, unless another thing is
said. Infinite and unknown numbers are `null`.

A step's time is the sum of `Cost.parts`. Layers add up to it: the seconds of the layers of the
stage that works most (of all layers, where there are no stages) are `parts` "compute",
"collectives" and "gradients" together, "hidden" ones taken off.
"""

from tfpar.report.data.schema.compared import Candidate, WhatIf
from tfpar.report.data.schema.pipeline import Pipeline, Ran, ScheduleTime, Sent, Stage
from tfpar.report.data.schema.plan import (
    Axis,
    ByPhase,
    BytesByKind,
    Cost,
    Facts,
    Link,
    Machines,
    PartOfStep,
)
from tfpar.report.data.schema.report import FORMAT, VERSION, Report, read_report
from tfpar.report.data.schema.step import (
    Collective,
    Flow,
    Input,
    Layer,
    Option,
    Padding,
    Phase,
    Repeat,
    RunWhole,
    Use,
    Variable,
    When,
    WithoutRule,
)

__all__ = [
    "Axis",
    "ByPhase",
    "BytesByKind",
    "Candidate",
    "Collective",
    "Cost",
    "FORMAT",
    "Facts",
    "Flow",
    "Input",
    "Layer",
    "Link",
    "Machines",
    "Option",
    "Padding",
    "PartOfStep",
    "Phase",
    "Pipeline",
    "Ran",
    "Repeat",
    "Report",
    "RunWhole",
    "ScheduleTime",
    "Sent",
    "Stage",
    "Use",
    "VERSION",
    "Variable",
    "WhatIf",
    "When",
    "WithoutRule",
    "read_report",
]
