"""`tfpar calibrate`: measure the machine, and write a cluster file."""

from __future__ import annotations

import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, its options, and `run` as what it does."""
    parser = commands.add_parser(
        "calibrate",
        help="measure rates and collectives here, and write a cluster file",
        description="Measure what ops and collectives take on the ranks here, and describe it as "
        "a cluster file for --cluster and cluster=. For ranks that are processes: tfpar run -np N "
        "tfpar calibrate.",
    )
    parser.add_argument(
        "--mesh",
        help="the ranks: 2x2 (nodes x devices), 4, or data=2,model=2 (default: those of the job, "
        "or the GPUs here)",
    )
    parser.add_argument(
        "-o", "--output", metavar="CLUSTER.TOML", help="write the file here (default: print it)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=60.0,
        metavar="S",
        help="about how many seconds it may take (default: %(default)g)",
    )
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, and write or print.

    Raises:
        TfparError: as of `tap.calibrate`.
    """
    from tfpar.cli.problem import parse_mesh
    from tfpar.cluster.files import cluster_text
    from tfpar.jobs.calibration.calibrate import calibrate
    from tfpar.tf.distributed.world import this_world

    mesh = parse_mesh(options.mesh) if options.mesh is not None else None
    cluster = calibrate(mesh, options.output, budget_s=options.budget)
    world = this_world()
    if world is None or world.rank == 0:
        text = f"Wrote {options.output}" if options.output else cluster_text(cluster)
        print(text.rstrip())
    return 0
