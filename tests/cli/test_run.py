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
    assert not found.insecure_grpc and options(monkeypatch, "--insecure-grpc", "true").insecure_grpc


def test_variables_are_set_or_passed_on(monkeypatch):
    monkeypatch.setenv("HERE", "1=2")
    found = options(monkeypatch, "--env", "A=b=c", "--env", "HERE", "--env", "E=", "true")
    assert found.env == {"A": "b=c", "HERE": "1=2", "E": ""}
    with pytest.raises(TfparError, match="NOT_HERE"):
        options(monkeypatch, "--env", "NOT_HERE", "true")


def test_a_run_needs_a_program(monkeypatch):
    with pytest.raises(TfparError, match="No program"):
        options(monkeypatch, "-np", "2")


def test_a_timeline_is_told_to_ranks_by_variables(monkeypatch, tmp_path):
    path = tmp_path / "t.json"
    found = options(monkeypatch, "--timeline-filename", str(path), "true")
    assert found.env == {"TFPAR_TIMELINE": str(path), "TFPAR_TIMELINE_STEPS": "10-12"}
    steps = ("--timeline-steps", "7")
    monkeypatch.chdir(tmp_path)
    found = options(monkeypatch, "--timeline-filename", "t.json", *steps, "--env", "A=b", "true")
    assert found.env["TFPAR_TIMELINE_STEPS"] == "7-7"
    assert found.env["TFPAR_TIMELINE"] == str(path) and found.env["A"] == "b"
    assert "TFPAR_TIMELINE" not in options(monkeypatch, "true").env
    # Of other hosts, the first has the folder.
    remote = ("-H", "a:1,b:1", "--timeline-filename", "/on/that/host/t.json", "true")
    assert options(monkeypatch, *remote).env["TFPAR_TIMELINE"] == "/on/that/host/t.json"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--timeline-filename", "t.json", "--timeline-steps", "9-3"), "steps is '9-3'"),
        (("--timeline-filename", "t.json", "--timeline-steps", "now"), "steps is 'now'"),
        (("--timeline-filename", "nowhere/t.json"), "there is no folder"),
        (("--timeline-steps", "3-4"), "--timeline-filename"),
    ],
)
def test_a_timeline_that_cannot_be_is_told_before_ranks_are_started(monkeypatch, given, why):
    with pytest.raises(TfparError, match=why):
        options(monkeypatch, *given, "true")
