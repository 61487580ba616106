"""Access control of a rank's TensorFlow server, which carries TensorFlow's own collectives.

TensorFlow's server asks nobody who he is: whoever reaches it runs graphs here, which read and write
files. So only the hosts of the job do (`peer_filter`), or the user has agreed to more.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Callable, Collection, Mapping

from tfpar.jobs.launch import environment as names
from tfpar.jobs.launch.host_network import is_local, is_loopback, sources_towards
from tfpar.spec import TfparError
from tfpar.tf.distributed.job import Job
from tfpar.tf.runtime.backends.peer_filter import PeerFilter

logger = logging.getLogger("tfpar")

_RISK = (
    "TensorFlow's server has no password: every host that reaches it could read and write files "
    "here with your rights"
)
_WAYS_OUT = (
    "Use --backend horovod (`tfpar install-horovod` builds it); or, in a network that nobody else "
    f"reaches, agree to the risk with --insecure-grpc ({names.INSECURE_GRPC}=1)."
)


def choose_filter(
    job: Job,
    told: Callable[[], Collection[str] | None],
    environ: Mapping[str, str] = os.environ,
) -> PeerFilter | None:
    """A filter that lets in the hosts of the job; None to let in everybody.

    Args:
        told: the addresses from which the ranks connect, as their launcher knows them; it may wait
            for all ranks. None without such a launcher.

    Raises:
        TfparError: the job's hosts cannot be told from others, and the user has not agreed to that.
    """
    if environ.get(names.INSECURE_GRPC, "0") not in ("", "0"):
        return None
    hosts = {address.rpartition(":")[0].strip("[]") for address in job.addresses}
    here = all(is_loopback(host) or is_local(host) for host in hosts)
    peers = sources_towards(hosts) if here else told()
    if peers is None:
        raise TfparError(
            f"{_RISK}, and {job.launcher} does not say from which addresses the ranks of the other "
            f"machines come, as `tfpar run` does. {_WAYS_OUT}"
        )
    try:
        return PeerFilter({ipaddress.ip_address(peer) for peer in peers})
    except OSError as error:
        why = f"{_RISK}; Linux, which could keep all but the job's out, refuses to: {error}"
        if not here:
            raise TfparError(f"{why}. {_WAYS_OUT}") from error
        if job.rank == 0:
            logger.warning("%s. See docs/security.md.", why)
        return None
