"""Takes the pictures of docs/howto/read_a_report.md, with a headless Chromium.

    tfpar plan scripts/report_images.py:build --mesh 4x8 --cluster v100-ethernet --stages auto \
        --what-if v100-ethernet:2x8 dgx-a100:2x8 dgx-a100:4x8 dgx-h100:4x8 -o gpt.json
    python -m scripts.report_images gpt.json
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.observability.report.browser import Browser, find_browser
from tfpar.plans import Plan

FOLDER = Path(__file__).parents[1] / "docs" / "images"
WIDE, NARROW = (1400, 900), (700, 900)
VIEWS = {
    "overview": ("overview", WIDE, "light"),
    "graph": ("graph?layer=block_1_fc1", WIDE, "light"),
    "table": ("table", WIDE, "dark"),
    "memory": ("memory", WIDE, "light"),
    "timeline": ("timeline", WIDE, "light"),
    "candidates": ("candidates", WIDE, "light"),
    "what_if": ("what-if", WIDE, "light"),
    "narrow": ("overview", NARROW, "dark"),
    "narrow_graph": ("graph?layer=block_1_fc1", NARROW, "light"),
}
"""By the name of the picture: the address in the page, the window, and light or dark."""
DRAWN = "document.body && document.body.dataset.ready"
SETTLED = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 300, true)))"


def build():
    """The model of the pictures: a GPT with 12 layers, and a batch of 32 texts."""
    import keras
    import tensorflow as tf

    from benchmarks.models import compile_model
    from benchmarks.models.transformers import gpt

    model = gpt(vocabulary=32_000, length=512, hidden=768, heads=12, num_layers=12)
    model = keras.Model(model.input, model.output, name="gpt")
    tokens = tf.TensorSpec((32, 512), "int32")
    return compile_model(model), (tokens, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", help="the plan to show")
    options = parser.parse_args()
    program = find_browser()
    if program is None:
        parser.error("no Chromium: `make chromium` installs one")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        Plan.load(options.plan).to_html(page)
        browser = Browser(program)
        try:
            for name, (view, size, scheme) in VIEWS.items():
                browser.resize(*size)
                browser.media(scheme)
                browser.open(f"{page.as_uri()}#{view}", DRAWN)
                browser.evaluate(SETTLED)
                path = FOLDER / f"report_{name}.png"
                browser.screenshot(path)
                _shrink(path)
        finally:
            browser.close()


def _shrink(path: Path) -> None:
    """To 256 colours, which are enough, where pngquant is installed."""
    if shutil.which("pngquant"):
        command = ["pngquant", "--force", "--skip-if-larger", "--ext", ".png", str(path)]
        subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
