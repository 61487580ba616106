"""What a process takes itself for, given its launcher's environment."""

from __future__ import annotations

import json

import pytest

from tfpar.spec import TfparError
from tfpar.tf.distributed.job import Job, without_job

LAUNCHERS = {
    "tfpar run": ("TFPAR_RANK", "TFPAR_SIZE", "TFPAR_LOCAL_RANK", "TFPAR_LOCAL_SIZE"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Kubernetes": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}

# What a batch script gets of an allocation of 3 machines, and a task that it starts with `srun`.
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "3(x2),1",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
}
STEP = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def told(launcher: str, *values: int) -> dict[str, str]:
    environ = dict(zip(LAUNCHERS[launcher], map(str, values), strict=False))
    return environ | ({"SLURM_STEP_ID": "0"} if launcher == "Slurm" else {})


def place(environ: dict[str, str]) -> tuple[int, int, int, int]:
    job = Job.of(environ)
    assert job is not None
    return job.rank, job.size, job.local_rank, job.local_size


def tf_config(index: object, *workers: str) -> dict[str, str]:
    cluster = {"worker": list(workers)}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"index": index}})}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_is_recognised(launcher):
    job = Job.of(told(launcher, 5, 8, 1, 4))
    assert job == Job(5, 8, 1, 4, launcher)
    assert job.nodes == 2


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_without_local_numbers_a_rank_has_its_machine_alone(launcher):
    assert place(told(launcher, 5, 8)) == (5, 8, 0, 1)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_of_one_process_is_none(launcher):
    assert Job.of(told(launcher, 0, 1, 0, 1)) is None


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_without_size_and_size_without_rank_are_no_job(launcher):
    for name in told(launcher, 0, 4):
        assert Job.of({k: v for k, v in told(launcher, 0, 4).items() if k != name}) is None


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("rank", [8, -1])
def test_a_rank_outside_of_the_job_is_refused(launcher, rank):
    with pytest.raises(TfparError, match=f"{launcher} says rank {rank} of 8"):
        Job.of(told(launcher, rank, 8))


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("at", range(4))
def test_what_is_no_number_is_refused_by_name(launcher, at):
    name = LAUNCHERS[launcher][at]
    with pytest.raises(TfparError, match=f"{name}='many'"):
        Job.of(told(launcher, 5, 8, 1, 4) | {name: "many"})


def test_nobody_is_no_job():
    assert Job.of({}) is None


def test_the_job_carries_what_tfpar_run_says():
    said = {"TFPAR_BACKEND": "tensorflow", "TFPAR_ADDRESSES": "a:1,b:2", "TFPAR_ATTEMPT": "3"}
    job = Job.of(told("tfpar run", 0, 2, 0, 1) | said)
    assert job == Job(0, 2, 0, 1, "tfpar run", "tensorflow", ("a:1", "b:2"), 3)
    with pytest.raises(TfparError, match="TFPAR_ATTEMPT='x'"):
        Job.of(told("tfpar run", 0, 2) | {"TFPAR_ATTEMPT": "x"})


def test_the_innermost_launcher_counts():
    """`tfpar run` in a task of a step, and mpirun there."""
    assert place(STEP | told("tfpar run", 1, 2, 1, 2)) == (1, 2, 1, 2)
    assert place(STEP | told("Open MPI", 3, 4, 1, 2)) == (3, 4, 1, 2)
    one_task = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert place(one_task | told("Kubernetes", 1, 2, 1, 2)) == (1, 2, 1, 2)


def test_without_job_a_process_is_alone():
    for launcher in LAUNCHERS:
        assert Job.of(without_job(told(launcher, 1, 2, 1, 2))) is None
    assert Job.of(without_job(STEP)) is None
    assert Job.of(without_job(tf_config(0, "a:1", "b:1"))) is None
    assert without_job({"PATH": "/bin", "TFPAR_RANK": "1"}) == {"PATH": "/bin"}


# --- Slurm ---------------------------------------------------------------------------------------


def test_a_task_of_a_step_knows_how_many_share_its_machine():
    assert place(STEP) == (4, 7, 1, 3)
    last = {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    assert place(STEP | last) == (6, 7, 0, 1)


def test_a_steps_tasks_count_and_not_those_of_the_allocation():
    smaller = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": "1",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS_PER_NODE": "3",
    }
    assert place(STEP | smaller) == (1, 2, 1, 2)


