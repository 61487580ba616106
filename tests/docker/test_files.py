"""The files of docker/ agree with the program, and with each other. No engine is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docker.files import (
    DOCKER,
    DOCKERFILES,
    IMAGES,
    PAGE,
    ROOT,
    options_of,
    text,
    tfpar_runs,
)
from tests.time_limits import time_limit

SCRIPTS = sorted(DOCKER.glob("*.sh"))
SSH_FILES = ("ssh.conf", "sshd.conf")


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


@pytest.mark.parametrize("path", DOCKERFILES.values(), ids=lambda path: path.name)
def test_images_copy_what_there_is(path):
    copied = re.findall(r"^COPY (?!--from)(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    sources = [source for line in copied for source in line.split()[:-1]]
    assert "tfpar" in sources and "docker/install.sh" in sources
    assert [source for source in sources if not (ROOT / source).exists()] == []


def stages(path: Path) -> dict[str, list[str]]:
    """The instructions of each stage of a Dockerfile, in order; "" names one without a name."""
    page = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, list[str]] = {}
    for line in page.replace("\\\n", " ").splitlines():
        if start := re.match(r"FROM (\S+)(?: AS (\w+))?", line):
            found[start[2] or ""] = [line]
        elif found and line.strip():
            found[next(reversed(found))].append(" ".join(line.split()))
    return found


@pytest.mark.parametrize("path", DOCKERFILES.values(), ids=lambda path: path.name)
def test_images_run_as_a_user_and_have_ssh_only_where_it_is_asked_for(path):
    found = stages(path)
    assert list(found) == ["build", "plain", "ssh", ""]
    assert found[""] == ["FROM plain"] and found["ssh"][0] == "FROM plain AS ssh"
    assert "ssh" not in " ".join(found["build"] + found["plain"])
    for name in ("plain", "ssh"):
        users = [line for line in found[name] if line.startswith("USER")]
        assert users[-1] == "USER 1000:1000", name  # a number: Kubernetes asks who it is
    assert any("useradd" in line and "--uid 1000" in line for line in found["plain"])


@pytest.mark.parametrize("path", DOCKERFILES.values(), ids=lambda path: path.name)
def test_images_hold_no_keys(path):
    """Debian's package makes host keys as it is installed: they go in the same layer."""
    (installs,) = (line for line in stages(path)["ssh"] if "openssh-server" in line)
    assert installs.startswith("RUN ") and "rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_h" in installs
    assert "ssh-keygen" not in path.read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh")
def test_a_node_makes_the_key_of_a_job_once_and_knows_hosts_by_it(tmp_path):
    (tmp_path / ".ssh").mkdir()

    def node(*arguments: str) -> str:
        script = [str(DOCKER / "node.sh"), *arguments]
        env = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(
            script, env=env, capture_output=True, text=True, timeout=time_limit(20), check=True
        )
        return done.stdout

    assert node("keys") == node("keys") == ""
    kind, public, _ = (tmp_path / ".ssh/authorized_keys").read_text().split()
    assert node("known-hosts", "[node1]:2222") == f"[node1]:2222 {kind} {public}\n"
    # What an operator has mounted takes its place.
    for name in ("id_ed25519", "id_ed25519.pub"):
        new = name.replace("ed25519", "rsa")
        (tmp_path / ".ssh" / name).rename(tmp_path / ".ssh" / new)
    assert node("keys") == "" and node("known-hosts", "a") == f"a {kind} {public}\n"


def test_ssh_trusts_hosts_by_their_keys():
    page = text("ssh.conf")
    assert "KnownHostsCommand /usr/local/bin/node.sh known-hosts %H" in page
    assert "StrictHostKeyChecking" not in page
    ports = [re.search(r"^\s*Port (\d+)$", text(n), re.MULTILINE)[1] for n in SSH_FILES]
    assert ports == ["2222", "2222"]


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
    build = {"context": "..", "dockerfile": "docker/Dockerfile.cpu", "target": "ssh"}
    assert services["keys"]["build"] == build
    (words,) = tfpar_runs(text("compose.yaml"))
    for entry in options_of(words).hosts.split(","):
        node = services[entry.partition(":")[0]]
        assert node["hostname"] == entry.partition(":")[0]
        assert node["image"] == services["keys"]["image"] in IMAGES
        assert node["volumes"] == services["keys"]["volumes"] == ["ssh:/home/tfpar/.ssh"]
        assert node["depends_on"]["keys"]["condition"] == "service_completed_successfully"


def test_compose_s_schema_has_no_complaint():
    page = str(DOCKER / "compose.yaml")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, page], capture_output=True, text=True, timeout=time_limit(60))
    assert done.returncode == 0, done.stdout
