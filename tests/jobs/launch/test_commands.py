"""What ranks are told, and the command lines that start them."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tfpar.jobs.launch import RunOptions
from tfpar.jobs.launch import environment as names
from tfpar.jobs.launch.command import exporting, mpirun_command, ssh_command
from tfpar.jobs.launch.environment import (
    AttemptEnvironment,
    Rendezvous,
    exported_environment,
    rank_environment,
)
from tfpar.jobs.launch.host_network import (
    LOOPBACK,
    find_network,
    free_ports,
    is_local,
    sources_towards,
)
from tfpar.jobs.launch.hosts import Host, allocate
from tfpar.spec import TfparError

SLOTS = allocate([Host("a", 2), Host("b", 1)], 3)
SHARED = AttemptEnvironment(
    backend="horovod",
    timeout_s=100,
    grace_s=7,
    start_timeout_s=20,
    supervisor="10.0.0.1:5",
    token="secret",
    attempt=2,
    addresses=("a:1", "a:2", "b:3"),
    interface="eth7",
    rendezvous=Rendezvous("10.0.0.1", 6, "open-sesame"),
)


def test_a_rank_is_told_its_place_and_how_to_reach_the_others():
    told = rank_environment({"HOME": "/h"}, SLOTS[2], SHARED)
    assert told["HOME"] == "/h"
    assert {name: told[name] for name in told if name.startswith("TFPAR_")} == {
        "TFPAR_RANK": "2",
        "TFPAR_SIZE": "3",
        "TFPAR_LOCAL_RANK": "0",
        "TFPAR_LOCAL_SIZE": "1",
        "TFPAR_BACKEND": "horovod",
        "TFPAR_TIMEOUT": "100",
        "TFPAR_GRACE": "7",
        "TFPAR_SUPERVISOR": "10.0.0.1:5",
        "TFPAR_TOKEN": "secret",
        "TFPAR_ATTEMPT": "2",
        "TFPAR_ADDRESSES": "a:1,a:2,b:3",
    }
    assert told["PYTHONUNBUFFERED"] == "1" and told["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_horovod_is_told_what_its_own_launcher_tells():
    told = rank_environment({}, SLOTS[2], SHARED)
    assert {name[8:]: told[name] for name in told if name.startswith("HOROVOD_")} == {
        "RANK": "2",
        "SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_SIZE": "1",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "HOSTNAME": "b",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": "eth7",
        "GLOO_RENDEZVOUS_ADDR": "10.0.0.1:6/open-sesame",
        "GLOO_RENDEZVOUS_PORT": "6",
        "GLOO_TIMEOUT_SECONDS": "100",
        "STALL_CHECK_TIME_SECONDS": "20",
        "STALL_SHUTDOWN_TIME_SECONDS": "110",
    }


def test_consent_to_open_servers_is_told():
    told = rank_environment({}, SLOTS[0], replace(SHARED, insecure_grpc=True))
    assert told["TFPAR_INSECURE_GRPC"] == "1"


def test_the_users_own_waits_stay():
    own = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    told = rank_environment(own, SLOTS[0], SHARED)
    assert {name: told[name] for name in own} == own


def test_on_one_machine_nccl_listens_on_the_loopback():
    told = {
        interface: rank_environment({}, SLOTS[0], replace(SHARED, interface=interface))
        for interface in ("lo", "eth7")
    }
    assert told["lo"]["NCCL_SOCKET_IFNAME"] == "=lo" and "NCCL_SOCKET_IFNAME" not in told["eth7"]


def test_a_backend_that_nobody_named_is_not_told():
    shared = AttemptEnvironment(None, 1, 1, 1, "a:1", "t", 0, ("a:1",), "lo", None)
    told = rank_environment({}, SLOTS[0], shared)
    assert names.BACKEND not in told and "HOROVOD_RANK" not in told


def test_only_what_concerns_a_rank_goes_to_other_machines():
    variables = {
        "TF_X": "1",
        "KERAS_BACKEND": "t",
        "PYTHONPATH": "p",
        "PATH": "q",
        "SSH_AGENT_PID": "1",
        "AWS_SECRET": "s",
        "MINE": "2",
        "TF_ODD()": "no shell's",
    }
    sent = exported_environment(variables, {"MINE": "2"})
    assert list(sent) == ["TF_X", "KERAS_BACKEND", "PYTHONPATH", "PATH", "MINE"]


def test_ssh_gets_its_options():
    options = RunOptions(command=("x",), ssh_port=2222, ssh_identity_file="/k", start_timeout_s=9)
    line = ssh_command("me@h", ("train",), "/dir", options)
    assert line[0] == "ssh" and "BatchMode=yes" in line and "ConnectTimeout=9" in line
    assert line[line.index("-p") + 1] == "2222" and line[line.index("-i") + 1] == "/k"
    assert "StrictHostKeyChecking" not in " ".join(line)  # as the user's ssh has it
    assert line[-2] == "me@h" and line[-1].startswith("cd /dir && exec sh ")


def test_what_ssh_runs_is_quoted_and_its_variables_are_on_no_command_line(tmp_path):
    folder = tmp_path / "it's $HOME; a folder"
    folder.mkdir()
    odd = "a 'b' \"c\" $PATH `id` \\ \\n \\c ; é\n  two\t$(id)\r\\"
    variables = {"PATH": os.environ["PATH"], "EMPTY": "", "ODD": odd}
    command = ("sh", "-c", 'pwd; printf "%s|" "$ODD" "$EMPTY" "$@"', "-", "x y", "*", "$1")
    line = ssh_command("h", command, str(folder), RunOptions(command=command))[-1]
    with subprocess.Popen(
        ["sh", "-c", line],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as started:
        assert "\n" not in exporting(variables)
        started.stdin.write(f"{exporting(variables)}\n".encode())
        started.stdin.flush()
        said = started.stdout.read().decode()
    assert said == f"{folder}\n{odd}||x y|*|$1|"


def test_a_variable_that_no_shell_knows_is_refused():
    with pytest.raises(TfparError, match="'a.b;id' .*--env"):
        exporting({"a.b;id": "1"})


def test_mpirun_gets_hosts_variables_and_ssh_options():
    options = RunOptions(
        command=("python", "train.py"), mpi=True, ssh_port=7, network_interface="eth1"
    )
    line = mpirun_command([Host("a", 2), Host("b", 0), Host("c", 1)], 3, ["TF_X", "PATH"], options)
    text = shlex.join(line)
    assert text.startswith("mpirun ") and text.endswith("-x PATH -x TF_X python train.py")
    assert "-np 3 -H a:2,c:1 " in text and "plm_rsh_args '-p 7'" in text
    assert "btl_tcp_if_include eth1" in text
    assert ("--allow-run-as-root" in line) == (os.geteuid() == 0)


def test_this_machine_is_known_by_its_names_and_addresses():
    assert is_local("localhost") and is_local("127.0.0.1") and is_local(os.uname().nodename)
    assert not is_local("198.51.100.7") and not is_local("no-such-host.invalid")


def test_ranks_on_one_machine_talk_over_the_loopback():
    network = find_network(["localhost", "127.0.0.1"], None)
    assert network.address == LOOPBACK
    assert Path(f"/sys/class/net/{network.interface}").exists()
    assert find_network(["no-such-host.invalid"], network.interface) == network


def test_an_unknown_interface_is_refused_with_those_there_are():
    with pytest.raises(TfparError, match="'nope0'.*127.0.0.1"):
        find_network(["localhost"], "nope0")


def test_an_address_of_this_machine_leads_to_itself():
    found = sources_towards(["127.0.0.1", "localhost", "no-such-host.invalid"])
    assert {"127.0.0.1"} <= found <= {"127.0.0.1", "::1"}


def test_free_ports_differ():
    assert len(set(free_ports(20))) == 20
