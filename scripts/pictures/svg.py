"""A drawing: boxes, lines and words, as SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#e45756", "#eeca3b", "#9d755d")
"""Told apart by their lightness too."""
INK, PALE = "#222222", "#dddddd"


class Drawing:
    """Shapes on white, in pixels from the top left.

    Args:
        title: what there is to see, for those who do not see it.
        source: where it comes from; a comment of the file says so.
    """

    def __init__(self, width: float, height: float, title: str, source: str) -> None:
        self.width, self.height = width, height
        self.title, self.source = title, source
        self.shapes: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, line: str = "white"
    ) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.shapes.append(f'<rect {place} fill="{fill}" stroke="{line}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, dashes: bool = False) -> None:
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        style = ' stroke-dasharray="4 3"' if dashes else ""
        self.shapes.append(f'<line {ends} stroke="{INK}"{style}/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 12,
        anchor: str = "start",
        fill: str = INK,
    ) -> None:
        style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>')

    def __str__(self) -> str:
        size = f'width="{self.width:.0f}" height="{self.height:.0f}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            f'font-family="sans-serif" role="img" aria-label={quoteattr(self.title)}>',
            f"<!-- {escape(self.source)} -->",
            f"<title>{escape(self.title)}</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            *self.shapes,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"
