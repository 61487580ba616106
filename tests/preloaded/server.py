"""Imports what tests need and forks a process for each client.

`python -m tests.preloaded.server FD`, where FD is a listening socket. The server ends, and with it
every process that it has forked, when its standard input does. It has one thread, and starts
nothing of TensorFlow's runtime, so that forking it is safe; the collector does not look at what it
has imported (`gc.freeze`), so that its memory stays shared.
"""

import gc

gc.disable()  # almost nothing that is imported is garbage

import atexit  # noqa: E402
import contextlib  # noqa: E402
import importlib  # noqa: E402
import importlib.util  # noqa: E402
import marshal  # noqa: E402
import os  # noqa: E402
import pkgutil  # noqa: E402
import runpy  # noqa: E402
import selectors  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import struct  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import types  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import NoReturn  # noqa: E402

SETTLED = ("TF_", "KERAS_", "XLA_", "PYTHON", "LD_", "OMP_", "MKL_", "MALLOC_")
"""Beginnings of variables that are read while modules are imported, or by Python as it starts."""
TAKEN_OVER = ("PYTHONPATH", "PYTHONUNBUFFERED")
"""Those of them that a forked process heeds itself."""
_OF_HOROVOD = ("backends.horovod", "distributed.rendezvous", "launch.rendezvous_server")
OWN_INTERPRETER = -(1 << 31)
MARK = b"TFPAR_TEST_MARK"
_HELLO_S = 60.0


@dataclass(frozen=True)
class Asked:
    """What a client wants to be run.

    Attributes:
        arguments: of Python.
        folder: to run in.
        environ: all of it.
        ignored: signals.
        imports: modules that this server should have.
        streams: descriptors of the standard streams.
    """

    arguments: list[str]
    folder: str
    environ: dict[bytes, bytes]
    ignored: list[int]
    imports: list[str]
    streams: list[int]


def preload() -> None:
    """Import TensorFlow, Keras, Horovod and all of tfpar, and start nothing."""
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # slow, and for none
    import keras  # noqa: F401
    from tensorflow.python.eager import context

    import tfpar

    for module in pkgutil.walk_packages(tfpar.__path__, "tfpar."):
        horovod = module.name.endswith(_OF_HOROVOD)
        if not module.name.endswith("__main__") and (not horovod or _horovod()):
            importlib.import_module(module.name)
    assert context.context_safe() is None, "TensorFlow's runtime has started"
    assert len(os.listdir("/proc/self/task")) == 1, "something imported has started a thread"


def _horovod() -> bool:
    return importlib.util.find_spec("horovod") is not None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What is written meanwhile goes nowhere, and afterwards neither, unless there was an error."""
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    os.close(null)
    try:
        yield
    except BaseException:
        os.dup2(kept, 2)
        raise
    finally:
        os.close(kept)


class Server:
    """Serves clients until standard input ends; in a forked process `serve` returns its task."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._events = selectors.DefaultSelector()
        self._environ = settled({os.fsencode(k): os.fsencode(v) for k, v in os.environ.items()})
        self._children: dict[int, socket.socket] = {}

    def serve(self) -> Asked:
        self._events.register(0, selectors.EVENT_READ, self._end)
        self._events.register(self._listening, selectors.EVENT_READ, self._accept)
        while True:
            for key, _ in self._events.select():
                if (asked := key.data(key.fileobj)) is not None:
                    self._close()
                    return asked

    def _end(self, _: object) -> None:
        for child in self._children:
            kill(child, signal.SIGKILL)
        for child in self._children:
            os.waitpid(child, 0)
        os._exit(0)

    def _close(self) -> None:
        """Let go of what is the server's alone, in a process that it has forked."""
        self._events.close()
        for connection in (self._listening, *self._children.values()):
            connection.close()

    def _accept(self, _: object) -> Asked | None:
        """Fork for a new client; its task in the forked process, None in this one."""
        connection, _ = self._listening.accept()
        connection.settimeout(_HELLO_S)
        try:
            asked = receive(connection)
        except (OSError, EOFError):  # it was killed, for one
            connection.close()
            return None
        if settled(asked.environ) != self._environ:
            connection.sendall(struct.pack("i", OWN_INTERPRETER))
            connection.close()
        else:
            for name in asked.imports:
                with contextlib.suppress(ImportError):  # the program is told when it tries
                    importlib.import_module(name)
            gc.freeze()
            child = os.fork()
            if child == 0:
                connection.close()
                return asked
            self._watch(child, connection)
        for descriptor in asked.streams:
            os.close(descriptor)
        return None

    def _watch(self, child: int, connection: socket.socket) -> None:
        def forward(_: object) -> None:
            """Bytes are signals for the child; without its client it ends."""
            if child not in self._children:  # it has ended at the same moment
                return
            try:
                numbers = connection.recv(16)
            except OSError:
                numbers = b""
            for number in numbers or [signal.SIGKILL]:
                kill(child, number)
            if not numbers:
                self._events.unregister(connection)

        def ended(descriptor: int) -> None:
            self._events.unregister(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(child, 0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what it has left in its group
            del self._children[child]
            if connection in self._events.get_map():
                self._events.unregister(connection)
            with connection, contextlib.suppress(OSError):
                connection.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))

        self._children[child] = connection
        self._events.register(connection, selectors.EVENT_READ, forward)
        self._events.register(os.pidfd_open(child), selectors.EVENT_READ, ended)


