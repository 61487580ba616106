"""The baselines written by hand compute what plain Keras computes."""

import importlib.util

import pytest

from benchmarks.by_hand import launch
from tests.time_limits import time_limit

SECONDS = time_limit(80)
pytestmark = pytest.mark.xdist_group("processes")
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"
)
BASELINES = [
    pytest.param("horovod", "wide-small", marks=needs_horovod),
    ("mwms", "wide-small"),
    pytest.param("megatron", "gpt-small", marks=needs_horovod),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "model"), BASELINES)
def test_a_baseline_on_two_ranks_has_the_losses_of_plain_keras(kind, model):
    with launch.Ranks(kind, model, 2, timeout=SECONDS) as ranks:
        result = ranks.run(launch.CHECKED_STEPS)
        assert ranks.losses == pytest.approx(launch.plain_losses(model), rel=launch.TOLERANCE)
    assert len(result.ranks) == 2
    assert result.cpu_s == pytest.approx(sum(rank["cpu_s"] for rank in result.ranks))
    assert result.wall_s > 0 and result.peak_mib > 0


ANSWERS = """
import json, os, sys
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
for line in sys.stdin:
    losses = [1.0 + 2.0 * rank] * json.loads(line)["steps"]
    found = {"losses": losses, "cpu_s": 1.0, "wall_s": 0.5 + rank, "peak_mib": 3.0}
    print("@" + json.dumps(found), flush=True)
"""
"""A rank of two, whose losses are 2 in the mean."""


def test_ranks_are_added_up_and_another_loss_is_noticed(tmp_path, monkeypatch):
    run_instead(ANSWERS, tmp_path, monkeypatch)
    monkeypatch.setattr(launch, "plain_losses", lambda model: (2.0, 2.0, 2.1))
    with launch.Ranks("mwms", "wide-small", 2, timeout=SECONDS) as ranks:
        found = ranks.run(2)
        assert (found.cpu_s, found.wall_s, found.peak_mib) == (2.0, 1.5, 6.0)
        assert ranks.losses == [2.0, 2.0]
        with pytest.raises(RuntimeError, match="loss of step 2 is 2.0.*plain Keras's is 2.1"):
            ranks.ask({"steps": 1})


def run_instead(program: str, folder, monkeypatch) -> None:
    """Have ranks run this program."""
    worker = folder / "benchmarks" / "by_hand" / "worker.py"
    worker.parent.mkdir(parents=True)
    for package in (worker.parent.parent, worker.parent):
        (package / "__init__.py").touch()
    worker.write_text(program)
    monkeypatch.setattr(launch, "ROOT", folder)


def test_a_rank_that_ends_is_named_with_its_last_words(tmp_path, monkeypatch):
    run_instead("raise SystemExit('no such model')", tmp_path, monkeypatch)
    with launch.Ranks("keras", "wide-small", 1, timeout=SECONDS) as ranks:
        with pytest.raises(RuntimeError, match="(?s)rank 0 of keras ended.*no such model"):
            ranks.ask({"steps": 1})


def test_ranks_that_are_silent_for_too_long_are_given_up(tmp_path, monkeypatch):
    run_instead("import time; time.sleep(60)", tmp_path, monkeypatch)
    with launch.Ranks("keras", "wide-small", 1, timeout=0.1) as ranks:
        with pytest.raises(RuntimeError, match="rank 0 of keras: no answer in 0.1 s"):
            ranks.ask({"steps": 1})
