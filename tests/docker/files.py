"""The files of docker/, and what tests read of them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tfpar.cli import make_parser

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = {name: DOCKER / f"Dockerfile.{name}" for name in ("cpu", "cuda")}
IMAGES = {f"tfpar:{name}{target}" for name in DOCKERFILES for target in ("", "-ssh")}
PAGE = ROOT / "docs" / "howto" / "run_on_a_cluster.md"


def text(name: str) -> str:
    return (DOCKER / name).read_text(encoding="utf-8")


def options_of(words: list[str]) -> argparse.Namespace:
    """What `tfpar` understands; an unknown option exits."""
    return make_parser().parse_args(words)


def tfpar_runs(page: str) -> list[list[str]]:
    """The words of each `tfpar run` that stands in the text of a file, without `tfpar`."""
    page = page.replace("\\\n", " ")
    lines = re.findall(
        r"^(?:#|exec|.*exec node1|inside \S+ node1)?\s*tfpar (run .*)$", page, re.MULTILINE
    )
    return [line.split("  #")[0].split() for line in lines]
