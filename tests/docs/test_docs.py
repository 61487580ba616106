"""What the documentation says is tried: its Python blocks run, its links and tables are current."""

import pathlib
import re

import keras
import pytest

from scripts.coverage_layers import layer_classes
from scripts.coverage_ops import COMMAND, ops_page
from tfpar.rules import registry

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")

WITH_CODE = {
    "README.md", "docs/getting_started.md", "docs/concepts.md", "docs/howto/add_op_rule.md",
    "docs/howto/add_planner.md", "docs/howto/add_cost_term.md", "docs/howto/add_backend.md",
}  # fmt: skip
SLOW = {"README.md", "docs/getting_started.md"}


def _name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """Files go to a folder of their own, rules that a page registers go away again."""
    monkeypatch.chdir(tmp_path)
    rules = dict(registry._RULES)
    keras.utils.clear_session()
    yield
    registry._RULES.clear()
    registry._RULES.update(rules)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in sorted(WITH_CODE)]
)
def test_python_blocks_run(name, clean):
    """The blocks of a page are one program, in the order of the page."""
    text = (ROOT / name).read_text(encoding="utf-8")
    namespace = {"__name__": "page"}
    for block in _BLOCK.finditer(text):
        # Blank lines in front, so that a traceback names the line of the page.
        source = "\n" * (text[: block.start()].count("\n") + 1) + block[1]
        exec(compile(source, name, "exec"), namespace)


def test_every_page_with_code_is_run():
    assert {_name(p) for p in PAGES if _BLOCK.search(p.read_text("utf-8"))} - WITH_CODE <= {
        "CONTRIBUTING.md"
    }


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_links_lead_somewhere(path):
    for target, anchor in _LINK.findall(path.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        page = (path.parent / target).resolve() if target else path
        assert page.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {_anchor(h) for h in headings}, anchor


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_ops_table_is_current():
    written = (ROOT / "docs/coverage/ops.md").read_text(encoding="utf-8")
    assert written == ops_page(), f"Rules have changed. Run {COMMAND}"


def test_every_keras_layer_is_in_its_table():
    text = (ROOT / "docs/coverage/layers.md").read_text(encoding="utf-8")
    assert [n for n in layer_classes() if f"`{n}`" not in text] == []
