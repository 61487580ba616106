"""The page of a report, as text and in a browser: what it shows, asks for and how it is used."""

from __future__ import annotations

import base64
import hashlib
import json
import pathlib
import re
from collections.abc import Iterator

import pytest
import tomlkit

from tests.observability.report import reports
from tests.observability.report.browser import Browser, find_browser
from tests.observability.report.pages import data_of
from tfpar.observability.report.data.schema import Report, read_report
from tfpar.observability.report.page import render_page
from tfpar.spec import format_bytes, format_seconds

FOLDER = pathlib.Path(render_page.__code__.co_filename).parent
VIEWS = ("overview", "graph", "table", "memory", "timeline", "candidates", "what-if")
MADE = {
    "mlp": reports.mlp,
    "gpt": lambda: reports.gpt(12),
    "deep": lambda: reports.gpt(96, stages=4),
    "cut": lambda: reports.gpt(6, stages=4),  # stages begin and end within blocks
    "unpriced": reports.unpriced,
    "nasty": lambda: reports.mlp(reports.NASTY),
    "measured": lambda: reports.with_measured_step(reports.mlp()),
}


# --- as text ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
def test_a_page_holds_its_report_and_asks_for_nothing(name):
    report = MADE[name]()
    page = render_page(report)
    assert read_report(data_of(page), "the page") == report
    assert "{{" not in page
    assert not re.search(r"""\b(?:src|href)\s*=\s*["']""", page.replace("//# sourceMappingURL", ""))
    assert render_page(report) == page


def test_the_page_of_96_layers_is_small():
    assert len(render_page(MADE["deep"]())) < 1_500_000


def test_names_are_never_read_as_markup():
    page = render_page(MADE["nasty"]())
    assert reports.NASTY not in page and "<title>&quot;" in page
    scripts = [*FOLDER.rglob("*.js")]
    assert scripts
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        assert "</script" not in text.lower() and "<!--" not in text, path
        if "vendor" not in path.parts:
            assert "innerHTML" not in text and "eval(" not in text, path


def test_only_the_scripts_of_the_page_may_run():
    page = render_page(MADE["mlp"]())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "default-src 'none'" in policy[1]
    allowed = set(re.findall(r"'sha256-([^']*)'", policy[1]))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts}
    assert hashes == allowed and len(scripts) > 10


def test_vendored_files_are_those_that_the_table_pins():
    folder = FOLDER / "vendor"
    pinned = tomlkit.parse((folder / "vendored.toml").read_text(encoding="utf-8"))
    listed = {}
    for library in pinned.values():
        assert library["version"] and library["licence"] and library["source"]
        listed |= library["sha256"]
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert there == {*listed, "vendored.toml"}
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert all(f"{name.split('/')[0]}/LICENSE" in listed for name in listed)


