"""What the documentation says is tried: its Python blocks run, its links and tables are current."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfpar as tap
from scripts.coverage_layers import layer_classes
from scripts.coverage_models import probe
from scripts.coverage_ops import COMMAND, ops_page
from tests.e2e import test_patterns
from tests.time_limits import time_limit
from tfpar.rules import registry

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MODULE = re.compile(r"\b(tfpar/[\w/]*\w(?:\.py)?|(?<=`)[\w/]+\.py(?=`))")
_LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")

WITH_CODE = {
    "README.md",
    "docs/tutorial.md",
    "docs/getting_started.md",
    "docs/concepts.md",
    "docs/howto/a_day_in_this_code.md",
    "docs/howto/add_op_rule.md",
    "docs/howto/add_planner.md",
    "docs/howto/add_cost_term.md",
    "docs/howto/add_memory_move.md",
    "docs/howto/add_backend.md",
    "docs/howto/analyse_a_plan.md",
    "docs/howto/choose_an_objective.md",
    "docs/howto/constrain_a_plan.md",
    "docs/howto/fit_a_larger_model.md",
    "docs/howto/look_at_a_plan.md",
    "docs/howto/plan_without_devices.md",
    "docs/howto/shard_in_two_dimensions.md",
    "docs/howto/calibrate.md",
    "docs/howto/describe_a_cluster.md",
    "docs/howto/keras_distribution.md",
    "docs/howto/keras_hub.md",
    "docs/howto/see_where_time_goes.md",
    "docs/howto/train_a_tensorflow_1_graph.md",
    "docs/howto/train_on_long_sequences.md",
    "docs/howto/watch_a_training.md",
    "docs/pipelines.md",
    "docs/rhino.md",
    "docs/shared_subgraphs.md",
}
SLOW = {
    "README.md",
    "docs/concepts.md",
    "docs/howto/fit_a_larger_model.md",
    "docs/getting_started.md",
    "docs/tutorial.md",
    "docs/howto/add_planner.md",
    "docs/howto/analyse_a_plan.md",
    "docs/howto/choose_an_objective.md",
    "docs/howto/constrain_a_plan.md",
    "docs/howto/calibrate.md",
    "docs/howto/keras_hub.md",
    "docs/howto/look_at_a_plan.md",
    "docs/howto/plan_without_devices.md",
    "docs/howto/see_where_time_goes.md",
    "docs/howto/shard_in_two_dimensions.md",
    "docs/howto/train_on_long_sequences.md",
    "docs/howto/watch_a_training.md",
    "docs/pipelines.md",
    "docs/rhino.md",
}


def _name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """Files go to a folder of their own, rules that a page registers go away again."""
    monkeypatch.chdir(tmp_path)
    rules = dict(registry._RULES)
    keras.utils.clear_session(free_memory=False)
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


def _constraint_rows():
    """(what, the code of the constraints) of each row of the table of common ways."""
    text = (ROOT / "docs/howto/constrain_a_plan.md").read_text(encoding="utf-8")
    rows = text.partition("| You want | Constraints |")[2].partition("\n\n")[0].splitlines()[2:]
    for row in rows:
        what, code = re.split(r"(?<!\\)\|", row)[1:3]
        calls = re.findall(r"`(tap\..*?)`", code.replace("\\|", "|"))
        yield pytest.param(what.strip(), calls, id=what.strip())


@pytest.mark.slow
@pytest.mark.parametrize("what, calls", list(_constraint_rows()))
def test_common_constraints_hold(what, calls):
    names = {"tap": tap, "layout_map": {".*fc1/kernel": (None, "model")}}
    found = [eval(call, names) for call in calls]  # noqa: S307 - our own page
    constraints = [c for f in found for c in (f if isinstance(f, tuple) else (f,))]
    if what == "Experts":
        build = test_patterns.moe
        x, y = np.ones((8, 6, 8), "float32"), np.ones((8, 6, 3), "float32")
    else:

        def build():
            return test_patterns.gpt(optimizer=keras.optimizers.Adam())

        x, y = test_patterns.tokens(8)
    keras.utils.set_random_seed(0)
    with tap.auto_parallel(tap.split([2, 2]), constraints, planner=None):
        model = build()
    report = tap.verify(model, x, y, steps=2)
    assert report.ok, str(report)


def test_the_front_page_is_read_in_two_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.slow
def test_the_quickstart_runs():
    if not any(importlib.metadata.distributions(name="scikit-learn")):
        pytest.skip("needs scikit-learn")
    script = str(ROOT / "examples/quickstart.py")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=time_limit(600)
    )
    assert done.returncode == 0, done.stderr
    for model in ("ConvNet", "GPT"):
        assert f"=== {model} on" in done.stdout
    assert done.stdout.count("Found by the ") == 2


def test_every_page_with_code_is_run():
    assert {_name(p) for p in PAGES if _BLOCK.search(p.read_text("utf-8"))} - WITH_CODE <= {
        "CONTRIBUTING.md"
    }


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_links_lead_somewhere(path):
    prose = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in _LINK.findall(prose):
        if target.startswith(("http:", "https:")):
            continue
        page = (path.parent / target).resolve() if target else path
        assert page.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {_anchor(h) for h in headings}, anchor


def test_modules_that_pages_name_exist():
    """Folders and modules, by their path in the package or by the end of it."""
    folders = ("benchmarks", "examples", "scripts", "tests", "tfpar")
    modules = [_name(path) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lacking = {
        (_name(page), name)
        for page in PAGES
        for name in _MODULE.findall(page.read_text("utf-8"))
        if not (ROOT / name).exists() and not any(path.endswith(f"/{name}") for path in modules)
    }
    assert lacking == {("CONTRIBUTING.md", "utils.py")}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_ops_table_is_current():
    written = (ROOT / "docs/coverage/ops.md").read_text(encoding="utf-8")
    assert written == ops_page(), f"Rules have changed. Run {COMMAND}"


def test_every_keras_layer_is_in_its_table():
    text = (ROOT / "docs/coverage/layers.md").read_text(encoding="utf-8")
    assert [n for n in layer_classes() if f"`{n}`" not in text] == []


def test_a_model_is_traced_and_partitioned_for_its_table():
    def make():
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(2)(inputs))

    result = probe("tiny", make)
    assert (result.error, result.num_weights, list(result.gathers)) == ("", 10, [])
