"""Write the documentation's page of examples: what each shows, and the head of its plan.

    python -m scripts.example_page [NAME ...]

Runs the examples (all, or those that are named: seconds to a minute each), and writes their parts
of `docs/examples.md`. Tests run them too, and hold their plans against the page.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "examples.md"
NAMES = (
    "quickstart",
    "gpt",
    "many_classes",
    "moe",
    "t5",
    "diffusion",
    "custom_train_step",
    "tf_function",
    "tf1_script",
    "three_d",
)
"""In the order of the page."""

_PART = re.compile(r"<!-- example (\w+) -->\n(.*?)<!-- end example -->\n", re.DOTALL)
_FOUND = re.compile(r"^tfpar: (.*?), [^,]* planner in [\d.]+ s: (.*?); predicted", re.MULTILINE)
_SHOWN = re.compile(r"^(tfpar: .* planner in |Plan (?:for .* )?on |(?:\w+_)?loss(?:es)?\b.*: )")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    names = parser.parse_args().names or NAMES
    page = PAGE.read_text(encoding="utf-8")
    parts = dict(_PART.findall(page))
    for name in names:
        parts[name] = part(name, output(name))
        print(name)
    begins = page.partition("<!-- example ")[0]
    marked = (f"<!-- example {n} -->\n{parts[n]}<!-- end example -->\n" for n in NAMES)
    PAGE.write_text(begins + "\n".join(marked), encoding="utf-8")


def output(name: str) -> str:
    """What an example prints.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        env={**os.environ, "PYTHONPATH": python_path, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    return done.stdout


def part(name: str, printed: str) -> str:
    """What the page says of an example."""
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    title, _, text = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    heading, _, rest = title.partition(":")
    rest = rest.strip()
    told = "\n\n".join(filter(None, (rest[:1].upper() + rest[1:], text)))
    shown = "\n".join(line for line in printed.splitlines() if _SHOWN.match(line))
    link = f"[examples/{name}.py](../examples/{name}.py)"
    found = f"{link} finds, with {versions()}:\n\n```text\n{shown}\n```"
    return f"\n## {heading.rstrip('.')}\n\n{told}\n\n{found}\n\n"


def versions() -> str:
    """Of what a plan depends on: `TensorFlow 2.21, Keras 3.15`."""
    return ", ".join(
        f"{name} {'.'.join(importlib.metadata.version(name.lower()).split('.')[:2])}"
        for name in ("TensorFlow", "Keras")
    )


def plans(text: str) -> list[tuple[str, str]]:
    """Of each plan that was announced in a text: the layout, and what is split."""
    return _FOUND.findall(text)


if __name__ == "__main__":
    main()
