"""Schema of `Report`, the data that views show of a plan, and of its JSON.

`summary`, `explain`, the page, the timeline, `compare` and `--json` read this and nothing else. A
`Report` is what one version of the format says; as JSON it is an object with the fields below, by
their names. Seconds are of one training step on a rank, bytes of a rank, unless another thing is
said. Infinite and unknown numbers are `null`.

A step's time is the sum of `CostSummary.parts`. Layers add up to it: the seconds of the layers of
the stage that works most (of all layers, where there are no stages) are `parts` "compute",
"collectives" and "gradients" together, "hidden" ones taken off.
"""

from tfpar.observability.report.data.schema.measured import (
    MeasuredLane,
    MeasuredSlice,
    MeasuredStep,
)
from tfpar.observability.report.data.schema.plan import (
    Axis,
    ByPhase,
    BytesByKind,
    CostSummary,
    Facts,
    LinkSummary,
    Machines,
    PartOfStep,
    PipelineSummary,
    RentalSummary,
    ScheduleTime,
    SecondsByCause,
    Stage,
    TaskSummary,
    TransferSummary,
)
from tfpar.observability.report.data.schema.report import (
    FORMAT,
    VERSION,
    CandidateSummary,
    Report,
    WhatIf,
    read_report,
)
from tfpar.observability.report.data.schema.step import (
    Collective,
    FlowSummary,
    Input,
    LayerSummary,
    Option,
    Padding,
    Phase,
    Repeat,
    RunWhole,
    Use,
    VariableSummary,
    When,
    WithoutRule,
)

__all__ = [
    "Axis",
    "ByPhase",
    "BytesByKind",
    "CandidateSummary",
    "Collective",
    "CostSummary",
    "FORMAT",
    "Facts",
    "FlowSummary",
    "Input",
    "LayerSummary",
    "LinkSummary",
    "Machines",
    "MeasuredLane",
    "MeasuredSlice",
    "MeasuredStep",
    "Option",
    "Padding",
    "PartOfStep",
    "Phase",
    "PipelineSummary",
    "RentalSummary",
    "TaskSummary",
    "Repeat",
    "Report",
    "RunWhole",
    "ScheduleTime",
    "SecondsByCause",
    "TransferSummary",
    "Stage",
    "Use",
    "VERSION",
    "VariableSummary",
    "WhatIf",
    "When",
    "WithoutRule",
    "read_report",
]
