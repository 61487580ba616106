"""`tfpar estimate`: will it fit, and how fast, on one or several meshes and clusters."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tfpar.cli.prices import add_prices, check_prices, parse_prices
from tfpar.cli.problem import CLUSTER, add_model, add_search, parse_meshes
from tfpar.cli.quiet import quiet_tensorflow
from tfpar.cluster.lookup import find_cluster
from tfpar.observability.report.budget import (
    Training,
    budget_lines,
    deadline_text,
    price_advice,
    price_lines,
    unknown_prices,
)
from tfpar.observability.report.what_if import Estimate, estimates_json, estimates_table
from tfpar.spec import MemoryLimitError, Mesh, TfparError
from tfpar.spec.arguments import finite, integer

if TYPE_CHECKING:
    from tfpar.cluster.description import Cluster
    from tfpar.progress import Reporter
    from tfpar.tf.traced import TracedModel

FITS, NONE_FITS = 0, 1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, its options, and `run` as what it does."""
    parser = commands.add_parser(
        "estimate",
        help="say whether a model fits on machines that need not be there, and how fast it trains",
        description="Plan a model for machines and say what its best plan needs and how long a "
        "step takes; for several meshes and clusters, the fastest or the cheapest first. Exit "
        "code 0: it fits, on one of them at least; 1: no plan fits; 2: it cannot be planned.",
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
    add_prices(parser)
    parser.add_argument(
        "--samples-per-epoch",
        type=int,
        metavar="N",
        help="samples of the training data: also say what an epoch costs and how long it takes",
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="of the training (default: 1)")
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="HOURS",
        help="name the cheapest that trains all epochs in so many hours",
    )
    parser.add_argument(
        "--sort",
        choices=("time", "cost"),
        help="what comes first: the fastest, or what costs least for each sample (default: time, "
        "or cost with --objective samples_per_dollar)",
    )
    parser.add_argument("--top", type=int, metavar="N", help="show the N best (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_search(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the estimates; 0 if the model fits somewhere, 1 if no plan does.

    Raises:
        TfparError: the model cannot be planned at all, or what the arguments ask for is missing.
    """
    if options.top is not None:
        integer("--top", options.top, 1)
    training = read_training(options)
    meshes = parse_meshes(options.mesh)
    clusters = [name for text in options.cluster or ["local"] for name in text.split(",")]
    fleets = [(mesh, cluster) for cluster in dict.fromkeys(clusters) for mesh in meshes]
    for cluster in clusters:
        if cluster != "local":
            find_cluster(cluster)  # an unknown one is refused, whatever the others are
    prices = parse_prices(options.price)
    with quiet_tensorflow():
        from tfpar.cli.plan import find_fleets, read_settings, trace_step
        from tfpar.observability.report.what_if import estimate
        from tfpar.tf.traced import make_search_reporter
    settings = read_settings(options)
    machines, impossible = find_fleets(fleets, prices, settings)
    _raise_if_all(impossible, fleets)
    priced = {name: cluster for (_, name), cluster in machines.items()}
    check_prices(prices, priced)
    by_cost = (options.sort or settings.objective) in ("cost", "samples_per_dollar")
    if options.sort == "cost" or options.deadline is not None:
        _check_known("--sort cost" if options.sort == "cost" else "--deadline", priced)
    with trace_step(options, meshes, settings) as model, make_search_reporter(settings) as report:
        if len(fleets) == 1 and not options.json:
            try:
                plan = model.plan(meshes[0], machines[fleets[0]], report)
            except MemoryLimitError as error:
                print(f"Does not fit: {error}")
                return NONE_FITS
            print(estimate(plan))
            alone = Estimate.of(*fleets[0], plan, model.batch_size)
            if training is not None:
                print("\n".join(budget_lines(alone, training)))
            _print_costs([alone], training, priced)
            return FITS
        found = estimates_of(model, fleets, machines, impossible, report)
    _raise_if_all(impossible, fleets)
    found.sort(key=lambda one: one.rank(by_cost))
    if options.json:
        print(estimates_json(found, options.top, training))
    else:
        first = "cheapest" if by_cost else "fastest"
        print(estimates_table(found, options.top, first, training))
        _print_costs(found, training, priced)
    return FITS if any(one.fits for one in found) else NONE_FITS


def read_training(options: argparse.Namespace) -> Training | None:
    """Read the amount of training that the arguments ask for; None if there is none.

    Raises:
        TfparError: a number is out of range, or `--samples-per-epoch` is missing.
    """
    samples, epochs, deadline = options.samples_per_epoch, options.epochs, options.deadline
    if deadline is not None:
        finite("--deadline", deadline, above=0)
    if epochs is not None:
        integer("--epochs", epochs, 1)
    if samples is None:
        for name, given in (("--epochs", epochs), ("--deadline", deadline)):
            if given is not None:
                raise TfparError(
                    f"{name} needs --samples-per-epoch: how many samples the training data has."
                )
        return None
    return Training(integer("--samples-per-epoch", samples, 1), epochs or 1, deadline)


def _check_known(option: str, clusters: Mapping[str, Cluster]) -> None:
    """Raise TfparError if no cluster has a price for each of its devices."""
    without = [name for name, each in clusters.items() if unknown_prices({name: each})]
    if len(without) == len(clusters):
        unknown = unknown_prices(clusters)
        devices = ", ".join(name or "unnamed devices" for name in unknown)
        raise TfparError(
            f"{option} needs prices, but that of {devices} is not known, on {', '.join(without)}. "
            f"Give {price_advice(unknown)}."
        )


def _print_costs(
    found: Sequence[Estimate], training: Training | None, clusters: Mapping[str, Cluster]
) -> None:
    """Print which fleet is the cheapest in time, and the prices that all sums are of."""
    if training is not None and training.deadline_hours is not None:
        print(deadline_text(found, training))
    if training is not None or any(one.dollars_per_million is not None for one in found):
        print("\n".join(price_lines(clusters)))


def estimates_of(
    model: TracedModel,
    fleets: Sequence[tuple[Mesh, str]],
    machines: Mapping[tuple[Mesh, str], Cluster],
    impossible: dict[tuple[Mesh, str], TfparError],
    report: Reporter,
) -> list[Estimate]:
    """Estimate the model on each fleet: a mesh, and the name of its cluster.

    Args:
        machines: of each fleet that can be.
        impossible: why others cannot; those that turn out to have no plan are added.
    """
    return [
        Estimate.impossible(*fleet, impossible[fleet])
        if fleet in impossible
        else _estimated(model, *fleet, machines[fleet], impossible, report)
        for fleet in fleets
    ]


def _estimated(
    model: TracedModel,
    mesh: Mesh,
    cluster: str,
    machines: Cluster,
    impossible: dict[tuple[Mesh, str], TfparError],
    report: Reporter,
) -> Estimate:
    """Estimate the model on a fleet; one without a plan is added to `impossible`."""
    with report.at(f"{mesh} on {cluster}", apart=True):
        try:
            plan, _ = model.find(mesh, machines, report)
        except MemoryLimitError as error:
            return Estimate.too_large(mesh, cluster, error)
        except TfparError as error:
            impossible[mesh, cluster] = error
            return Estimate.impossible(mesh, cluster, error)
    return Estimate.of(mesh, cluster, plan, model.batch_size)


def _raise_if_all(
    impossible: dict[tuple[Mesh, str], TfparError], fleets: Sequence[tuple[Mesh, str]]
) -> None:
    """Raise the first error where no fleet is possible."""
    if len(impossible) == len(fleets):
        raise impossible[fleets[0]]
