"""A `Report` as one file of HTML that needs no other: the template with its files filled in.

`assets/index.html` names what goes where: `{{js/graph.js}}` stands for the text of that file, and
three names for what is made here: `{{title}}`, `{{hashes}}` of the scripts, which are all that the
page may run, and `{{report}}`, the report's JSON, compressed.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
from importlib import resources
from typing import Any

import msgspec

from tfpar.observability.report.data.schema import Report

_MARK = re.compile(r"\{\{([\w./-]+)\}\}")
_TEMPLATE = "index.html"


class HtmlPage(str):
    """The text of a page, in UTF-8; a notebook shows the page itself, below the cell."""

    def _repr_html_(self) -> str:
        """Return a frame that holds the page and nothing else: its scripts may run, but not reach
        the notebook."""
        text = self.replace("&", "&amp;").replace('"', "&quot;")
        text = text.replace(
            "\n", "&#10;"
        )  # notebooks' files take thrice the bytes for a line's end
        return (
            f'<iframe sandbox="allow-scripts allow-downloads" title="Report of a plan" '
            f'style="width: 100%; height: 640px; border: 1px solid #ccc" srcdoc="{text}"></iframe>'
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print what stands in place of the page where there is only text."""
        printer.text(f"<page of {len(self.encode()) / 1024:.0f} KiB>")


def render_page(report: Report) -> HtmlPage:
    """Make the page that shows `report`."""
    template = _asset(_TEMPLATE)
    files = {name: _asset(name) for name in _MARK.findall(template) if "." in name}
    made = {
        "title": html.escape(report.facts.model or "plan"),
        "hashes": " ".join(_hash(text) for name, text in files.items() if name.endswith(".js")),
        "report": _packed(report),
    }
    return HtmlPage(_MARK.sub(lambda mark: {**files, **made}[mark[1]], template))


def _asset(name: str) -> str:
    """The text of a file of the page; those of libraries lie beside its own."""
    folder = "." if name.startswith("vendor/") else "assets"
    return (resources.files(__package__) / folder / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash by which a Content-Security-Policy allows this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _packed(report: Report) -> str:
    """Compress a report's JSON by gzip and base64: a tenth of the size, and safe in HTML."""
    packed = gzip.compress(msgspec.json.encode(report), mtime=0)
    return base64.b64encode(packed).decode()
