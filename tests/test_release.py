"""A release: version, changelog, commit and tag, and what it refuses."""

from __future__ import annotations

import datetime
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.release import CHANGELOG, VERSIONS, ReleaseRefused, release
from tests.time_limits import time_limit

ROOT = Path(__file__).parents[1]
DAY = datetime.date(2027, 1, 31)


def git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=time_limit(20),
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with the files that a release writes, as they are here."""
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A. Tester")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "tester@example.org")
    for name in VERSIONS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / CHANGELOG).write_text("# Changelog\n\n## Unreleased\n\n- It flies.\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "a change")


def test_a_release_dates_the_changes_and_writes_the_version_everywhere(checkout):
    assert release(checkout, "7.2.0", DAY) == "v7.2.0"
    log = (checkout / CHANGELOG).read_text()
    assert log == "# Changelog\n\n## Unreleased\n\n## 7.2.0 (2027-01-31)\n\n- It flies.\n"
    assert set(git(checkout, "grep", "--name-only", '"7.2.0"').split()) == set(VERSIONS)
    assert git(checkout, "status", "--porcelain") == ""
    assert git(checkout, "log", "-1", "--format=%s %D").startswith("tfpar 7.2.0 ")
    assert git(checkout, "describe") == "v7.2.0"
    assert git(checkout, "tag", "--format=%(contents)") == "tfpar 7.2.0\n\n- It flies."


def test_a_second_release_has_the_changes_since_the_first(checkout):
    release(checkout, "7.2.0", DAY)
    log = checkout / CHANGELOG
    log.write_text(log.read_text().replace("## Unreleased\n", "## Unreleased\n\n- It lands.\n"))
    commit(checkout)
    release(checkout, "7.3.0rc1", DAY)
    tagged = git(checkout, "tag", "--list", "--format=%(contents)", "v7.3.0rc1")
    assert tagged == "tfpar 7.3.0rc1\n\n- It lands."
    headings = [line for line in log.read_text().splitlines() if line.startswith("## ")]
    assert headings == ["## Unreleased", "## 7.3.0rc1 (2027-01-31)", "## 7.2.0 (2027-01-31)"]


@pytest.mark.parametrize(
    "version, why",
    [
        ("0.0.9", "0.0.9 is older than .*, which the package has"),
        ("v7.2.0", "'v7.2.0' is no version. Write it as 1.2.3"),
        ("7.02.0", "is no version"),
    ],
)
def test_an_odd_or_old_version_is_refused(checkout, version, why):
    with pytest.raises(ReleaseRefused, match=why):
        release(checkout, version, DAY)
    assert git(checkout, "status", "--porcelain") == git(checkout, "tag") == ""


def test_changes_in_the_checkout_are_refused(checkout):
    (checkout / "left").touch()
    with pytest.raises(ReleaseRefused, match="The checkout has changes"):
        release(checkout, "7.2.0", DAY)
    assert git(checkout, "tag") == ""


def test_a_release_without_changes_is_refused(checkout):
    release(checkout, "7.2.0", DAY)
    with pytest.raises(ReleaseRefused, match="nothing below '## Unreleased'"):
        release(checkout, "7.3.0", DAY)


def test_a_version_that_is_tagged_is_refused(checkout):
    git(checkout, "tag", "v7.2.0")
    with pytest.raises(ReleaseRefused, match="There is a tag v7.2.0 already"):
        release(checkout, "7.2.0", DAY)


def test_a_commit_that_fails_changes_nothing(checkout):
    hook = checkout / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho not today >&2; exit 1\n")
    hook.chmod(0o755)
    with pytest.raises(ReleaseRefused, match="git commit failed: not today"):
        release(checkout, "7.2.0", DAY)
    assert git(checkout, "status", "--porcelain") == git(checkout, "tag") == ""


def test_this_checkout_has_one_version_and_changes_to_release(checkout):
    """What the script looks for is in the files as they are."""
    shutil.copy(ROOT / CHANGELOG, checkout / CHANGELOG)
    commit(checkout)
    release(checkout, "7.2.0", DAY)
