"""Progress: shown where users look, also of work that tells nothing; by few enough lines."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
import types

import pytest

from tests.time_limits import wait_until
from tfpar import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def quick(monkeypatch):
    """Whatever takes a moment is worth a line."""
    monkeypatch.setattr(progress, "BEAT_S", 0.01)
    for display in (progress.Terminal, progress.LogDisplay, progress.Notebook):
        monkeypatch.setattr(display, "quiet_s", 0.0)
        monkeypatch.setattr(display, "every_s", 0.05)


def stderr(monkeypatch, stream=None) -> io.StringIO:
    stream = stream or io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def wait_for(found) -> None:
    assert wait_until(found, 10), "nothing is shown"


def test_work_that_tells_nothing_is_shown_while_it_lasts(monkeypatch, quick):
    shown = stderr(monkeypatch)
    with progress.reporting("compiling the train step"):
        wait_for(lambda: shown.getvalue().count("\n") >= 2)
        assert "tfpar progress" in {thread.name for thread in threading.enumerate()}
    lines = shown.getvalue().splitlines()
    assert all(line.startswith("tfpar: compiling the train step: ") for line in lines)
    assert "tfpar progress" not in {thread.name for thread in threading.enumerate()}


def test_nothing_is_shown_of_what_is_quick(monkeypatch):
    monkeypatch.setattr(progress, "BEAT_S", 0.01)
    shown = stderr(monkeypatch)
    with progress.reporting("compiling the train step") as report:
        report.tell("begun")
        time.sleep(0.1)
    assert shown.getvalue() == ""


def test_whoever_is_not_to_tell_starts_no_thread(monkeypatch, quick):
    shown = stderr(monkeypatch, Terminal())
    with progress.reporting("compiling the train step", wanted=False) as report:
        report.tell("begun")
        report.note("a line")
        assert "tfpar progress" not in {thread.name for thread in threading.enumerate()}
    assert shown.getvalue() == ""


def test_the_thread_ends_with_work_that_fails(monkeypatch, quick):
    stderr(monkeypatch)
    with pytest.raises(KeyboardInterrupt), progress.reporting("searching a plan"):
        raise KeyboardInterrupt
    assert "tfpar progress" not in {thread.name for thread in threading.enumerate()}


# --- notebooks --------------------------------------------------------------------------


class Shell:
    """What a kernel has; IPython itself need not be installed."""


Shell.__name__ = "ZMQInteractiveShell"


@pytest.fixture
def cell(monkeypatch):
    """What a notebook shows below the cell: each text that was there."""
    shown: list[str] = []

    class Handle:
        def update(self, data, raw):
            assert raw
            assert (data["text/html"] == "") == (data["text/plain"] == "")
            shown.append(data["text/plain"])

    def display(data, raw, display_id):
        assert raw and display_id and not shown, "one line, which is written anew"
        assert data["text/html"] == f"<progress></progress> {data['text/plain']}"
        shown.append(data["text/plain"])
        return Handle()

    module = types.ModuleType("IPython")
    module.get_ipython = Shell
    monkeypatch.setitem(sys.modules, "IPython", module)
    shows = types.ModuleType("IPython.display")
    shows.display = display
    monkeypatch.setitem(sys.modules, "IPython.display", shows)
    return shown


def test_a_notebook_has_one_line_that_is_gone_afterwards(monkeypatch, quick, cell):
    text = stderr(monkeypatch)
    with progress.reporting("searching a plan") as report:
        report.note("no cached plan")
        for count in range(3):
            lines = len(cell)
            wait_for(lambda lines=lines: len(cell) > lines)
            report.priced("data=2", count)
    assert cell[-1] == "" and all(line.startswith("searching a plan: ") for line in cell[:-1])
    assert text.getvalue() == "tfpar: no cached plan\n"


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch, quick, cell):
    sys.modules["IPython"].get_ipython = lambda: object()
    text = stderr(monkeypatch)
    with progress.reporting("searching a plan"):
        wait_for(text.getvalue)
    assert not cell and text.getvalue().startswith("tfpar: searching a plan: ")


# --- lines that stay --------------------------------------------------------------------


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_note_stays(monkeypatch, quick, stream):
    text = stderr(monkeypatch, stream())
    monkeypatch.setenv("TERM", "xterm")
    long = "no cached plan: of 3 in [plans] " + "x" * 300
    with progress.reporting("searching a plan") as report:
        report.note(long)
        report.note("")
        wait_for(lambda: "searching a plan" in text.getvalue())
        report.tell("begun")
        report.note("another")
    assert f"tfpar: {long}\n" in text.getvalue() and "tfpar: another" in text.getvalue()


def test_a_note_is_logged_where_the_log_shows_such_lines(monkeypatch, caplog):
    text = stderr(monkeypatch)
    with caplog.at_level(logging.INFO, "tfpar"), progress.reporting("searching a plan") as report:
        report.note("no cached plan")
    assert caplog.messages == ["no cached plan"] and text.getvalue() == ""
