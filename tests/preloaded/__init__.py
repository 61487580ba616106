"""Python processes that tests start: each is forked from one that has imported TensorFlow before.

To import TensorFlow, Keras and tfpar takes seconds of processor time, to fork milliseconds. So
a *server* (`server`) imports them once and starts nothing of TensorFlow's runtime. The command of a
process is a small program (`client`) that hands its arguments, its environment and its streams
over to the server, which forks a process that runs what Python would run; the client stays, passes
signals on, and ends as that process does. `commands` makes such commands and starts the servers.

What is tested of a start itself (what is imported, what Python says on the way) wants a fresh
interpreter: `sys.executable`.
"""

from tests.preloaded.commands import executable, python, ranks

__all__ = ["executable", "python", "ranks"]
