"""Plots of benchmarks as files that change only with what they show. Needs matplotlib."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_plot(figure: Figure, path: str | os.PathLike[str], source: str | None = None) -> None:
    """Write a figure as SVG, with text as text, and neither a date nor random names in it.

    Args:
        source: what it shows; the file says so.
    """
    import matplotlib

    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "tfpar", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Source": source})
