"""Read exported plans with the tools' own settings classes: `make test-exports`.

    python scripts/export_readers.py [TOOL …]     all tools that plans are exported to without a name

    tests/unit/tools/test_plan_export.py, in .venv-exports/TOOL ──> degrees, batch and stages of every layout
    tests/acceptance/test_ray.py, in .venv-exports/ray          ──> jobs on a cluster of Ray on this machine

Each tool has an environment with its newest release and of its requirements only what its settings classes
import and this environment lacks. Everything else (torch, pytest) is taken from the environment that
runs the script, but for transformers and what it goes with where the tool asks for other versions. Without a
network it is skipped, with the reason; with CI=true it fails. One tool may be without a release that can be
installed here: it is named.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-exports"
TESTS = "tests/unit/tools/test_plan_export.py"
READ_BACK = "test_the_tool_reads_back_the_layout"
LEAST_LAYOUTS, MOST_MISSING = 8, 1
PINNED = ("transformers", "tokenizers", "huggingface_hub", "accelerate", "peft")
DEEPSPEED = ("deepspeed", "hjson", "einops", "msgpack")


class Environment(NamedTuple):
    """Packages that one tool needs, each installed without its requirements."""

    release: str  # the tool's distribution
    others: tuple[str, ...] = ()  # that its settings classes import
    pins: bool = False  # it asks for other versions of PINNED than the newest
    stub: str = ""  # a module of the tool that needs a package of 1 GB, and no settings need it
    whole: bool = False  # with all its requirements
    tests: str = TESTS
    counts: str = READ_BACK  # begins the names of the tests that are counted
    least: int = LEAST_LAYOUTS  # of these


ENVIRONMENTS = {
    "accelerate": Environment("accelerate"),
    "deepspeed": Environment("deepspeed", DEEPSPEED),
    "torchtitan": Environment(
        "torchtitan",
        ("tyro", "typeguard", "docstring-parser", "spmd_types", "torchdata"),
        stub="torchtitan/distributed/minimal_async_ep/kernels.py",  # triton's, for expert parallelism
    ),
    "megatron": Environment("megatron-core"),
    "axolotl": Environment("axolotl", pins=True),
    "llamafactory": Environment("llamafactory", ("omegaconf", *DEEPSPEED), pins=True),
    "ray": Environment(
        "ray",
        ("ray[default]==2.60.0",),
        whole=True,
        tests="tests/acceptance/test_ray.py",
        counts="test_",
        least=2,
    ),
}


class NotInstalled(Exception):
    """Error: pip could not install a package; its text is pip's last line."""


def made(tool: str) -> Path:
    """Make or update the environment of a tool; return its Python. Raises NotInstalled."""
    environment, folder = ENVIRONMENTS[tool], FOLDER / tool
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    install(python, environment.release, *environment.others, whole=environment.whole)
    if environment.pins:
        install(python, *pinned(site, environment.release))
        install(python, *pinned(site, "transformers"))
    if environment.stub:
        (site / environment.stub).write_text("def __getattr__(name):\n    return None\n")
    return python


def install(python: Path, *packages: str, whole: bool = False) -> None:
    """Install the newest release of each package that fits. Raises NotInstalled.

    whole: with the requirements that are not there yet.
    """
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "-U"]
    command += [] if whole else ["--no-deps"]
    without_kernels = os.environ | {"DS_BUILD_OPS": "0"}
    done = subprocess.run(
        [*command, *packages], capture_output=True, text=True, timeout=900, env=without_kernels
    )
    if done.returncode:
        raise NotInstalled((done.stderr.strip().splitlines() or ["pip gave no reason"])[-1])


def pinned(site: Path, release: str) -> Iterator[str]:
    """Yield those requirements of a distribution in `site` that are of PINNED."""
    for line in distribution(site, release).requires or ():
        requirement = Requirement(line)
        if requirement.name.replace("-", "_") in PINNED and not requirement.marker:
            yield f"{requirement.name}{requirement.specifier}"


def distribution(site: Path, release: str) -> Distribution:
    """The distribution in `site`, or else in this environment: pip installs none that is as new there."""
    return next(distributions(name=release, path=[str(site), *sys.path]))


def read_back(tool: str, python: Path) -> int:
    """Run the tests of a tool in its environment; return the number of those that are counted and pass.

    Exits if a test fails or is skipped, or with fewer than the least number.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            ENVIRONMENTS[tool].tests,
            "-k",
            tool,
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*command, f"--junitxml={report}"], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{done.stdout[-6000:]}{done.stderr[-2000:]}\ntest-exports: {tool} fails.")
        passed, skipped = counted(report.read_text("utf-8"), ENVIRONMENTS[tool].counts)
    if skipped or passed < ENVIRONMENTS[tool].least:
        sys.exit(f"test-exports: {tool} passed {passed} tests, and skipped {skipped}.")
    return passed


def counted(report: str, begins: str = READ_BACK) -> tuple[int, int]:
    """(tests that passed and have a name that begins so, tests that were skipped) in pytest's XML report."""
    cases = [*ElementTree.fromstring(report).iter("testcase")]
    passed = [case for case in cases if case.get("name", "").startswith(begins) and not len(case)]
    return len(passed), sum(case.find("skipped") is not None for case in cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="*", choices=[*ENVIRONMENTS, []], metavar="TOOL")
    tools = parser.parse_args().tools or [*ENVIRONMENTS]
    missing: dict[str, str] = {}
    for tool in tools:
        try:
            python = made(tool)
        except NotInstalled as error:
            missing[tool] = str(error)
            continue
        (site,) = python.parents[1].glob("lib/python*/site-packages")
        release = distribution(site, ENVIRONMENTS[tool].release)
        print(f"{release.name} {release.version} passes {read_back(tool, python)} tests", flush=True)
    for tool, reason in missing.items():
        print(f"test-exports: {tool} can't be installed: {reason}")
    if len(missing) > MOST_MISSING or missing.keys() == {*tools}:
        if os.environ.get("CI"):
            sys.exit(1)
        print("skipped; with CI=true this fails.")


if __name__ == "__main__":
    main()
