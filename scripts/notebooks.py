"""Run the notebooks of `examples/notebooks`, and save them with what their cells print and show.

    python -m scripts.notebooks [NAME ...]

Needs nbclient and ipykernel. Tests run the notebooks too, and hold what they print against what is
saved.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "notebooks"
NAMES = ("first_plan", "gpt_on_four_ranks")

_LOG = re.compile(r"WARNING: All log messages before absl|[IWE]\d{4} |$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    for name in parser.parse_args().names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            book = run_notebook(name, folder, time_limit_s=600)
        nbformat.write(book, FOLDER / f"{name}.ipynb")
        print(name)


def run_notebook(name: str, folder: str, time_limit_s: float) -> nbformat.NotebookNode:
    """Run a notebook in a kernel of its own; returns it with new outputs.

    Args:
        folder: in which it writes its files.
        time_limit_s: of each cell.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    client = nbclient.NotebookClient(
        book,
        timeout=int(time_limit_s),
        kernel_name="python3",
        resources={"metadata": {"path": folder}},
        record_timing=False,
        coalesce_streams=True,  # a progress bar is one line, as it was last
    )
    client.execute(env={**os.environ, "PYTHONPATH": python_path, "TF_CPP_MIN_LOG_LEVEL": "3"})
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_log(output)]
    return book


def _is_log(output: nbformat.NotebookNode) -> bool:
    """Whether an output is what TensorFlow's libraries log of this machine as they are loaded."""
    lines = output.get("text", "").splitlines() if output.get("name") == "stderr" else []
    return bool(lines) and all(_LOG.match(line) for line in lines)


if __name__ == "__main__":
    main()