def test_wheels_hold_the_files_of_the_page():
    project = tomlkit.parse((FOLDER.parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["tfpar.observability.report.page"]
    shipped = {p for pattern in patterns for p in FOLDER.glob(pattern) if p.is_file()}
    files = {p for p in FOLDER.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert files - shipped == {FOLDER / "__init__.py"}


# --- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium: `make chromium` installs Debian's; TFPAR_CHROMIUM names another")
    found = Browser(program)
    yield found
    found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, tuple[Report, str]]:
    """The report and the address of the page of each."""
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, make in MADE.items():
        report, path = make(), folder / f"{name}.html"
        path.write_text(render_page(report), encoding="utf-8")
        found[name] = report, path.as_uri()
    return found


@pytest.fixture
def opened(browser, pages):
    """Opens a page at a view; in the end nothing was logged, and only files were asked for."""
    browser.errors.clear()
    browser.requests.clear()
    browser.media("light")
    browser.resize(1400, 900)

    def open_page(name: str, where: str = "overview") -> Report:
        report, address = pages[name]
        browser.open(f"{address}#{where}", "document.body && document.body.dataset.ready")
        return report

    yield open_page
    assert not browser.errors
    asked = {r for r in browser.requests if not r.startswith(("file:", "about:", "blob:file:"))}
    assert browser.requests and not asked


def shown_text(browser: Browser, selector: str) -> str:
    return browser.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")


@pytest.mark.parametrize("name", MADE)
def test_every_view_opens_by_its_link_or_says_why_not(name, browser, opened):
    opened(name)
    for view in VIEWS:
        browser.evaluate(f"location.hash = {json.dumps(view)}")
        browser.wait(f"document.body.dataset.view === {json.dumps(view)}")
        assert browser.evaluate(f"document.getElementById('tab-{view}').ariaSelected") == "true"
        assert len(shown_text(browser, "#view")) > 20
        if name == "unpriced" and view in ("timeline", "candidates", "what-if"):
            assert "tfpar " in shown_text(browser, "#view .empty pre")
        for width in (1400, 700):
            browser.resize(width, 900)
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


def test_names_are_shown_as_they_are(browser, opened):
    opened("nasty", "table")
    assert shown_text(browser, "#model") == reports.NASTY
    assert shown_text(browser, "tbody td") == reports.NASTY
    assert not browser.evaluate("document.querySelector('#view tbody b')")


@pytest.mark.parametrize("name", ("mlp", "gpt", "deep"))
def test_totals_are_those_of_the_report(name, browser, opened):
    report = opened(name)
    assert report.cost is not None
    assert shown_text(browser, "[data-total=seconds]") == format_seconds(report.cost.seconds)
    assert shown_text(browser, "[data-total=memory]") == format_bytes(report.cost.memory_bytes)

    def number(selector: str) -> float:
        return float(browser.evaluate(f"document.querySelector('{selector}').dataset.value"))

    browser.evaluate("location.hash = 'table'")
    browser.wait("document.querySelector('tfoot')")
    seconds = sum(layer.total_s for layer in report.layers)
    assert number("[data-sum=Time]") == pytest.approx(seconds, rel=1e-9)
    assert number("[data-sum=Weights]") == sum(layer.weights for layer in report.layers)
    browser.evaluate("location.hash = 'table?table=collectives'")
    browser.wait("document.querySelector('[data-sum=Count]')")
    assert number("[data-sum=Count]") == sum(c.count for c in report.collectives)
    assert number("[data-sum=Bytes]") == sum(c.num_bytes for c in report.collectives)
    browser.evaluate("location.hash = 'memory'")
    browser.wait("document.querySelector('.treemap')")
    assert number("[data-total=memory]") == pytest.approx(report.cost.memory_bytes, rel=1e-9)
    browser.evaluate("location.hash = 'timeline'")
    browser.wait("document.querySelector('.timeline')")
    ends = [task.end for task in report.pipeline.tasks] if report.pipeline else []
    assert number("[data-total=end]") == pytest.approx(max([*ends, 0.0]) or report.cost.seconds)


def test_a_measured_step_stands_below_the_predicted_one(browser, opened):
    report = opened("measured", "timeline")
    assert report.measured is not None and report.cost is not None
    browser.wait("document.querySelector('.task-late')")
    for name, seconds in (("end", report.cost.seconds), ("measured", report.measured.seconds)):
        selector = f"[data-total={name}]"
        value = browser.evaluate(f"document.querySelector({json.dumps(selector)}).dataset.value")
        assert float(value) == pytest.approx(seconds)
        assert shown_text(browser, selector) == format_seconds(seconds)
    assert "step 11 of t.json, the median of 3" in shown_text(browser, ".toolbar")
    names = shown_text(browser, ".lane-names")
    assert names.index("layer by layer") < names.index("rank 0compute")
    assert "waits for another rank" in shown_text(browser, ".legend")
    browser.click(".task-late ~ .task-F, .task-F:last-of-type")
    assert not browser.evaluate("document.getElementById('details').hidden")


def test_sliders_say_which_candidate_would_be_the_fastest(browser, opened):
    report = opened("mlp", "what-if")
    assert report.cost is not None and report.machines is not None
    rows = """[...document.querySelectorAll("[data-candidate]")].map((row) =>
      [row.dataset.candidate, Number(row.dataset.value) / SECONDS, row.lastChild.textContent])"""
    rows = rows.replace("SECONDS", str(report.cost.seconds))

    def slide(name: str, position: int) -> list[list]:
        browser.evaluate(
            f"""(() => {{ const input = document.querySelector("[data-slider={name}]");
            input.value = {position}; input.dispatchEvent(new Event("input")) }})()"""
        )
        return [[name, round(ratio, 3), fits] for name, ratio, fits in browser.evaluate(rows)]

    own, other = ["this plan", 1.0, "fits"], ["2 stages", 1.2, "fits"]
    assert slide("links", 0) == [own, other]
    # Links that are half as fast make the second one faster: 0.4 + 0.8 + 0.1 + 0.2 and 1.3.
    assert slide("links", -4) == [["2 stages", 1.3, "fits"], ["this plan", 1.5, "fits"]]
    assert "links=-4" in browser.evaluate("location.hash")
    assert slide("batch", 4) == [["2 stages", 2.0, "fits"], ["this plan", 2.7, "fits"]]
    slide("links", 0)
    assert slide("batch", 2) == [["this plan", 1.331, "fits"], ["2 stages", 1.449, "fits"]]
    assert slide("batch", 0) == [own, other]
    assert slide("devices", 4) == [["this plan", 0.75, "fits"], ["2 stages", 0.65, "fits"]][::-1]
    slide("devices", 0)
    limit = report.machines.memory_limit
    assert limit is not None
    assert slide("memory", -12)[-1][2] == (
        "fits" if 2 * report.cost.memory_bytes <= limit / 8 else "does not fit"
    )


def test_quantities_are_written_as_elsewhere(browser, opened):
    opened("mlp")
    for count in (0, 1, 1023, 1024, 1025, 1536, 10**6, 123456789, 2**30, 2**40 + 1, 3.5e12):
        assert browser.evaluate(f"format.bytes({count})") == format_bytes(count)
    for seconds in (0.0, 1.234e-7, 3.21e-5, 1e-3, 0.01234, 1.0, 1234.567):
        assert browser.evaluate(f"format.seconds({seconds})") == format_seconds(seconds)


def test_a_layer_is_chosen_in_the_graph_and_kept_in_other_views(browser, opened):
    report = opened("gpt", "graph")
    assert browser.evaluate("document.querySelectorAll('.box').length") <= 300
    browser.click('.box[data-path="block_0/mlp/up"]')
    browser.wait("!document.getElementById('details').hidden")
    told = shown_text(browser, "#details")
    (layer,) = (x for x in report.layers if x.path == "block_0/mlp/up")
    assert format_seconds(layer.total_s) in told
    assert "all_reduce over model" in told and "it could be" in told
    assert browser.evaluate("document.querySelectorAll('#details .held').length") >= 8
    assert "layer=block_0" in browser.evaluate("location.hash")
    browser.press("3")
    browser.wait("document.body.dataset.view === 'table'")
    assert shown_text(browser, "tr.chosen td").startswith("block_*/mlp/up")
    browser.press("ArrowDown")
    browser.wait("document.querySelector('tr.chosen td').textContent.includes('mlp/down')")
    browser.press("Escape")
    browser.wait("document.getElementById('details').hidden")


def test_search_finds_layers(browser, opened):
    opened("gpt", "table")
    browser.press("/")
    for letter in "qkv":
        browser.press(letter)
    browser.wait("document.querySelectorAll('tbody tr').length === 1")
    assert "qkv" in shown_text(browser, "tbody td")
    browser.press("Enter")
    browser.wait("!document.getElementById('details').hidden")
    assert "block_0/attention/" in shown_text(browser, "#details h2").replace("\u200b", "")
    browser.press("Escape")
    browser.wait("document.querySelectorAll('tbody tr').length > 1")


def test_scopes_open_and_close_and_repeats_unfold(browser, opened):
    opened("deep", "graph")
    count = "document.querySelectorAll('.box').length"
    folded = browser.evaluate(count)
    assert "block_* × 24" in shown_text(browser, "svg.graph")
    browser.click('.frame-title[aria-label="Close mlp"]')
    browser.wait(f"{count} === {folded - 1}")
    browser.click(".box.closed .open")
    browser.wait(f"{count} === {folded}")
    browser.click("#fold")
    browser.wait(f"{count} > {folded}")
    assert browser.evaluate(count) <= 300
    browser.press("f")
    browser.wait(f"{count} === {folded}")


@pytest.mark.parametrize("name", ("gpt", "deep", "cut"))
def test_edges_join_boxes_and_boxes_lie_apart(name, browser, opened):
    opened(name, "graph")
    boxes, ends = browser.evaluate(
        """[[...document.querySelectorAll(".box")].map((box) => {
          const { e, f } = box.transform.baseVal.consolidate().matrix;
          const { width, height } = box.querySelector(".card").getBBox();
          return [e, f, e + width, f + height];
        }), [...document.querySelectorAll(".edge .line")].flatMap((line) => {
          const ends = [0, line.getTotalLength()].map((at) => line.getPointAtLength(at));
          return ends.map(({ x, y }) => [x, y]);
        })]"""
    )
    assert len(boxes) > 5 and len(ends) > 10

    def touches(box: list[float], x: float, y: float) -> bool:
        return box[0] - 1 <= x <= box[2] + 1 and box[1] - 1 <= y <= box[3] + 1

    assert all(any(touches(box, *end) for box in boxes) for end in ends)
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_a_link_leads_to_a_layer_in_a_repeat(browser, opened):
    opened("deep", "graph?layer=block_40%2Fmlp%2Fdown")
    browser.wait("document.querySelector('.box.chosen')")
    # It is drawn as the first of its stage, which stands for all.
    assert browser.evaluate("document.querySelector('.box.chosen').dataset.path") == (
        "block_24/mlp/down"
    )
    assert "block_40/" in shown_text(browser, "#details h2").replace("\u200b", "")


def test_rows_sort_and_are_saved(browser, opened):
    report = opened("gpt", "table?each=1")
    assert browser.evaluate("document.querySelectorAll('tbody tr').length") == len(report.layers)
    at = browser.evaluate(
        "[...document.querySelectorAll('thead th')].findIndex(e => e.textContent === 'Time')"
    )
    browser.click(f"thead th:nth-child({at + 1}) button")
    dearest = max(report.layers, key=lambda layer: layer.total_s)
    assert shown_text(browser, "tbody td") == dearest.path
    saved = browser.evaluate(
        """new Promise((done) => {
          URL.createObjectURL = (blob) => { blob.text().then(done); return "#table"; };
          [...document.querySelectorAll('.toolbar button')].at(-1).click();
        })"""
    )
    lines = saved.splitlines()
    assert len(lines) == 1 + len(report.layers)
    assert lines[1].startswith(f"{dearest.path},{dearest.class_name}")


def test_dark_follows_the_system_and_the_reader(browser, opened):
    opened("mlp")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = browser.evaluate(colour)
    browser.media("dark")
    dark = browser.evaluate(colour)
    assert dark != light
    browser.press("d")
    assert browser.evaluate(colour) == light
    browser.press("d")
    assert browser.evaluate(colour) == dark
    browser.evaluate("localStorage.clear()")


def test_it_prints(browser, opened):
    opened("gpt")
    assert browser.pdf_bytes() > 10_000


@pytest.mark.slow
def test_the_page_of_96_layers_opens_soon(browser, opened, pages, record_property):
    _, address = pages["deep"]
    browser.open(f"{address}#overview", "document.body && document.body.dataset.ready")
    browser.requests.append(address)
    milliseconds = browser.evaluate("performance.now()")
    record_property("milliseconds", milliseconds)
    assert milliseconds < 10_000


def test_a_notebook_has_the_page_in_a_frame(browser, tmp_path):
    """Its tabs and links lead to its views, though the frame has no address of its own."""
    page = render_page(MADE["gpt"]())
    frame = page._repr_html_()
    allowed = 'sandbox="allow-scripts allow-downloads"'
    assert frame.count("<iframe") == 1 and allowed in frame
    seen = frame.replace(allowed, 'sandbox="allow-scripts allow-same-origin"')  # by this test
    path = tmp_path / "cell.html"
    path.write_text(f"<!doctype html><meta charset='utf-8'>{seen}", encoding="utf-8")
    inside = "document.querySelector('iframe')?.contentDocument"
    browser.errors.clear()
    browser.open(path.as_uri(), f"{inside}?.body?.dataset.ready")
    browser.evaluate(f"{inside}.getElementById('tab-graph').click()")
    browser.wait(f"{inside}.body.dataset.view === 'graph'")
    browser.evaluate(f"{inside}.getElementById('tab-overview').click()")
    link = f"{inside}.querySelector('#view a[href^=\"#graph\"]')"
    browser.wait(link)
    browser.evaluate(f"{link}.click()")
    browser.wait(f"{inside}.body.dataset.view === 'graph'")
    assert browser.evaluate(f"{inside}.querySelector('iframe')") is None
    # Browsers log that a frame with both rights could leave its sandbox: only here it has both.
    assert all("sandbox" in error for error in browser.errors), browser.errors
