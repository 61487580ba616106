"""Command-line arguments that describe a planning problem: model, search and machines."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable

from tfpar.cli.pipeline import add_pipeline
from tfpar.spec import Mesh, SpecError, TfparError

TRACEBACK = "on failure also show where, as Python does"
CLUSTER = (
    "a preset (`tfpar clusters` lists them) or a cluster file (default: local, machines like this "
    "one)"
)


def add_problem(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what is to be planned, how, and for which machines."""
    add_model(parser)
    parser.add_argument(
        "--mesh", required=True, help="the ranks: 2x8 (nodes x devices), 16, or data=2,model=8"
    )
    parser.add_argument("--cluster", help=f"the machines: {CLUSTER}")
    add_search(parser)


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which model trains on which batch."""
    parser.add_argument(
        "build",
        metavar="SCRIPT.PY:FUNCTION",
        help="a function without arguments, in a file or as package.module:function, that returns "
        "a compiled Keras model, or (model, batch)",
    )
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--data",
        metavar="SCRIPT.PY:FUNCTION",
        help="a function without arguments that returns one global batch, (x, y) or (x, y, "
        "sample_weight): arrays or tf.TensorSpecs",
    )
    batch.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="make a global batch of N up from the model's inputs, outputs and loss",
    )


def add_search(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how plans are searched, and what they may use."""
    parser.add_argument(
        "--planner",
        default="auto",
        help="tap, rhino, exhaustive (small models), or auto, which picks tap or rhino "
        "(default: %(default)s)",
    )
    parser.add_argument("--level", type=int, help="of Rhino's planner: 2 or 3 (default: 3)")
    parser.add_argument(
        "--search-seconds", type=float, help="take the best plan found by then (default: no end)"
    )
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="what a plan may use of a device, such as 16GiB (default: all it has)",
    )
    parser.add_argument(
        "--recompute",
        metavar="BLOCKS",
        action="append",
        help="what to compute again in the backward pass: all (blocks that repeat), none, or a "
        "regular expression, which may be given several times (default: what memory asks for)",
    )
    parser.add_argument(
        "--offload",
        choices=("all", "none", "optimizer", "activations"),
        help="what lies in host memory between its uses: optimizer slots, what blocks that repeat "
        "keep for the backward pass, both, or nothing (default: what memory asks for)",
    )
    parser.add_argument(
        "--plan-cache",
        metavar="DIR",
        help="keep plans in this folder, and search each problem once (default: $TFPAR_PLAN_CACHE)",
    )
    parser.add_argument(
        "--constraints",
        metavar="HINTS.TOML",
        help="a file of constraints: tables such as [[shard]], with the arguments of tap.shard",
    )
    add_pipeline(parser)
    parser.add_argument("--traceback", action="store_true", help=TRACEBACK)


def parse_mesh(text: str) -> Mesh:
    """The mesh of `2x8`, `16`, `2x2x4` or `data=2,model=8`.

    Raises:
        TfparError: it is none of these.
    """
    sizes = re.fullmatch(r"\d+(x\d+)*", text)
    named = re.fullmatch(r"\w+=\d+(,\w+=\d+)*", text)
    try:
        if sizes:
            return Mesh.of([int(n) for n in text.split("x")])
        if named:
            names, counts = zip(*(axis.split("=") for axis in text.split(",")), strict=True)
            return Mesh(names, tuple(map(int, counts)))
    except SpecError as error:
        raise TfparError(f"--mesh {text!r}: {error}") from error
    raise TfparError(
        f"--mesh {text!r} is no mesh. Write sizes (2x8, 16, 2x2x4) or axes (data=2,model=8)."
    )


def parse_meshes(texts: Iterable[str]) -> list[Mesh]:
    """The meshes of `8,2x8` or `8,data=2,model=8`, each once.

    Axes with names that follow each other are one mesh, until one of them comes again:
    `data=2,model=8,data=16` are two.

    Raises:
        TfparError: one of them is no mesh.
    """
    found: list[list[str]] = []
    for text in texts:
        named = False
        for part in text.split(","):
            name, equals, _ = part.partition("=")
            known = {axis.partition("=")[0] for axis in found[-1]} if named else set()
            if equals and named and name not in known:
                found[-1].append(part)
            else:
                found.append([part])
            named = bool(equals)
    return list(dict.fromkeys(parse_mesh(",".join(parts)) for parts in found))
