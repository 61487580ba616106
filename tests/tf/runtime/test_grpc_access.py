"""Whom the server of a rank over TensorFlow's own collectives lets in."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from tfpar.spec import TfparError
from tfpar.tf.distributed.job import Job
from tfpar.tf.runtime.backends import grpc_access
from tfpar.tf.runtime.backends.grpc_access import PeerFilter, choose_filter

HERE = Job(0, 2, addresses=("127.0.0.1:1", "localhost:2"))
FAR = Job(0, 2, addresses=("198.51.100.1:1", "198.51.100.2:1"), launcher="Kubernetes")
SILENT_S = 0.2


@pytest.fixture
def listening():
    """A socket that listens on all addresses, of both versions, as TensorFlow's does."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as made:
        yield made


def own_address() -> str:
    """The one that packets for other machines come from; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        try:
            datagrams.connect((FAR.addresses[0].partition(":")[0], 1))
        except OSError:
            pytest.skip("this machine has no address but the loopback's")
        return datagrams.getsockname()[0]


def connected(address: str, listening: socket.socket) -> bool:
    """Whether a connection comes about; from an address of its own a machine takes that one."""
    try:
        with socket.create_connection((address, listening.getsockname()[1]), timeout=SILENT_S):
            return True
    except TimeoutError:
        return False


def test_a_filter_passes_its_peers_and_the_loopback_alone(listening):
    own, port = own_address(), listening.getsockname()[1]
    assert connected(own, listening)
    others = [ipaddress.ip_address(a) for a in ("198.51.100.1", "2001:db8::1", "2001:db8::2")]
    PeerFilter(others).attach(port)
    assert not connected(own, listening)
    assert connected("127.0.0.1", listening) and connected("::1", listening)
    PeerFilter([*others, ipaddress.ip_address(own)]).attach(port)
    assert connected(own, listening) and connected("127.0.0.1", listening)


def test_who_was_connected_before_is_heard_no_longer(listening):
    with socket.create_connection((own_address(), listening.getsockname()[1])) as stranger:
        accepted, _ = listening.accept()
        with accepted:
            PeerFilter([]).attach(listening.getsockname()[1])
            stranger.sendall(b"run this")
            accepted.settimeout(SILENT_S)
            with pytest.raises(TimeoutError):
                accepted.recv(1)


def test_a_filter_wants_something_that_listens():
    with pytest.raises(OSError, match="listens at port 1"):
        PeerFilter([]).attach(1)


def test_more_peers_than_the_kernel_takes_are_refused_by_it():
    many = [ipaddress.ip_address(i) for i in range(5000)]
    with pytest.raises(OSError, match=r"."):
        PeerFilter(many)


def never() -> None:
    raise AssertionError("no other rank is waited for")


def test_on_one_machine_no_rank_is_waited_for():
    assert choose_filter(HERE, never, {}) is not None


def test_a_filter_that_cannot_be_had_is_said_on_one_machine_and_an_error_across(
    monkeypatch, caplog
):
    def refuse(peers):
        raise OSError("no filters here")

    monkeypatch.setattr(grpc_access, "PeerFilter", refuse)
    assert choose_filter(HERE, never, {}) is None
    assert "no filters here" in caplog.text and "read and write files" in caplog.text
    with pytest.raises(TfparError, match="no filters here.*--backend horovod.*--insecure-grpc"):
        choose_filter(FAR, lambda: ["198.51.100.1"], {})


def test_a_launcher_that_does_not_know_the_peers_needs_the_users_consent():
    with pytest.raises(TfparError, match="Kubernetes does not say.*horovod.*--insecure-grpc"):
        choose_filter(FAR, lambda: None, {})
    assert choose_filter(FAR, never, {"TFPAR_INSECURE_GRPC": "1"}) is None
    with pytest.raises(TfparError):
        choose_filter(FAR, lambda: None, {"TFPAR_INSECURE_GRPC": "0"})
