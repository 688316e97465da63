"""The steps of containers/Dockerfile, run in an empty folder as a user who isn't root: no Docker is needed.

Steps before USER (Debian's packages, the user) are left out, and the package index is this machine's.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534

pytestmark = [pytest.mark.all, pytest.mark.timeout(1800)]


def steps(text: str) -> list[tuple[str, str]]:
    """(Instruction, its words) of a Dockerfile, from USER on."""
    found = re.findall(r"^([A-Z]+) (.*)$", text, re.MULTILINE)
    return found[[name for name, _ in found].index("USER") :]


@pytest.fixture
def top() -> Iterator[Path]:
    """An empty folder that every user sees into, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_the_steps_of_the_image_make_a_meshtune_that_runs_without_root(top: Path) -> None:
    if os.environ.get("CI") != "true" and not index_answers():
        pytest.skip("no package index answers")
    inside = top / "opt"
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    for folder in (inside, top / "home"):
        folder.mkdir()
        folder.chmod(0o777)
    environ = {"PATH": os.environ["PATH"], "HOME": str(top / "home"), "TMPDIR": str(top / "home")}
    environ |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    folder = inside

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, **user
        )
        assert not done.returncode, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    for name, words in steps((ROOT / "containers" / "Dockerfile").read_text()):
        words = words.replace("/opt/meshtune", str(inside))
        if name in ("ARG", "ENV"):
            for variable, value in re.findall(r"(\w+)=(\S*)", words):
                environ[variable] = value.replace("$PATH", environ["PATH"])
        elif name == "COPY":
            *sources, target = [word for word in words.split() if not word.startswith("--")]
            for source in sources:
                place = inside / target / ("" if (ROOT / source).is_dir() else source)
                place.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, place)
            subprocess.run(["chmod", "-R", "a+rwX", inside / "source"], check=True)
        elif name == "RUN":
            run(words.replace(' --index-url "$TORCH_INDEX"', ""))
    folder = top / "home"
    assert "usage" in run("meshtune --help").lower()
    assert "zero" in run("meshtune plan model.name=llama-3.1-8b cluster.gpu=h100-sxm cluster.gpus=8")


def index_answers() -> bool:
    words = [sys.executable, "-m", "pip", "index", "versions", "typer"]
    return not subprocess.run(words, capture_output=True).returncode
