"""Hosts from options, files and Slurm, and the ranks on them."""

from __future__ import annotations

import pytest

from tfpar.jobs.launch.hosts import (
    Host,
    Slot,
    allocate,
    find_hosts,
    parse_hosts,
    place_ranks,
    read_hostfile,
    without,
)
from tfpar.jobs.launch.options import RunOptions
from tfpar.spec import TfparError


def found(environ: dict[str, str] | None = None, **options) -> list[tuple[str, int]]:
    hosts = find_hosts(RunOptions(command=("x",), **options), environ or {})
    return [(host.name, host.slots) for host in hosts]


def test_hosts_have_the_slots_that_are_written_or_one():
    assert parse_hosts("a:2, b.example.org:3,me@c") == [
        Host("a", 2),
        Host("b.example.org", 3),
        Host("me@c", 1),
    ]


def test_a_host_named_twice_has_the_slots_of_both():
    assert parse_hosts("a:1,b:1,a:2") == [Host("a", 3), Host("b", 1)]


@pytest.mark.parametrize(
    "text", ["a:x", "a:-1", "a:", "", "a,,b", "-oProxyCommand=x", "a b", "a;b"]
)
def test_what_is_no_host_is_refused(text):
    with pytest.raises(TfparError, match="-H"):
        parse_hosts(text)


def test_a_hostfile_may_have_either_form_and_comments(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# nodes\nn1 slots=4 max-slots=8\n\nn2:2  # small\nn3\n")
    assert read_hostfile(str(path)) == [Host("n1", 4), Host("n2", 2), Host("n3", 1)]


@pytest.mark.parametrize(
    "text, message", [("a\nb slots=x", "line 2: 'x'"), ("a 4", "line 1"), ("# none", "no host")]
)
def test_a_wrong_hostfile_is_refused_by_its_line(tmp_path, text, message):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(TfparError, match=message):
        read_hostfile(str(path))


def test_a_missing_hostfile_is_named(tmp_path):
    with pytest.raises(TfparError, match="nowhere"):
        read_hostfile(str(tmp_path / "nowhere"))


def test_ranks_are_counted_on_each_machine():
    slots = place_ranks(["a", "b", "a", "b", "a"])
    assert [s.local_rank for s in slots] == [0, 0, 1, 1, 2]
    assert [s.local_size for s in slots] == [3, 2, 3, 2, 3]
    assert [(s.cross_rank, s.cross_size) for s in slots] == [(0, 2), (1, 2), (0, 2), (1, 2), (0, 1)]


@pytest.mark.parametrize("count", [10**6, 10**12, "9" * 5000], ids=["million", "trillion", "long"])
def test_more_slots_than_a_machine_can_have_are_refused(count):
    with pytest.raises(TfparError, match="slots"):
        parse_hosts(f"a:{count}")
    if isinstance(count, int):
        with pytest.raises(TfparError, match="slots"):
            found(num_ranks=count)


def test_without_hosts_this_machine_has_a_slot_for_each_rank():
    assert found(num_ranks=3) == [("localhost", 3)]
    assert found() == [("localhost", 1)]


def test_in_a_slurm_allocation_its_hosts_are_taken():
    slurm = {"SLURM_JOB_NODELIST": "n[1-3],g5", "SLURM_TASKS_PER_NODE": "2(x3),1"}
    assert found(slurm) == [("n1", 2), ("n2", 2), ("n3", 2), ("g5", 1)]
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "4"}
    assert found(slurm) == [("n1", 4), ("n2", 4)]
    assert found({"SLURM_JOB_NODELIST": "n[1-2]"}) == [("n1", 1), ("n2", 1)]
    assert found(slurm, hosts="a:2") == [("a", 2)]


def test_slurm_tasks_for_other_nodes_are_refused():
    with pytest.raises(TfparError, match="2 nodes"):
        found({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2,1"})


def test_ranks_fill_the_hosts_in_order():
    assert allocate([Host("a", 2), Host("b", 1), Host("c", 4)], 5) == [
        Slot(0, 5, "a", 0, 2, 0, 3),
        Slot(1, 5, "a", 1, 2, 0, 2),
        Slot(2, 5, "b", 0, 1, 1, 3),
        Slot(3, 5, "c", 0, 2, 2, 3),
        Slot(4, 5, "c", 1, 2, 1, 2),
    ]


def test_more_ranks_than_slots_is_refused_with_both_numbers():
    with pytest.raises(TfparError, match="4 ranks .* have 3 .*a:2, b:1"):
        allocate([Host("a", 2), Host("b", 1)], 4)


def test_many_hosts_are_filled_in_no_time_and_more_ranks_than_a_job_has_refused():
    hosts = [Host(f"n{i}", 100_000) for i in range(30_000)]
    assert allocate(hosts[:1000] + [Host("z", 1)], 100_000)[-1].local_rank == 99_999
    ones = [Host(f"n{i}", 1) for i in range(30_000)]
    assert allocate(ones, 30_000)[-1].cross_rank == 29_999
    with pytest.raises(TfparError, match="more than a job can have"):
        allocate(hosts, 3_000_000_000)


def test_lost_slots_are_no_longer_there():
    assert without([Host("a", 2), Host("b", 2)], ["b", "a", "b"]) == [Host("a", 1), Host("b", 0)]
