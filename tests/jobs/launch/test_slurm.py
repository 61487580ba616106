"""Slurm's lists of nodes and tasks."""

from __future__ import annotations

import pytest

from tfpar.jobs.launch.slurm import MOST_NODES, expand_nodelist, expand_tasks
from tfpar.spec import TfparError


@pytest.mark.parametrize(
    "text, names",
    [
        ("node[01-03,7],gpu5", "node01 node02 node03 node7 gpu5"),
        ("a1", "a1"),
        ("r[1-2]n[8-10]", "r1n8 r1n9 r1n10 r2n8 r2n9 r2n10"),
        ("n[098-101]-ib,x", "n098-ib n099-ib n100-ib n101-ib x"),
    ],
)
def test_slurm_lists_are_expanded(text, names):
    assert expand_nodelist(text, "SLURM_JOB_NODELIST") == names.split()


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n[a]", "n]", "n[]", "a,,b"])
def test_a_malformed_slurm_list_is_refused(text):
    with pytest.raises(TfparError, match="SLURM_JOB_NODELIST"):
        expand_nodelist(text, "SLURM_JOB_NODELIST")


@pytest.mark.parametrize(
    "text",
    ["n[0-99999999]", "a[0-999][0-999]", "a[0-9][0-9][0-9][0-9][0-9]b[0-1]", "x,n[1-100000]"],
)
def test_a_slurm_list_of_too_many_nodes_is_refused_before_they_are_written_out(text):
    with pytest.raises(TfparError, match=r"SLURM_JOB_NODELIST=.* stands for .* nodes"):
        expand_nodelist(text, "SLURM_JOB_NODELIST")


def test_a_number_that_python_would_not_read_is_refused():
    for text in (f"n[0-{'9' * 5000}]", f"n[{'9' * 5000}]"):
        with pytest.raises(TfparError, match="SLURM_NODELIST=.* cannot be read") as caught:
            expand_nodelist(text, "SLURM_NODELIST")
        assert len(str(caught.value)) < 400


def test_as_many_nodes_as_are_read_are_written_out():
    assert len(expand_nodelist(f"n[1-{MOST_NODES}]", "SLURM_NODELIST")) == MOST_NODES


def test_tasks_are_those_of_each_node():
    assert expand_tasks("2(x3),1", "SLURM_TASKS_PER_NODE") == [2, 2, 2, 1]


@pytest.mark.parametrize("text", ["2(x999999999)", "1,x", "", f"1(x{'9' * 5000})"])
def test_wrong_tasks_are_refused_by_their_variable(text):
    with pytest.raises(TfparError, match="SLURM_TASKS_PER_NODE"):
        expand_tasks(text, "SLURM_TASKS_PER_NODE")
