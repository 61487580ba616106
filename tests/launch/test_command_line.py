"""`tfpar run`: its options, and what they are for the launcher."""

from __future__ import annotations

import argparse

import pytest

from tfpar.cli import run as command
from tfpar.spec import TfparError


def options(monkeypatch, *argv: str):
    """What the launcher gets for these arguments."""
    given = []
    monkeypatch.setattr(command.launch, "run", lambda o: given.append(o) or 5)
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["run", *argv])
    assert parsed.run(parsed) == 5
    return given[0]


def test_what_follows_the_program_is_its_own(monkeypatch):
    found = options(monkeypatch, "-np", "4", "python", "train.py", "-np", "2", "--verbose", "--")
    assert found.num_ranks == 4 and not found.verbose
    assert found.command == ("python", "train.py", "-np", "2", "--verbose", "--")
    assert options(monkeypatch, "--", "-odd").command == ("-odd",)


def test_options_are_those_of_horovodrun(monkeypatch):
    found = options(
        monkeypatch,
        "-np",
        "2",
        "-H",
        "a:1,b:1",
        "--gloo",
        "--network-interface",
        "eth0",
        "--ssh-port",
        "7",
        "--ssh-identity-file",
        "k",
        "--min-np",
        "1",
        "--start-timeout",
        "9",
        "true",
    )
    assert (found.hosts, found.network_interface, found.ssh_port) == ("a:1,b:1", "eth0", 7)
    assert (found.ssh_identity_file, found.min_ranks, found.start_timeout_s) == ("k", 1, 9)
    assert not found.mpi and options(monkeypatch, "--mpi", "true").mpi
    assert options(monkeypatch, "-hostfile", "f", "true").hostfile == "f"


def test_variables_are_set_or_passed_on(monkeypatch):
    monkeypatch.setenv("HERE", "1=2")
    found = options(monkeypatch, "--env", "A=b=c", "--env", "HERE", "--env", "E=", "true")
    assert found.env == {"A": "b=c", "HERE": "1=2", "E": ""}
    with pytest.raises(TfparError, match="NOT_HERE"):
        options(monkeypatch, "--env", "NOT_HERE", "true")


def test_a_run_needs_a_program(monkeypatch):
    with pytest.raises(TfparError, match="No program"):
        options(monkeypatch, "-np", "2")
