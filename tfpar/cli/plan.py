"""`tfpar plan`: a script's model, planned."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tfpar.cli.estimate import estimates_of
from tfpar.cli.model import Made
from tfpar.cli.prices import Price, apply_prices, check_prices, parse_prices
from tfpar.cli.problem import parse_mesh, pipeline_of
from tfpar.cli.script import scripts
from tfpar.cluster.description import Cluster
from tfpar.cluster.lookup import find_cluster
from tfpar.constraints import Constraint
from tfpar.hints import read_hints
from tfpar.observability.report.data.build import build_report
from tfpar.observability.report.what_if import what_if
from tfpar.options import PlanKeywords, settings_of
from tfpar.planning.incumbent import SearchInterrupted
from tfpar.plans import Offload, Plan
from tfpar.settings import Settings
from tfpar.spec import Mesh, PlanError, TfparError
from tfpar.tf.keras import adapter
from tfpar.tf.runtime.detect import LOCAL, find_machines
from tfpar.tf.session import Session
from tfpar.tf.traced import TracedModel, make_search_reporter, resolve_cluster
from tfpar.writable import check_writable

FOUND, INTERRUPTED = 0, 1


def run(options: argparse.Namespace) -> int:
    """Plan, write and print; what can be refused before the script runs is.

    Returns:
        0, or 1 if Ctrl-C ended the search: then it is the best plan that had been found.

    Raises:
        TfparError: anything that is wrong, in words for the user; or Ctrl-C before any plan was
            found that fits.
    """
    if options.output is not None:
        advice = "Name another file with -o."
        check_writable("plan file", options.output, advice=advice, error_type=PlanError)
    elsewhere = [_machines_and_mesh(text) for text in options.what_if]
    try:
        plan, code = _plan_of(options, elsewhere), FOUND
    except SearchInterrupted as stopped:
        plan, code = _best_so_far(stopped), INTERRUPTED
    if options.output is not None:
        plan.save(options.output)
        if not options.quiet:
            print(f"Wrote {options.output}")
    if options.explain:
        print("\n".join(map(plan.explain, options.explain)))
    elif options.json:
        print(json.dumps(plan.report_data()))
    elif not options.quiet:
        print(plan.summary(full=options.full, sort=options.sort))
    return code


def _best_so_far(stopped: SearchInterrupted) -> Plan:
    """The plan that an interrupted search leaves, with a line that says so."""
    print("tfpar plan: interrupted, taking the best plan so far", file=sys.stderr, flush=True)
    if stopped.plan is None:
        raise PlanError(
            "The search was interrupted before it had found a plan that fits. Give it more time; "
            "--search-seconds ends it by itself."
        )
    return stopped.plan


def _machines_and_mesh(text: str) -> tuple[Mesh, str]:
    """Parse `--what-if`: the mesh, and the name of its cluster."""
    cluster, colon, mesh = text.rpartition(":")
    if not colon or not cluster:
        raise TfparError(f"--what-if {text!r}: write CLUSTER:MESH, such as dgx-a100:2x8.")
    if cluster != "local":
        find_cluster(cluster)
    return parse_mesh(mesh), cluster


def _plan_of(options: argparse.Namespace, elsewhere: Sequence[tuple[Mesh, str]]) -> Plan:
    """The plan of what the arguments name; what they get wrong is said first.

    Args:
        elsewhere: meshes and clusters for which it is to be known what the best plan takes there.

    Raises:
        TfparError: anything that is wrong; if no plan fits, a MemoryLimitError.
    """
    mesh, settings = parse_mesh(options.mesh), read_settings(options)
    prices = parse_prices(options.price)
    cluster = options.cluster or LOCAL
    here = find_priced(mesh, cluster, prices, settings)
    machines, impossible = find_fleets(elsewhere, prices, settings)
    check_prices(prices, {cluster: here, **{name: each for (_, name), each in machines.items()}})
    meshes = [mesh, *(mesh for mesh, _ in elsewhere)]
    with trace_step(options, meshes, settings) as model, make_search_reporter(settings) as report:
        plan = model.plan(mesh, here, report)
        if options.full or options.json or elsewhere:
            with report.at("what would have to change for the runner-up"):
                plan = plan.with_turning_points()
        if not elsewhere:
            return plan
        found = estimates_of(model, elsewhere, machines, impossible, report)
        told = [what_if(mesh, one) for (mesh, _), one in zip(elsewhere, found, strict=True)]
        data = build_report(plan, plan.partitioned).elsewhere(told)
        return plan.with_report(data.to_builtins())


def read_settings(options: argparse.Namespace) -> Settings:
    """Read the arguments of `problem.add_search`, beside mesh and cluster.

    Raises:
        TfparError: names what is wrong.
    """
    check_batch_size(options)
    constraints = read_constraints(options)
    return settings_of(None, constraints, None, read_keywords(options), PlanKeywords)


def check_batch_size(options: argparse.Namespace) -> None:
    """Refuse, before a script runs, a batch without samples."""
    if options.batch_size is not None and options.batch_size < 1:
        raise TfparError(f"--batch-size is {options.batch_size}; a batch has at least 1 sample.")


def read_constraints(options: argparse.Namespace) -> tuple[Constraint, ...]:
    """Read the constraints of the file that `--constraints` names."""
    return () if options.constraints is None else read_hints(options.constraints)


def read_keywords(options: argparse.Namespace) -> dict[str, Any]:
    """The same as keywords of `tap.plan`."""
    return {
        "planner": options.planner,
        "plan_cache": options.plan_cache,
        "memory_limit": _memory_limit(options.memory_limit),
        "recompute": _recompute(options.recompute),
        "attention": options.attention,
        "offload": _offload(options.offload),
        "level": options.level,
        "search_seconds": options.search_seconds,
        "objective": options.objective,
        "pipeline": pipeline_of(options),
    }


def find_priced(mesh: Mesh, cluster: str, prices: Sequence[Price], settings: Settings) -> Cluster:
    """Find the machines of a name, with the prices that were given for them; what the cluster, the
    stages or constraints cannot have is refused before a script runs.

    Raises:
        TfparError: names the mesh, and what it does not suit.
    """
    machines = apply_prices(find_machines(mesh, cluster), cluster, prices)
    resolve_cluster(mesh, machines, settings)
    if settings.given_pipeline is not None:
        settings.given_pipeline.sizes(mesh.size)
    return machines


Fleet = tuple[Mesh, str]
"""A mesh, and the name of the cluster that has it."""


def find_fleets(
    fleets: Sequence[Fleet], prices: Sequence[Price], settings: Settings
) -> tuple[dict[Fleet, Cluster], dict[Fleet, TfparError]]:
    """Find the machines of each fleet, and why some of them cannot be."""
    machines: dict[Fleet, Cluster] = {}
    impossible: dict[Fleet, TfparError] = {}
    for fleet in fleets:
        try:
            machines[fleet] = find_priced(*fleet, prices, settings)
        except TfparError as error:
            impossible[fleet] = error
    return machines, impossible


@contextlib.contextmanager
def trace_step(
    options: argparse.Namespace, meshes: Sequence[Mesh], settings: Settings
) -> Iterator[TracedModel]:
    """The step of the script's model, traced to be planned on any of `meshes`."""
    with scripts() as load:
        # Made in a scope of our own: the batch may depend on the model.
        adapter.install()
        most_axes = max(meshes, key=lambda mesh: mesh.num_axes)
        trains = settings.objective != "latency"
        made = Made.of(options, load, Session(most_axes).scope(), trains)
        with made.traced():
            model = TracedModel.of(lambda: made.model, made.batch, most_axes, settings)
        yield model


def _memory_limit(given: str | None) -> str | list[str] | None:
    """Parse `--memory-limit` to the value that `auto_parallel` takes."""
    return given.split(",") if given and "," in given else given


def _recompute(given: list[str] | None) -> bool | list[str] | None:
    """Parse `--recompute` to the value that `auto_parallel` takes."""
    if given in (["all"], ["none"]):
        return given == ["all"]
    return given


def _offload(given: str | None) -> Offload | bool | None:
    """Parse `--offload` to the value that `auto_parallel` takes."""
    if given in ("all", "none"):
        return given == "all"
    return Offload(**{given: True}) if given else None
