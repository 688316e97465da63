"""A tenth of `make families`, another one each week."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_a_tenth_of_the_families_is_right_or_refused(tmp_path: Path) -> None:
    tenth = datetime.now(UTC).isocalendar().week % 10
    done = subprocess.run(
        [sys.executable, "validation/families.py", "--tenth", str(tenth), "--out", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