@pytest.mark.parametrize(
    "step",
    [
        {},
        {"SLURM_STEP_ID": "4294967291"},  # of the batch script
        {"SLURM_STEPID": "4294967291"},
        {"SLURM_STEP_ID": "4294967290"},  # the shell of `salloc`
    ],
)
def test_a_batch_script_is_not_the_first_rank(step):
    assert Job.of(BATCH | step) is None


def test_processes_that_a_batch_script_starts_otherwise_have_their_launchers_ranks():
    assert place(BATCH | told("Open MPI", 5, 7, 2, 3)) == (5, 7, 2, 3)
    assert place(BATCH | told("MPICH", 5, 7, 2, 3)) == (5, 7, 2, 3)
    assert place(BATCH | told("tfpar run", 5, 7, 2, 3)) == (5, 7, 2, 3)


def test_slurms_own_pmi_does_not_hide_the_local_rank():
    job = Job.of(STEP | {"PMI_RANK": "4", "PMI_SIZE": "7"})
    assert job == Job(4, 7, 1, 3, "Slurm")


def test_mpiexec_over_srun_has_more_ranks_than_slurm_has_tasks():
    """One task of the step is on each machine, and starts the ranks there."""
    step = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_PROCID": "1"}
    assert Job.of(STEP | step | told("MPICH", 4, 7, 1, 3)) == Job(4, 7, 1, 3, "MPICH")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"SLURM_NODEID": "3"}, "node 3.* is for 3 nodes"),
        ({"SLURM_NODEID": "-1"}, "node -1.* is for 3 nodes"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID='x'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3x2"}, "TASKS_PER_NODE=3x2 cannot be read"),
        ({"SLURM_STEP_NUM_TASKS": "all"}, "'all'"),
        ({"SLURM_PROCID": "7"}, "rank 7 of 7"),
    ],
)
def test_a_malformed_step_is_refused(wrong, message):
    with pytest.raises(TfparError, match=message):
        Job.of(STEP | wrong)


# --- Kubernetes ----------------------------------------------------------------------------------


def test_the_pods_of_an_indexed_job_are_ranks():
    job = Job.of({"JOB_COMPLETION_INDEX": "2", "TFPAR_SIZE": "4"})
    assert job == Job(2, 4, 0, 1, "Kubernetes Job")


def test_an_indexed_job_that_tells_no_size_is_none_of_ours():
    assert Job.of({"JOB_COMPLETION_INDEX": "2"}) is None


# --- TF_CONFIG -----------------------------------------------------------------------------------


def test_tf_config_counts_ranks_on_each_machine():
    environ = tf_config(2, "a:1", "b:1", "a:2")
    addresses = ("a:1", "b:1", "a:2")
    assert Job.of(environ) == Job(2, 3, 1, 2, "TF_CONFIG", "tensorflow", addresses)
    first = tf_config(0, *addresses)
    assert Job.of(first) == Job(0, 3, 0, 2, "TF_CONFIG", "tensorflow", addresses)


def test_tf_config_leaves_the_backend_to_the_user():
    job = Job.of(tf_config("1", "a:1", "b:1") | {"TFPAR_BACKEND": "horovod"})
    assert job is not None and (job.rank, job.backend) == (1, "horovod")


def test_a_launcher_comes_before_tf_config():
    assert place(tf_config(0, "a:1", "b:1") | told("Kubernetes", 1, 2)) == (1, 2, 0, 1)


@pytest.mark.parametrize("text", ["", "{}", '{"cluster": {"worker": ["a:1"]}, "task": {}}'])
def test_a_tf_config_of_less_than_two_workers_is_no_job(text):
    assert Job.of({"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"cluster": 3}', '{"cluster": {"worker": ["a:1", "b:1"]}}']
)
def test_a_tf_config_that_cannot_be_read_is_refused(text):
    with pytest.raises(TfparError, match="TF_CONFIG .* cannot be read"):
        Job.of({"TF_CONFIG": text})


@pytest.mark.parametrize("index", [2, -1])
def test_a_tf_config_of_a_task_that_is_no_worker_is_refused(index):
    with pytest.raises(TfparError, match=f"task {index} of 2 workers"):
        Job.of(tf_config(index, "a:1", "b:1"))
