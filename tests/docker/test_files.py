"""The files of docker/ agree with the program, and with each other. No engine is needed."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.time_limits import time_limit
from tfpar.cli import make_parser

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
IMAGES = {"tfpar:cpu": DOCKER / "Dockerfile.cpu", "tfpar:cuda": DOCKER / "Dockerfile.cuda"}
SCRIPTS = sorted(DOCKER.glob("*.sh"))
PAGE = ROOT / "docs" / "howto" / "run_on_a_cluster.md"


def text(name: str) -> str:
    return (DOCKER / name).read_text(encoding="utf-8")


def options_of(words: list[str]) -> argparse.Namespace:
    """What `tfpar` understands; an unknown option exits."""
    return make_parser().parse_args(words)


def tfpar_runs(page: str) -> list[list[str]]:
    """The words of each `tfpar run` that stands in the text of a file, without `tfpar`."""
    page = page.replace("\\\n", " ")
    lines = re.findall(
        r"^(?:#|exec|.*exec node1|inside \S+ node1)?\s*tfpar (run .*)$", page, re.MULTILINE
    )
    return [line.split("  #")[0].split() for line in lines]


def spec() -> dict:
    job = yaml.safe_load(text("mpijob.yaml"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    return job["spec"]


def container(role: str) -> dict:
    (only,) = spec()["mpiReplicaSpecs"][role]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(path):
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=time_limit(20))
    assert "set -euo pipefail" in path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o111, "not executable"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck_has_no_complaint():
    done = subprocess.run(
        ["shellcheck", *map(str, SCRIPTS)], capture_output=True, text=True, timeout=time_limit(60)
    )
    assert done.returncode == 0, done.stdout


def test_images_are_not_built_where_the_tools_are_missing(tmp_path):
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    script = str(DOCKER / "build_and_train.sh")
    done = subprocess.run(
        [script],
        capture_output=True,
        text=True,
        timeout=time_limit(20),
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode == 0 and not done.stderr
    assert done.stdout == "build_and_train.sh: left out, buildah is not installed\n"


@pytest.mark.parametrize("path", IMAGES.values(), ids=lambda path: path.name)
def test_images_copy_what_there_is(path):
    copied = re.findall(r"^COPY (?!--from)(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    sources = [source for line in copied for source in line.split()[:-1]]
    assert "tfpar" in sources and "docker/install.sh" in sources
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_images_hold_no_keys():
    for path in IMAGES.values():
        page = path.read_text(encoding="utf-8")
        assert (
            "ssh-keygen" not in page and "rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*" in page
        )


def test_the_installed_options_exist():
    (words,) = re.findall(r"install-horovod (.*)$", text("install.sh"), re.MULTILINE)
    choices = re.findall(r"nccl=(--[\w-]+)", text("install.sh"))
    assert choices == ["--no-nccl", "--nccl"]
    commands = [["install-horovod", *words.replace('"$nccl"', c).split()] for c in choices]
    found = [options_of(command) for command in commands]
    assert [(f.mpi, f.nccl) for f in found] == [(False, False), (False, True)]


def test_the_page_shows_the_program_that_the_files_run():
    block, *_ = re.findall(r"^```py\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert block in text("train.py")


@pytest.mark.parametrize(
    "path",
    [
        DOCKER / "compose.yaml",
        DOCKER / "slurm_tfpar_run.sh",
        DOCKER / "check.sh",
        DOCKER / "build_and_train.sh",
        PAGE,
    ],
    ids=lambda path: path.name,
)
def test_runs_use_options_that_there_are(path):
    runs = tfpar_runs(path.read_text(encoding="utf-8"))
    assert runs
    for words in runs:
        program = options_of(words).program
        assert program[0] == "python", words


def test_the_two_nodes_share_keys_made_at_start():
    services = yaml.safe_load(text("compose.yaml"))["services"]
    assert services["keys"]["command"] == ["node.sh", "keys"]
    assert services["keys"]["build"] == {"context": "..", "dockerfile": "docker/Dockerfile.cpu"}
    (words,) = tfpar_runs(text("compose.yaml"))
    for entry in options_of(words).hosts.split(","):
        node = services[entry.partition(":")[0]]
        assert node["hostname"] == entry.partition(":")[0]
        assert node["image"] == services["keys"]["image"] in IMAGES
        assert node["volumes"] == services["keys"]["volumes"] == ["ssh:/root/.ssh"]
        assert node["depends_on"]["keys"]["condition"] == "service_completed_successfully"


def test_compose_s_schema_has_no_complaint():
    page = str(DOCKER / "compose.yaml")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, page], capture_output=True, text=True, timeout=time_limit(60))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("role", ["Launcher", "Worker"])
def test_kubernetes_knows_the_pods_of_the_mpijob(role):
    """The operator's own fields are in no schema of a package; what it makes pods of is."""
    template = spec()["mpiReplicaSpecs"][role]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role.lower()}, **template}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    pod["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePullPolice"):
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_the_mpijob_has_a_gpu_and_a_slot_for_each_rank():
    slots = spec()["slotsPerWorker"]
    workers = spec()["mpiReplicaSpecs"]["Worker"]["replicas"]
    launcher, worker = container("Launcher"), container("Worker")
    found = options_of([*launcher["command"][1:], *launcher["args"]])
    assert found.num_ranks == slots * workers >= found.min_ranks
    assert found.hostfile == "/etc/mpi/hostfile" and found.program == ["python", "train.py"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == slots
    assert launcher["image"] == worker["image"] in IMAGES
    pod = spec()["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > found.grace


def test_workers_of_the_mpijob_serve_ssh():
    assert spec()["sshAuthMountPath"] == "/root/.ssh"
    assert container("Worker")["command"] == ["node.sh"]
    assert container("Worker")["readinessProbe"]["tcpSocket"]["port"] == 22
    (mount,) = container("Worker")["volumeMounts"]
    (volume,) = spec()["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"]
    assert mount == {"name": volume["name"], "mountPath": "/dev/shm"}


@pytest.mark.parametrize("name", ["slurm_srun.sh", "slurm_tfpar_run.sh"])
def test_slurm_gives_each_rank_a_gpu(name):
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text(name), re.MULTILINE))
    # Without tasks per node a rank does not know how many it shares its machine with.
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    last_comment = text(name).rindex("#SBATCH")
    assert text(name).index("set -euo") > last_comment, "Slurm reads no further than a command"


def test_slurm_leaves_ranks_time_to_save():
    (words,) = tfpar_runs(text("slurm_tfpar_run.sh"))
    seconds = int(re.search(r"--signal=B:TERM@(\d+)", text("slurm_tfpar_run.sh"))[1])
    assert options_of(words).grace < seconds
