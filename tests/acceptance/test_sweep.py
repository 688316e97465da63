"""`meshtune sweep` as a user has it: results with reasons, killed and started again, predicted, dry-run."""

import json
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Command, end
from own_machine import OWN_MACHINE
from tiny import short_run, write_rows

from meshtune.study.children import marked

LAYOUTS = Path(__file__).parents[2] / "examples" / "sweeps" / "layouts-h100.yaml"


def write(file: Path, document: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def base(tiny: Path) -> dict[str, Any]:
    """A tiny model with random weights on CPU ranks."""
    return {
        "model": {"name": str(tiny / "model"), "init": "random"}, "data": {"seq_len": 64},
        "train": {"precision": "fp32", "device": "cpu"},
    }  # fmt: skip


def results(folder: Path, columns: str) -> list[tuple[Any, ...]]:
    database = sqlite3.connect(folder / "sweep.db")
    found = database.execute(f"SELECT {columns} FROM results").fetchall()
    database.close()
    return found


def identity(folder: Path) -> str:
    """Id of a sweep, which marks its processes."""
    database = sqlite3.connect(folder / "sweep.db")
    return json.loads(database.execute("SELECT value FROM sweep WHERE name = 'id'").fetchone()[0])


@pytest.mark.all
def test_a_bench_and_a_refusal_are_results_and_are_not_repeated(
    tiny: Path, meshtune: Command, tmp_path: Path
) -> None:
    """One real experiment, in a process of its own."""
    document = {"base": base(tiny), "steps": 1, "axes": {"layout": ["mb1-ga2", "tp3-mb1-ga2"]}}
    file, out = write(tmp_path / "s.yaml", document), tmp_path / "out"
    ended = meshtune("sweep", file, "--out", out, "--json")
    assert ended.json["counts"] == {"done": 1, "refused": 1}
    assert "experiment 1 (layout=mb1-ga2) done" in ended.err
    (done, refused) = results(out, "status, reason, world, peak_memory_bytes, simulated_peak_bytes, attempts")
    assert done[:3] == ("done", None, 1) and done[3] == done[4] > 0 and done[5] == 1
    assert refused[0] == "refused" and "tp=3 does not divide" in refused[1] and refused[5] == 0
    assert "2 with a result" in meshtune("sweep", file, "--out", out, "--json").err
    assert results(out, "attempts") == [(1,), (0,)]


@pytest.mark.all
def test_unpacked_data_are_planned_as_long_as_they_are_and_speeds_count_their_tokens(
    tiny: Path, meshtune: Command, tmp_path: Path
) -> None:
    """Batches of 8 rows of 5 or of 65 tokens; the second step, whose memory is watched too, has long ones."""
    rows = [
        {"prompt": "Say red" + " please" * (60 * (place % 2)), "completion": "red"} for place in range(64)
    ]
    data = {"train": str(write_rows(tmp_path / "rows.jsonl", rows)), "cache": str(tmp_path / "cache")}
    cluster = tmp_path / "machine.toml"
    cluster.write_text(OWN_MACHINE)
    tree = base(tiny) | {"data": data | {"seq_len": 512, "packing": False}, "cluster": str(cluster)}
    tree["train"]["seed"] = 8
    document = {"base": tree, "steps": 3, "axes": {"layout": ["zero3x2-mb4-ga1"]}}
    meshtune("sweep", write(tmp_path / "s.yaml", document), "--out", tmp_path)
    speeds = "tokens, tokens_per_second_per_gpu * step_seconds, predicted_tokens_per_second_per_gpu * "
    columns = "peak_memory_bytes, predicted_peak_bytes, simulated_peak_bytes, "
    ((highest, planned, simulated, tokens, *of_rank),) = results(
        tmp_path, f"{columns}{speeds}predicted_step_seconds"
    )
    assert of_rank == pytest.approx([tokens / 2, tokens / 2])
    assert planned == pytest.approx(highest, rel=0.02) and highest > 2 * simulated


@pytest.mark.ci
def test_a_simulated_sweep_measures_nothing(meshtune: Command, tmp_path: Path) -> None:
    tree = {"data": {"seq_len": 4096}, "cluster": {"gpu": "h100-sxm"}, "train": {"global_batch_size": 64}}
    axes = {"model.name": ["llama-3.2-1b"], "cluster.gpus": [8, 16], "layout": {"best": 2}}
    file = write(tmp_path / "s.yaml", {"base": tree, "axes": axes})
    ended = meshtune("sweep", file, "--simulate", "--out", tmp_path)
    assert "All figures are simulated (planner); nothing was measured." in ended.out
    rows = results(tmp_path, '"cluster.gpus", gpus, predicted_step_seconds > 0, step_seconds, mfu, status')
    assert rows == [(8, 8, 1, None, None, "done")] * 2 + [(16, 16, 1, None, None, "done")] * 2


@pytest.mark.all
def test_the_study_of_four_thousand_layouts_is_predicted(meshtune: Command, tmp_path: Path) -> None:
    ended = meshtune("sweep", LAYOUTS, "--simulate", "--out", tmp_path, "--json")
    assert ended.json["simulated"] == "planner"
    assert ended.json["experiments"] >= 4000 and ended.json["counts"]["done"] > 1000
    best = results(tmp_path, "model, max(predicted_mfu), gpus, step_seconds, mfu")[0]
    assert best[0] == "llama-3.1-405b" and 0.4 < best[1] < 0.7 and best[3:] == (None, None)
    database = sqlite3.connect(tmp_path / "sweep.db")
    assert database.execute("SELECT value FROM sweep WHERE name = 'simulated'").fetchone() == ('"planner"',)
    assert "holds predicted results" in meshtune("sweep", LAYOUTS, "--out", tmp_path, code=2).err


def test_mistakes_are_said_before_anything_runs(meshtune: Command, tmp_path: Path) -> None:
    file = write(tmp_path / "s.yaml", {"axes": {"train.lr": [1]}, "wher": "a < b"})
    ended = meshtune("sweep", file, "--out", tmp_path / "out", code=2)
    assert "did you mean where?" in ended.err and "train.learning_rate?" in ended.err
    assert not (tmp_path / "out").exists()
    assert meshtune("sweep", file, "--simulate=dryrn", code=2).err.count("did you mean dryrun?") == 1
    assert "did you mean crashed?" in meshtune("sweep", file, "--retry", "crashd", code=2).err


@pytest.mark.all
@pytest.mark.timeout(900)
def test_training_killed_at_random_goes_on_and_repeats_nothing(
    tiny: Path, begin: Callable[..., Any], tmp_path: Path
) -> None:
    """Four experiments: two train, one is refused, one is over its time limit. Three SIGKILL at random."""
    settings = short_run(tiny, tmp_path / "cache", tmp_path / "unused")
    tree = {"run": "train", "limit": 60, "base": {}, "axes": {"train.seed": [1, 2]},
            "experiments": [{"layout": "tp3-mb1"}, {"train.max_steps": 1_000_000}]}  # fmt: skip
    file, out = write(tmp_path / "s.yaml", tree), tmp_path / "out"
    words = ("sweep", file, *settings, "--out", out)
    draw, ends = random.Random(3), dict[int, tuple[Any, ...]]()
    for _ in range(3):
        sweeping = begin(*words)
        time.sleep(draw.uniform(8, 30))
        sweeping.kill()
        sweeping.communicate()
        if (out / "sweep.db").exists():
            for number, *rest in results(out, "number, status, ended, seconds"):
                if rest[0] not in ("waiting", "running"):
                    assert ends.setdefault(number, tuple(rest)) == tuple(rest)
    end(begin(*words), timeout=500)
    found = results(out, "number, status, ended, seconds, loss, attempts")
    assert [row[1] for row in found] == ["done", "done", "refused", "timed out"]
    assert all(row[4] > 0 for row in found[:2])
    for number, *rest in found:
        assert ends.get(number, tuple(rest[:3])) == tuple(rest[:3])  # what had ended stays to the byte
    assert not [*marked(identity(out))]


@pytest.mark.ci
def test_ctrl_c_says_how_to_go_on_and_no_process_is_left(
    tiny: Path, begin: Callable[..., Any], tmp_path: Path
) -> None:
    document = {"base": base(tiny), "steps": 100_000, "axes": {"layout": ["mb1-ga2", "mb1-ga4"]}}
    file, out = write(tmp_path / "s.yaml", document), tmp_path / "out"
    sweeping = begin("sweep", file, "--out", out)
    until = time.monotonic() + 60
    while not (out / "configs").exists() and time.monotonic() < until:
        time.sleep(0.2)
    assert f"being swept by process {sweeping.pid}" in end(begin("sweep", file, "--out", out), code=2).err
    sweeping.send_signal(signal.SIGINT)
    assert "2 experiments to run; the same command continues" in end(sweeping, timeout=60, code=75).err
    assert results(out, "status") == [("waiting",), ("waiting",)]
    assert not [*marked(identity(out))]


@pytest.mark.all
def test_the_tier_dryrun_simulates_each(tiny: Path, meshtune: Command, tmp_path: Path) -> None:
    tree = {**base(tiny), "cluster": {"gpu": "h100-sxm"}}
    document = {"base": tree, "axes": {"layout": ["zero3x8-mb1-ga1", "tp2-sp-mb2-ga1"]}}
    file = write(tmp_path / "s.yaml", document)
    ended = meshtune("sweep", file, "--simulate", "dryrun", "--out", tmp_path, "--json")
    assert ended.json["counts"] == {"done": 2}, ended.err
    for world, peak, measured in results(tmp_path, "world, simulated_peak_bytes, peak_memory_bytes"):
        assert world in (2, 8) and peak > 0 and measured is None
