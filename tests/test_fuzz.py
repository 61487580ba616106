"""Whatever a file says and whatever a call is given, it works or it is an error of tfpar."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Sequence

import pytest

import tfpar as tap
from scripts.fuzzing import calls
from scripts.fuzzing.kinds import KINDS
from tests import preloaded
from tests.cases import amounts
from tests.time_limits import time_limit

SLOW = ("calls", "command")
"""Those that build models."""

_SECONDS_A_CASE = 0.5


def assert_no_faults(kinds: Sequence[str], cases: int) -> None:
    command = preloaded.python("-m", "scripts.fuzz", *kinds, "--cases", cases)
    limit = time_limit(60 + _SECONDS_A_CASE * cases * len(kinds))
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in kinds:
        (line,) = (text for text in done.stdout.splitlines() if text.startswith(f"{kind}: "))
        assert ", 0 faults" in line


@pytest.mark.slow
@pytest.mark.parametrize("cases", amounts(40, 2000))
@pytest.mark.parametrize("kind", SLOW)
def test_odd_options_work_or_are_refused(kind, cases):
    assert_no_faults([kind], cases)


@pytest.mark.slow
@pytest.mark.parametrize("cases", amounts(40, 2000))
def test_mutated_files_work_or_are_refused(cases):
    assert_no_faults([kind for kind in KINDS if kind not in SLOW], cases)


def test_every_public_call_is_tried():
    tried = set(re.findall(r"\btap\.(\w+)", inspect.getsource(calls)))
    assert set(tap.__all__) - tried == set(calls.NOT_TRIED)
