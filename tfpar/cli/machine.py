"""Commands about this machine: `tfpar doctor`, `calibrate` and `install-horovod`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from tfpar.jobs.doctor import Finding, Status
from tfpar.jobs.install import horovod
from tfpar.observability.report.tables import render_table
from tfpar.progress import reporting

SOUND, UNSOUND = 0, 1


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "doctor",
        help="say what is on this machine, what works, and how to mend the rest",
        description="Say what is on this machine, what works, and how to mend the rest. The exit "
        "code is 0 if this machine can train, in one process and in several.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="train nothing, only look at what is there"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    """Examine this machine; returns the exit code."""
    from tfpar.jobs.doctor.examination import examine

    with reporting("looking at this machine", wanted=sys.stderr.isatty()) as report:
        findings = list(examine(quick=options.quick, tell=report.tell))
    print(_as_json(findings) if options.json else _as_text(findings, options.quick))
    return UNSOUND if _with(Status.MISSING, findings) else SOUND


def _as_json(findings: Sequence[Finding]) -> str:
    return json.dumps(
        {
            "sound": not _with(Status.MISSING, findings),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        },
        indent=2,
    )


def _as_text(findings: Sequence[Finding], quick: bool) -> str:
    """A table, then what to do: lines to copy, which a table would break."""
    rows = [(f.name, f.status.value, f.found) for f in findings]
    parts = [render_table("This machine", ("what", "state", "found"), rows)]
    for status, title in (
        (Status.MISSING, "To mend, for training to work:"),
        (Status.WARNING, "To mend, if you need it:"),
    ):
        lines = [f"  {f.name}: {f.mend}" for f in _with(status, findings)]
        if lines:
            parts.append("\n".join([title, *lines]))
    missing = [finding.name for finding in _with(Status.MISSING, findings)]
    if missing:
        parts.append(f"Training does not work here: {', '.join(missing)}.")
    elif quick:
        parts.append("All that training needs is here; without --quick it is tried.")
    else:
        parts.append("Training works here, in one process and in several.")
    return "\n\n".join(parts)


def _with(status: Status, findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status is status]


# --- calibrate ------------------------------------------------------------------------------
# Measure the machine, and write a cluster file.


def add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
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
    parser.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
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


# --- install-horovod ------------------------------------------------------------------------
# Horovod's wheel for the TensorFlow found here, built and installed.


def add_install(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "install-horovod",
        help="build Horovod for the TensorFlow found here, and install it",
        description="Build Horovod for the TensorFlow found here, and install it. The wheel is "
        "kept below $TFPAR_CACHE (default: ~/.cache/tfpar).",
    )
    horovod.add_options(parser)
    parser.add_argument(
        "--traceback", action="store_true", help="on failure also show where, as Python does"
    )
    parser.set_defaults(run=horovod.run)
