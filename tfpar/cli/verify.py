"""`tfpar verify`: a script's model on a mesh against the same model on one device."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from tfpar.cli.problem import CLUSTER, add_model, add_search, parse_mesh
from tfpar.cli.quiet import quiet_tensorflow
from tfpar.spec import TfparError
from tfpar.spec.arguments import integer

EQUAL, DIFFERENT = 0, 1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, its options, and `run` as what it does."""
    parser = commands.add_parser(
        "verify",
        help="train a model on a mesh and on one device, and compare every variable",
        description="Take some training steps on the ranks here, each again on one device, and "
        "compare losses, gradients and every variable. Exit code 0: all was judged, and nothing "
        "differs by more than roundings do; 1: something does, or was not judged; 2: it cannot be "
        "tried. For ranks that are processes: "
        "tfpar run -np N tfpar verify ...",
    )
    add_model(parser)
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--mesh", help="the ranks: 2x2 (nodes x devices), 4, or data=2,model=2")
    ranks.add_argument("--plan", metavar="PLAN.JSON", help="run this plan, on as many ranks")
    parser.add_argument("--cluster", help=f"the machines that a plan is searched for: {CLUSTER}")
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="of training (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_search(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train both ways, and print what differs; 0 if all was judged and nothing does, else 1.

    Raises:
        TfparError: the model cannot be trained so.
    """
    integer("--steps", options.steps, 1)
    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    with quiet_tensorflow():
        import keras

        from tfpar.api import auto_parallel
        from tfpar.cli.model import Made
        from tfpar.cli.plan import check_batch_size, read_constraints, read_keywords
        from tfpar.cli.script import scripts
        from tfpar.observability.verification import verify
        from tfpar.tf.distributed.world import this_world
    check_batch_size(options)
    asked = read_keywords(options) | {"cluster": options.cluster, "plan": options.plan}
    with scripts() as load:
        with auto_parallel(mesh, read_constraints(options), verbose=0, **asked):
            made = Made.of(options, load, contextlib.nullcontext())
        x, y, weight = keras.utils.unpack_x_y_sample_weight(_values(made))
        with made.traced():
            report = verify(made.model, x, y, sample_weight=weight, steps=options.steps)
    world = this_world()
    if world is None or world.rank == 0:
        print(report.to_json() if options.json else report)
    return EQUAL if report else DIFFERENT


def _values(made: Any) -> Any:
    """The batch of what a script has made, with numbers where it has specs alone.

    They are drawn from one seed: normal ones, and whole numbers that every vocabulary and number of
    classes has, 0 and 1.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, tf.TypeSpec):
            return leaf
        if not isinstance(leaf, tf.TensorSpec) or leaf.dtype == tf.string:
            raise TfparError(
                f"There are no values to verify with for {leaf}. Give arrays: --data script.py:"
                f"function."
            )
        shape, dtype = leaf.shape.as_list(), leaf.dtype.as_numpy_dtype
        whole = leaf.dtype.is_integer or leaf.dtype.is_bool
        return (rng.integers(0, 2, shape) if whole else rng.normal(size=shape)).astype(dtype)

    return keras.tree.map_structure(drawn, made.batch)
