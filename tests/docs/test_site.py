"""The site builds without a warning, holds every public name, and its links hold."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfpar as tap
from scripts.docstrings import as_restructured
from scripts.site_links import for_site, repository
from tests.time_limits import time_limit

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("site")  # which is built once
_HREF = re.compile(r'<a [^>]*href="([^"#:]*)(?:#([^"]*))?"')


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as `make docs` builds it; every warning is an error."""
    pytest.importorskip("sphinx")
    out = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
    done = subprocess.run(
        [*build, str(ROOT / "docs"), str(out)],
        capture_output=True,
        text=True,
        timeout=time_limit(300),
    )
    assert done.returncode == 0, done.stderr
    return out


def test_every_public_name_is_listed():
    text = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    there = set(re.findall(r"^\.\. auto\w+:: (?:tfpar\.)?(\w+)$", text, re.MULTILINE))
    assert set(tap.__all__) == there


@pytest.mark.nightly
def test_every_public_name_is_in_the_reference(site):
    text = (site / "reference.html").read_text(encoding="utf-8")
    there = set(re.findall(r'id="tfpar\.(\w+)"', text))
    assert set(tap.__all__) - {"layers"} <= there
    assert 'id="module-tfpar.layers"' in text


@pytest.mark.nightly
def test_every_link_of_the_site_leads_somewhere(site):
    """Links between pages, their anchors too; pages that Sphinx makes itself are left out."""
    pages = {
        p: p.read_text(encoding="utf-8")
        for p in site.rglob("*.html")
        if p.name not in ("genindex.html", "py-modindex.html", "search.html")
    }
    assert len(pages) > 20
    broken = []
    for page, text in pages.items():
        for target, anchor in _HREF.findall(text):
            path = (page.parent / html.unescape(target)).resolve() if target else page
            if not path.exists():
                broken.append((page.name, target))
            elif anchor and path in pages and f'id="{html.unescape(anchor)}"' not in pages[path]:
                broken.append((page.name, f"{target}#{anchor}"))
    assert broken == []


@pytest.mark.nightly
def test_the_first_page_says_what_does_not_work(site):
    text = re.sub(r"<[^>]+>", "", (site / "index.html").read_text(encoding="utf-8"))
    assert "What it does not do today" in text and "make quickstart" in text


def test_links_become_those_of_the_site():
    address = repository()
    text = "[a](docs/tap.md#x) [b](examples/moe.py) [c](README.md#why) [d](https://x.org) [e](docs)"
    shown = for_site(text, "README.md", "docs", address)
    assert (
        "[a](tap.md#x)" in shown and "[c](index.md#why)" in shown and "[d](https://x.org)" in shown
    )
    assert f"[b]({address}/blob/main/examples/moe.py)" in shown
    assert f"[e]({address}/tree/main/docs)" in shown
    page = for_site(
        "[a](../tap.md) [b](../../README.md#y) [c](#z)", "docs/howto/p.md", "docs/howto", ""
    )
    assert page == "[a](../tap.md) [b](../index.md#y) [c](#z)"
    code = "```python\n[a](README.md)\n```\n"
    assert for_site(code, "README.md", "docs", address) == code


def test_docstrings_say_what_is_an_example():
    lines = [
        "Do it to `Op`s.",
        "",
        "    do(x)",
        "",
        "    do(y)",
        "",
        "Args:",
        "    x: `a` or `b`s.",
    ]
    assert as_restructured(lines) == [
        "Do it to `Op`\\ s.",
        "",
        "::",
        "",
        "    do(x)",
        "",
        "    do(y)",
        "",
        "Args:",
        "    x: `a` or `b`\\ s.",
    ]
