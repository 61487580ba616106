"""The manifests: they fit their schemas, give each rank a GPU and a slot, and need no root."""

from __future__ import annotations

import copy
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from tests.docker.files import DOCKER, IMAGES, options_of
from tests.time_limits import time_limit

KINDS = {
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


def manifests(name: str) -> dict[str, dict[str, Any]]:
    """What a file describes, by kind."""
    pages = yaml.safe_load_all((DOCKER / name).read_text(encoding="utf-8"))
    return {page["kind"]: page for page in pages}


MPI = manifests("mpijob.yaml")["MPIJob"]
TRAIN = manifests("trainjob.yaml")
INDEXED = manifests("indexed_job.yaml")


def trainer_jobs() -> dict[str, dict[str, Any]]:
    jobs = TRAIN["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"] for job in jobs}


PODS = {
    **{f"MPIJob {r}": s["template"]["spec"] for r, s in MPI["spec"]["mpiReplicaSpecs"].items()},
    **{f"TrainJob {name}": job["template"]["spec"] for name, job in trainer_jobs().items()},
    "Job": INDEXED["Job"]["spec"]["template"]["spec"],
}
"""The specs of all pods."""

each_pod = pytest.mark.parametrize("name", PODS)


def container(name: str) -> dict[str, Any]:
    (only,) = PODS[name]["containers"]
    return only


def fits(manifest: dict[str, Any]) -> bool:
    """Whether Trainer's API has all that a manifest says: what it does not know, it leaves out."""
    return KINDS[manifest["kind"]].from_dict(manifest).to_dict() == manifest


def validate(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@each_pod
def test_kubernetes_knows_the_pods(name):
    """The MPI operator's own fields are in no schema of a package; what it makes pods of is."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
    validate({**pod, "spec": PODS[name]})
    odd = copy.deepcopy(PODS[name])
    odd["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePullPolice"):
        validate({**pod, "spec": odd})


@pytest.mark.parametrize("kind", TRAIN)
def test_trainer_knows_its_kinds(kind):
    assert TRAIN[kind]["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert fits(TRAIN[kind])
    odd = copy.deepcopy(TRAIN[kind])
    (odd["spec"].get("mlPolicy", {}).get("mpi") or odd["spec"]["trainer"])["numProcPerNodes"] = 2
    assert not fits(odd)


def test_the_runtime_may_be_one_of_the_cluster():
    assert fits({**TRAIN["TrainingRuntime"], "kind": "ClusterTrainingRuntime"})


def test_trainer_s_jobs_are_jobs():
    for job in trainer_jobs().values():
        validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": job}
        )


def test_kubernetes_knows_the_indexed_job():
    for manifest in INDEXED.values():
        validate(manifest)


@each_pod
def test_pods_run_as_the_user_of_the_images(name):
    user = PODS[name]["securityContext"]
    assert user["runAsNonRoot"] and user["runAsUser"] == user["fsGroup"] == 1000
    confined = container(name)["securityContext"]
    assert confined == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container(name)["image"] in IMAGES


@each_pod
def test_pods_with_ranks_share_memory(name):
    if name == "MPIJob Launcher":
        return
    mounts = {mount["name"]: mount["mountPath"] for mount in container(name)["volumeMounts"]}
    assert mounts["shared-memory"] == "/dev/shm"
    (volume,) = (v for v in PODS[name]["volumes"] if v["name"] == "shared-memory")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert int(container(name)["resources"]["limits"]["memory"].removesuffix("Gi")) > 2


def test_the_mpijob_has_a_gpu_and_a_slot_for_each_rank():
    assert (MPI["apiVersion"], MPI["spec"]["sshAuthMountPath"]) == (
        "kubeflow.org/v2beta1",
        "/home/tfpar/.ssh",
    )
    slots = MPI["spec"]["slotsPerWorker"]
    workers = MPI["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    launcher, worker = container("MPIJob Launcher"), container("MPIJob Worker")
    check_run([*launcher["command"], *launcher["args"]], slots * workers, "MPIJob Launcher")
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == slots
    check_node(worker)


def test_the_trainjob_has_a_gpu_and_a_slot_for_each_rank():
    policy = TRAIN["TrainingRuntime"]["spec"]["mlPolicy"]
    job, reference = TRAIN["TrainJob"]["spec"]["trainer"], TRAIN["TrainJob"]["spec"]["runtimeRef"]
    assert reference["name"] == TRAIN["TrainingRuntime"]["metadata"]["name"]
    assert reference["kind"] == "TrainingRuntime"
    assert policy["mpi"]["sshAuthMountPath"] == "/home/tfpar/.ssh"
    # Hosts are listed as Open MPI has them, and the launcher is one of them.
    assert policy["mpi"]["mpiImplementation"] == "OpenMPI" and policy["mpi"]["runLauncherAsNode"]
    assert (job["numNodes"], job["numProcPerNode"]) == (
        policy["numNodes"],
        policy["mpi"]["numProcPerNode"],
    )
    launcher, node = container("TrainJob launcher"), container("TrainJob node")
    ranks = job["numNodes"] * job["numProcPerNode"]
    check_run([*job["command"], *job["args"]], ranks, "TrainJob launcher")
    for each in (launcher, node):
        assert each["name"] == "node", "the container that gets the keys"
        assert each["resources"]["limits"]["nvidia.com/gpu"] == job["numProcPerNode"]
    check_node(node)


def check_run(words: list[str], ranks: int, launcher: str) -> None:
    assert words[0] == "tfpar"
    found = options_of(words[1:])
    assert found.num_ranks == ranks >= found.min_ranks
    assert found.hostfile == "/etc/mpi/hostfile" and found.program == ["python", "train.py"]
    assert PODS[launcher]["terminationGracePeriodSeconds"] > found.grace


def check_node(node: dict[str, Any]) -> None:
    assert node["command"] == ["node.sh"] and node["image"].endswith("-ssh")
    assert node["readinessProbe"]["tcpSocket"]["port"] == 2222


def test_ranks_of_the_indexed_job_know_their_place():
    spec = INDEXED["Job"]["spec"]
    told = {entry["name"]: entry.get("value") for entry in container("Job")["env"]}
    assert told["TFPAR_SIZE"] == str(spec["completions"]) == str(spec["parallelism"])
    service, job = INDEXED["Service"], INDEXED["Job"]["metadata"]["name"]
    assert told["MASTER_ADDR"] == f"{job}-0.{service['metadata']['name']}"
    assert PODS["Job"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job}
    assert "TFPAR_TOKEN" in told and not container("Job")["image"].endswith("-ssh")


def test_a_rank_is_started_by_its_first_step_and_alive_while_it_takes_more(tmp_path):
    """The probes are run: without the file, with a fresh one, and with an old one."""
    told = {entry["name"]: entry.get("value") for entry in container("Job")["env"]}
    file = Path(told["TFPAR_HEARTBEAT"])

    def passes(probe: str) -> bool:
        words = container("Job")[probe]["exec"]["command"]
        here = [word.replace(str(file), str(tmp_path / "heartbeat")) for word in words]
        assert here != words
        return not subprocess.run(
            here, stderr=subprocess.DEVNULL, timeout=time_limit(20)
        ).returncode

    assert not passes("startupProbe") and not passes("livenessProbe")
    (tmp_path / "heartbeat").touch()
    assert passes("startupProbe") and passes("livenessProbe")
    old = time.time() - 3600
    os.utime(tmp_path / "heartbeat", (old, old))
    assert not passes("livenessProbe")