def receive(connection: socket.socket) -> Asked:
    """What a client says, who may end meanwhile.

    Raises:
        EOFError: it has ended.
    """
    head, streams, _, _ = socket.recv_fds(connection, 4, 3)
    said, data = b"", head if len(head) == 4 else b""
    left = struct.unpack("I", head)[0] if data else 0
    while data and left:
        data = connection.recv(left)
        said, left = said + data, left - len(data)
    if not data:
        for descriptor in streams:
            os.close(descriptor)
        raise EOFError
    return Asked(*marshal.loads(said), streams)


def settled(environ: dict[bytes, bytes]) -> dict[str, bytes]:
    """The variables that have to be as they were when this server started."""
    named = {os.fsdecode(name): value for name, value in environ.items()}
    return {n: v for n, v in named.items() if n.startswith(SETTLED) and n not in TAKEN_OVER}


def kill(child: int, number: int) -> None:
    """Send a child, which is not yet waited for, and its group a signal."""
    try:
        os.killpg(child, number)
    except ProcessLookupError:  # it was forked just now, and has no group yet
        os.kill(child, number)


def become(asked: Asked) -> None:
    """Make this process, which was forked, what its client stands for."""
    import numpy as np

    os.setsid()
    for target, descriptor in enumerate(asked.streams):
        os.dup2(descriptor, target)
    os.closerange(3, 4096)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in asked.ignored:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(asked.folder)
    os.environb.clear()
    os.environb.update(asked.environ)
    if MARK in asked.environ:  # by which tests find their processes; as long as a name may be
        with open("/proc/self/comm", "wb") as name:
            name.write(asked.environ[MARK][:15])
    sys.stdout.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    np.random.seed()  # as each interpreter draws numbers of its own
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def run(arguments: list[str], base: list[str]) -> None:
    """What Python does with these arguments; `base` is the path without that of programs."""
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, rest = arguments[0], arguments[1:]
    if kind == "-m":
        sys.argv, sys.path[:] = rest, [os.getcwd(), *added, *base]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[:] = ["-c", *rest[1:]], ["", *added, *base]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    else:
        sys.argv, sys.path[:] = arguments, [os.path.dirname(os.path.abspath(kind)), *added, *base]
        runpy.run_path(kind, run_name="__main__")


def exit_code(program: Callable[[], None]) -> int:
    """Run a program to its end, of which Python says what it says; below 0 it is a signal."""
    try:
        program()
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return (left.code or 0) & 0xFF
        print(left.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(code: int) -> NoReturn:
    """End as an interpreter does, but leave the memory to the system.

    To take apart all that was imported would copy most of what is shared with the server: that is
    a hundred times the work of forking.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for who tests, who ends this
    own = os.environ["PYTHONPATH"].split(os.pathsep)
    base = [path for path in sys.path[1:] if path not in own]
    with quiet():  # TensorFlow tells who imports it of its build
        preload()
    asked = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    become(asked)
    code = exit_code(lambda: run(asked.arguments, base))
    end(code)


if __name__ == "__main__":
    main()
