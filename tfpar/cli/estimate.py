"""`tfpar estimate`: will it fit, and how fast, on one or several meshes and clusters."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfpar.cli.problem import CLUSTER, add_model, add_search, parse_meshes
from tfpar.cli.quiet import quiet_tensorflow
from tfpar.cluster.lookup import find_cluster
from tfpar.observability.report.what_if import Estimate, estimates_json, estimates_table
from tfpar.spec import MemoryLimitError, Mesh, TfparError
from tfpar.spec.arguments import integer

if TYPE_CHECKING:
    from tfpar.progress import Reporter
    from tfpar.tf.traced import TracedModel

FITS, NONE_FITS = 0, 1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, its options, and `run` as what it does."""
    parser = commands.add_parser(
        "estimate",
        help="say whether a model fits on machines that need not be there, and how fast it trains",
        description="Plan a model for machines and say what its best plan needs and how long a "
        "step takes; for several meshes and clusters, the fastest first. Exit code 0: it fits, on "
        "one of them at least; 1: no plan fits; 2: it cannot be planned.",
    )
    add_model(parser)
    parser.add_argument(
        "--mesh",
        action="append",
        required=True,
        metavar="MESH,...",
        help="the ranks: 2x8 (nodes x devices), 16, or data=2,model=8; or several, as in 8,2x8",
    )
    parser.add_argument(
        "--cluster",
        action="append",
        metavar="CLUSTER,...",
        help=f"the machines, or several with commas between: {CLUSTER}",
    )
    parser.add_argument("--top", type=int, metavar="N", help="show the N best (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_search(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the estimates; 0 if the model fits somewhere, 1 if no plan does.

    Raises:
        TfparError: the model cannot be planned at all.
    """
    if options.top is not None:
        integer("--top", options.top, 1)
    meshes = parse_meshes(options.mesh)
    clusters = [name for text in options.cluster or ["local"] for name in text.split(",")]
    pairs = [(mesh, cluster) for cluster in dict.fromkeys(clusters) for mesh in meshes]
    for cluster in clusters:
        if cluster != "local":
            find_cluster(cluster)  # an unknown one is refused, whatever the others are
    with quiet_tensorflow():
        from tfpar.cli.plan import check_machines, read_settings, trace_step
        from tfpar.observability.report.what_if import estimate
        from tfpar.tf.traced import make_search_reporter
    settings = read_settings(options)
    impossible: dict[tuple[Mesh, str], TfparError] = {}
    for mesh, cluster in pairs:
        try:
            check_machines(mesh, cluster, settings)
        except TfparError as error:
            impossible[mesh, cluster] = error
    _raise_if_all(impossible, pairs)
    with trace_step(options, meshes, settings) as model, make_search_reporter(settings) as report:
        if len(pairs) == 1 and not options.json:
            try:
                print(estimate(model.plan(*pairs[0], report)))
            except MemoryLimitError as error:
                print(f"Does not fit: {error}")
                return NONE_FITS
            return FITS
        found = estimates_of(model, pairs, impossible, report)
    _raise_if_all(impossible, pairs)
    by_rent = settings.objective == "samples_per_dollar"
    found.sort(key=lambda one: one.rank(by_rent))
    if options.json:
        print(estimates_json(found, options.top))
    else:
        print(estimates_table(found, options.top, "cheapest" if by_rent else "fastest"))
    return FITS if any(one.fits for one in found) else NONE_FITS


def estimates_of(
    model: TracedModel,
    pairs: Sequence[tuple[Mesh, str]],
    impossible: dict[tuple[Mesh, str], TfparError],
    report: Reporter,
) -> list[Estimate]:
    """Estimate the model on each mesh and cluster.

    Args:
        impossible: why some of them have no plan; those that turn out to have none are added.
    """
    return [
        Estimate.impossible(mesh, cluster, impossible[mesh, cluster])
        if (mesh, cluster) in impossible
        else _estimated(model, mesh, cluster, impossible, report)
        for mesh, cluster in pairs
    ]


def _estimated(
    model: TracedModel,
    mesh: Mesh,
    cluster: str,
    impossible: dict[tuple[Mesh, str], TfparError],
    report: Reporter,
) -> Estimate:
    """Estimate the model on a mesh of a cluster; a pair without a plan is added to `impossible`."""
    with report.at(f"{mesh} on {cluster}", apart=True):
        try:
            plan, _ = model.find(mesh, cluster, report)
        except MemoryLimitError as error:
            return Estimate.too_large(mesh, cluster, error)
        except TfparError as error:
            impossible[mesh, cluster] = error
            return Estimate.impossible(mesh, cluster, error)
    return Estimate.of(mesh, cluster, plan, model.batch_size)


def _raise_if_all(
    impossible: dict[tuple[Mesh, str], TfparError], pairs: Sequence[tuple[Mesh, str]]
) -> None:
    """Raise the first error where no pair is possible."""
    if len(impossible) == len(pairs):
        raise impossible[pairs[0]]
