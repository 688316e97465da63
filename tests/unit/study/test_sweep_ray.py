"""A sweep's jobs of Ray, with a script for its client and a small Ray; tests/acceptance/test_ray.py has a
real one.
"""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from golden import refuses, says

from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.study import ray, ray_driver
from meshtune.study.children import Task
from meshtune.study.queue import listing_of, read_task, write_task
from meshtune.study.ray_driver import Driver
from meshtune.study.store import CRASHED, OUT_OF_MEMORY, REFUSED, RUNNING, WAITING, Store
from meshtune.study.sweep_file import Experiment, read_sweep

AT = "http://head:8265"
CLIENT = """
echo "$@" >> "$CALLED"
test -z "$FAIL" || { echo "$FAIL" >&2; exit 1; }
case "$2" in
submit) echo "Job 'meshtune-7' submitted successfully" ;;
status) echo "$STATE" ;;
esac
"""


@pytest.fixture
def client(clients: Callable[..., Path]) -> Path:
    """Ray's program; returns the file with the words of its calls."""
    return clients({"ray": CLIENT})


def tasks(*layouts: str) -> dict[int, Task]:
    trees = {number: {"train": {"device": "cpu"}} if number == 1 else {} for number in (1, 2, 3)}
    rows = enumerate(layouts, 1)
    return {n: Task(n, "bench", trees[n], Layout.parse(layout), 10, 600.0) for n, layout in rows}


def store_of(folder: Path, given: dict[int, Task]) -> Store:
    store = Store(folder / "sweep.db")
    store.add([Experiment({"n": number}, {}, str(number)) for number in given], ("n",))
    return store


