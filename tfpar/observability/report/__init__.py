"""Reports of plans: their data, and views as text, tables, a graph and a page of HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.observability.report.candidates import explain_rejection
    from tfpar.observability.report.data.build import build_report
    from tfpar.observability.report.data.diagnosis import why_slower

__all__ = [
    "build_report",
    "explain_rejection",
    "why_slower",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.observability.report.data.build": ["build_report"],
        "tfpar.observability.report.candidates": ["explain_rejection"],
        "tfpar.observability.report.data.diagnosis": ["why_slower"],
    },
)
