"""Stands for a Python process that a server forks: `python -I -S client.py ADDRESSES IMPORTS ...`.

It imports next to nothing, so that it starts in milliseconds.
"""

import _signal
import _socket
import marshal
import os
import resource
import struct
import sys

SIGNALS = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGTERM, _signal.SIGUSR1)
OWN_INTERPRETER = -(1 << 31)  # what a server answers that does not fit


def main() -> None:
    addresses, imports, *arguments = sys.argv[1:]
    rank = os.environ.get("TFPAR_RANK") or os.environ.get("HOROVOD_RANK") or "0"
    names = addresses.split(",")
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(f"\0{names[int(rank) % len(names)]}")
    ignored = [n for n in SIGNALS if _signal.getsignal(n) == _signal.SIG_IGN]
    for number in set(SIGNALS) - set(ignored):
        _signal.signal(number, lambda n, _: connection.send(bytes([n])))
    wanted = [name for name in imports.split(",") if name]
    asked = marshal.dumps((arguments, os.getcwd(), dict(os.environb), ignored, wanted))
    streams = struct.pack("3i", 0, 1, 2)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)]
    connection.sendmsg([struct.pack("I", len(asked))], rights)
    sent = 0
    while sent < len(asked):
        sent += connection.send(asked[sent:])
    answer = connection.recv(4)
    if len(answer) < 4:
        sys.exit("the preloaded interpreter has ended")
    (code,) = struct.unpack("i", answer)
    if code == OWN_INTERPRETER:
        for number in set(SIGNALS) - set(ignored):
            _signal.signal(number, _signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, *arguments])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (_signal.SIGKILL, _signal.SIGSTOP):
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
