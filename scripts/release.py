"""Release a version: the number, the changelog's date, a commit and a tag.

    python -m scripts.release 0.2.0

Nothing is pushed, built or published. It refuses what cannot be a release: a checkout with changes,
a version that is no newer, a changelog in which nothing is unreleased.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
CHANGELOG = "CHANGELOG.md"
VERSIONS = {
    "tfpar/__init__.py": r'(?<=^__version__ = ")[^"]+(?="$)',
    "conda/recipe.yaml": r'(?<=^  version: ")[^"]+(?="$)',
}
"""Files that hold the version, the package's own first, and what matches it there."""
UNRELEASED = "## Unreleased"


class ReleaseRefused(Exception):
    """A release that was asked for and cannot be made; the checkout is as it was."""


def release(root: Path, version: str, today: datetime.date) -> str:
    """Write, commit and tag `version` in the checkout at `root`; returns the name of the tag.

    Raises:
        ReleaseRefused: says why, and what to do.
    """
    tag = f"v{version}"
    if _git(root, "status", "--porcelain"):
        raise ReleaseRefused("The checkout has changes. Commit or stash them first.")
    pages = {name: (root / name).read_text(encoding="utf-8") for name in VERSIONS}
    package, *_ = VERSIONS
    _check_newer(version, _only(VERSIONS[package], pages[package], package))
    if _git(root, "tag", "--list", tag):
        raise ReleaseRefused(f"There is a tag {tag} already. Name a newer version.")
    changelog, changes = _date_changes(
        (root / CHANGELOG).read_text(encoding="utf-8"), version, today
    )
    for name, pattern in VERSIONS.items():
        _only(pattern, pages[name], name)
        pages[name] = re.sub(pattern, version, pages[name], flags=re.MULTILINE)
    pages[CHANGELOG] = changelog
    for name, page in pages.items():
        (root / name).write_text(page, encoding="utf-8")
    try:
        _git(root, "commit", "--quiet", "--message", f"tfpar {version}", "--", *pages)
    except ReleaseRefused:
        _git(root, "checkout", "--quiet", "HEAD", "--", *pages)
        raise
    message = f"tfpar {version}\n\n{changes}"
    _git(root, "tag", "--annotate", "--cleanup=verbatim", "--message", message, tag)
    return tag


def _check_newer(version: str, current: str) -> None:
    """The first release has the version that the package was begun with."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        wanted = None
    if wanted is None or str(wanted) != version:
        raise ReleaseRefused(f"{version!r} is no version. Write it as 1.2.3, or 1.2.3rc1.")
    if wanted < Version(current):
        raise ReleaseRefused(f"{version} is older than {current}, which the package has.")


def _date_changes(changelog: str, version: str, today: datetime.date) -> tuple[str, str]:
    """The changelog with its unreleased section dated and a new, empty one; and what changed."""
    before, heading, rest = changelog.partition(f"\n{UNRELEASED}\n")
    changes = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not heading or not changes:
        raise ReleaseRefused(
            f"{CHANGELOG} has nothing below '{UNRELEASED}'. Say there what users get."
        )
    dated = f"\n## {version} ({today.isoformat()})\n"
    return f"{before}{heading}{dated}{rest}", changes


def _only(pattern: str, page: str, name: str) -> str:
    found = re.findall(pattern, page, flags=re.MULTILINE)
    if len(found) != 1:
        raise ReleaseRefused(f"{name} has {len(found)} lines with the version, not one. Mend it.")
    return found[0]


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseRefused(f"git {words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser("scripts.release", description=__doc__.splitlines()[0])
    parser.add_argument("version", help="a newer one, such as 0.2.0")
    version = parser.parse_args().version
    try:
        tag = release(ROOT, version, datetime.date.today())
    except ReleaseRefused as refused:
        print(refused, file=sys.stderr)
        return 1
    print(f"Committed and tagged {tag}. Look at it (git show {tag}), then: git push --follow-tags")
    return 0


if __name__ == "__main__":
    sys.exit(main())