def test_a_job_is_written_down_and_then_submitted_and_waits_again_where_ray_refuses(
    client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path /= "out"
    given, send, seen = tasks("mb1-ga1", "zero3x2-mb1-ga1", "mb2-ga1"), ray.submitted, list[str]()
    options = {"address": AT, "bundle": {"CPU": 4}, "entrypoint_num_cpus": 1, "runtime_env": {"pip": ["x"]}}
    document = {"base": {"cluster": {"ray": options}}, "axes": {"train.seed": [1]}}
    plan = read_sweep(document, name="study")
    with store_of(tmp_path, given) as store:

        def submitted(request: Any) -> str:
            seen[:] = [str(row.job) for row in store.rows(RUNNING)]
            return send(request)

        monkeypatch.setattr(ray, "submitted", submitted)
        (job,) = ray.submit(store, given, tmp_path, plan, 2)
        assert seen == [f"{job}_{place}" for place in (1, 0, 2)], "the most ranks first"
        number = job.removesuffix(f"@{AT}")
        listing = listing_of(tmp_path, number)
        assert [read_task(tmp_path, int(line)).world for line in listing.read_text().split()] == [2, 1, 1]
        words = client.read_text().replace(number, "ID").replace(str(tmp_path), "FOLDER")
        says(words)
        store.wait_again(given)
        monkeypatch.setenv("FAIL", "RuntimeError: no")
        with refuses(UserError):
            ray.submit(store, given, tmp_path, plan, 0)
        assert store.counts() == {WAITING: 3} and [*(tmp_path / "ray").iterdir()] == [listing]


@pytest.mark.parametrize(
    ("said", "lives", "status"),
    [
        ("Status for job 'meshtune-7': RUNNING", True, None),
        ("Job 'meshtune-7' was stopped", False, None),
        ("Job 'meshtune-7' succeeded", False, CRASHED),
        ("RuntimeError: Request failed with status code 404: Job meshtune-7 does not exist.", False, None),
    ],
)
def test_the_state_of_a_job_decides(
    client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, *, lives: bool, status: Any
) -> None:
    tmp_path /= "out"
    monkeypatch.setenv("FAIL" if "Error" in said else "STATE", said)
    with store_of(tmp_path, tasks("mb1-ga1")) as store:
        store.start([1], f"meshtune-7@{AT}")
        (row,) = store.rows(RUNNING)
    listing = listing_of(tmp_path, "meshtune-7")
    listing.parent.mkdir()
    listing.write_text("1\n")
    assert (ray.alive([str(row.job)]) == {row.job}) == lives
    if lives:
        return
    outcome = ray.ended_without(row, tmp_path)
    assert (outcome and outcome.status) == status
    assert listing.exists() == bool(outcome), "a job that comes late ends"
    if outcome:
        says(str(outcome.reason))


def test_a_ray_that_does_not_answer_is_not_one_that_has_lost_the_job(
    client: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "ConnectionError: Failed to connect")
    with pytest.raises(UserError):
        ray.alive([f"meshtune-7@{AT}_0"])


def test_fields_that_the_sweep_sets_itself_are_refused() -> None:
    fields = {"entrypoint": "x", "adress": "y", "bundle": {"GPU": 2}}
    document = {"base": {"cluster": {"ray": fields}}, "axes": {"train.seed": [1]}}
    with refuses(UserError):
        ray.options_of(read_sweep(document))


class Lost(Exception):
    """Error of Ray: a node or worker is gone."""


class NoMemory(Lost):
    """Error of Ray: the node's memory is full."""


class Raised(Lost):
    """Error of Ray: the task has raised `cause`."""

    cause = FileNotFoundError("no folder")


class SmallRay(SimpleNamespace):
    """Ray, as far as the driver needs it: one node with two CPUs and a GPU, and tasks that end at once."""

    exceptions = SimpleNamespace(OutOfMemoryError=NoMemory, RayTaskError=Raised, RayError=Lost)

    def __init__(self, ends: dict[int, list[Any]]) -> None:
        """ends: number of an experiment -> exit codes and errors of its tasks."""
        self.ends, self.started, self.cancelled, self.most = ends, list[tuple[int, Any]](), list[int](), 0

    def remote(self, _: Any) -> Any:
        def options(**options: Any) -> Any:
            def start(_sweep: str, _job: str, number: int, variables: Any, _folder: Any) -> int:
                self.started.append((number, (options["num_cpus"], options["num_gpus"], variables)))
                return number

            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(runtime_env={"env_vars": {"A": "b"}})

    def nodes(self) -> list[Any]:
        return [{"Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}}, {"Alive": False, "Resources": {}}]

    def wait(self, references: list[int], **_: Any) -> tuple[list[int], list[int]]:
        self.most = max(self.most, len(references))
        return [number for number in references if self.ends.get(number)][:1], []

    def get(self, number: int) -> int:
        end = self.ends[number].pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Driver, SmallRay]]:
    """Function(layouts, ends=…, jobs=…) that makes the driver of a job; a look takes a minute."""

    def made(*layouts: str, ends: dict[int, list[Any]], jobs: int = 0) -> tuple[Driver, SmallRay]:
        for task in tasks(*layouts).values():
            write_task(task, tmp_path)
        listing_of(tmp_path, "j").parent.mkdir()
        listing_of(tmp_path, "j").write_text("".join(f"{n + 1}\n" for n in range(len(layouts))))
        clock = count(0.0, 60.0)
        monkeypatch.setattr(ray_driver, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        small = SmallRay(ends)
        options = {"sweep": str(tmp_path), "job": "j", "jobs": jobs, "bundle": {}, "folder": None}
        return Driver(small, SimpleNamespace(**options)), small  # type: ignore[arg-type]

    return made


def results(folder: Path) -> dict[int, Any]:
    texts = [json.loads(file.read_text()) for file in (folder / "results").glob("*.json")]
    return {text["number"]: text["outcome"] for text in texts}


def test_lost_experiments_start_again_and_others_have_a_result(drive: Any, tmp_path: Path) -> None:
    ends = {1: [Lost("node"), 75, Lost("node")], 2: [Lost("node"), 0], 3: [NoMemory("full")]}
    driver, small = drive("zero3x2-mb1-ga1", "mb1-ga1", "mb1-ga1", ends=ends, jobs=1)
    assert driver.run() == 0
    assert [number for number, _ in small.started] == [1, 1, 1, 2, 2, 3] and small.most == 1
    assert dict(small.started)[1] == (2, 0, {"OMP_NUM_THREADS": "1", "A": "b"}), "on processors"
    assert dict(small.started)[2] == (1, 1, {"OMP_NUM_THREADS": "1", "A": "b"})
    ended = results(tmp_path)
    assert {n: outcome["status"] for n, outcome in ended.items()} == {1: CRASHED, 3: OUT_OF_MEMORY}
    says(ended[1]["reason"])


def test_an_experiment_that_fits_no_node_is_refused_after_a_while(
    drive: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver, small = drive("mb1-ga1", "zero3x2-mb1-ga1", "mb1-ga1", ends={1: [2], 3: [Raised()]})
    assert driver.run() == 0 and small.cancelled == [2]
    says(capsys.readouterr().err)
    says([results(tmp_path)[number]["reason"] for number in (1, 2, 3)])
    assert results(tmp_path)[2]["status"] == REFUSED


def test_a_job_ends_once_its_list_is_removed(drive: Any, tmp_path: Path) -> None:
    driver, small = drive("mb1-ga1", "mb1-ga1", ends={1: [0]})

    def nodes() -> list[Any]:
        listing_of(tmp_path, "j").unlink(missing_ok=True)
        return []

    small.nodes = nodes
    assert driver.run() == 75 and small.cancelled == [2] and not results(tmp_path)
    with refuses(UserError):
        Driver(small, driver.options)  # type: ignore[arg-type]
