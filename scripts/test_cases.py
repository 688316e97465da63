"""Check that every test case of an earlier version is still there, or is listed as removed with a reason.

    python scripts/test_cases.py COMMIT     its cases are collected in a checkout of its own
    python scripts/test_cases.py FILE       one case a line, as `pytest --collect-only -q` names them

Cases of all circles count alike, those of GPUs only where there is one. A case is its function and
parameters: it may have moved to another file. It prints what is missing, and then ends with exit code 1.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
REMOVED = ROOT / "tests" / "removed_cases.txt"


def collected(root: Path) -> list[str]:
    """Return the ids of all cases that pytest finds in a checkout."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "tests"]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pytest can't collect the tests of {root}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def earlier(source: str) -> list[str]:
    """Return the ids in a file, or those of a commit."""
    if Path(source).is_file():
        return Path(source).read_text("utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", checkout, source], cwd=ROOT, check=True
        )
        try:
            return collected(checkout)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", checkout], cwd=ROOT, check=True)


def counts(ids: Iterable[str]) -> Counter[str]:
    """Return how often each case occurs, without the files."""
    return Counter(line.strip().partition("::")[2] for line in ids if line.strip() and line[0] != "#")


def main(source: str) -> None:
    old, new = earlier(source), collected(ROOT)
    if not any(line.startswith("tests/gpu/") for line in new):  # they are collected only with CUDA
        old = [line for line in old if not line.startswith("tests/gpu/")]
    before, now = counts(old), counts(new)
    removed = counts(REMOVED.read_text("utf-8").splitlines())
    print(
        f"{before.total()} cases before, {now.total()} now, {(before & removed).total()} removed for a reason"
    )
    missing = before - now - removed
    if missing:
        print(*sorted(missing.elements()), f"{missing.total()} missing", sep="\n")
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
