"""Numbers of a job against counts by hand from the plan's step, and the machines that bounds choose."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from golden import refuses, says

from meshtune import config
from meshtune.api.plan import plan
from meshtune.commands.submit import check_output
from meshtune.errors import NothingFits, UserError
from meshtune.layout import Layout
from meshtune.rundir import EXPECTED
from meshtune.submit.job import Job, job_of

RUN = (
    "model.name=Qwen/Qwen3-8B", "train.max_steps=1000", "cluster.gpu=h100-sxm", "cluster.gpus=16",
    "cluster.price_per_gpu_hour=2.5", "checkpoint.every=250", "data.train=rows.jsonl",
)  # fmt: skip
PARAMETERS = 8_190_735_360  # of Qwen3-8B, as its card has them
CHECKPOINT = PARAMETERS * (4 + 8) / 1e9  # seconds at 1 GB/s: fp32 weights and AdamW's two moments


def job(*words: str, **options: Any) -> Job:
    return job_of(config.load(None, [*RUN, *words]), ["run.yaml", *words], **options)


def test_time_limit_margin_and_price_are_those_of_a_count_by_hand() -> None:
    choice = plan(config.load(None, [*RUN])).choice
    step, error = choice.seconds.total, choice.accuracy.time or 0.0
    made = job("data.eval_split=32", "eval.every=100", "layout=auto")
    parts = {part.name: part for part in made.parts}
    assert parts["steps"].seconds == pytest.approx(1000 * step)
    assert parts["steps"].most == pytest.approx(1000 * step * (1 + error))
    assert 0 < parts["evaluations"].seconds < 10 * 0.5 * step  # 32 of 64 sequences, and without a backward
    assert parts["checkpoints"].seconds == pytest.approx(CHECKPOINT, rel=1e-3)  # three while steps are done
    assert parts["start"].seconds == 600
    assert made.margin - 60 == pytest.approx(step * (1 + error) + 2 * CHECKPOINT, abs=1)  # one may be written
    assert made.limit % 60 == 0 and 0 <= made.limit - made.most - made.margin < 60
    assert made.cost(made.seconds) == pytest.approx(16 * 2.5 * made.seconds / 3600)
    assert json.loads(made.environment[EXPECTED]) == {
        "seconds": round(made.seconds), "most": round(made.most), "gpus": 16, "price": 2.5, "currency": "",
    }  # fmt: skip
    assert made.command == (
        "python", "-m", "meshtune", "train", "run.yaml", "data.eval_split=32", "eval.every=100",
        f"layout={made.layout}", "output=runs/run",
    )  # fmt: skip


def test_intervals_in_epochs_of_rows_that_nobody_counted_are_those_of_the_settings_and_said() -> None:
    words = ("data.eval_split=32", "eval.every=0.25 epoch", "checkpoint.every=1 epoch", "train.num_epochs=4")
    made = job(*words)
    parts = {part.name: part.how for part in made.parts}
    assert parts["evaluations"].startswith("16 of ") and parts["checkpoints"].startswith("4, each")
    for interval, number in (("1 epoch", 16), ("0.8 epoch", 20)):  # of the latter all but the last are apart
        kept = job(*words, "eval.keep_best=true", f"checkpoint.every={interval}")
        [how] = [part.how for part in kept.parts if part.name == "checkpoints"]
        assert how.startswith(f"{number}, each")
    says(made.assumed[1:])


@pytest.mark.ci
def test_an_evaluation_has_the_share_of_an_epoch_that_is_held_out_and_the_answers_that_are_asked_for() -> (
    None
):
    def evaluations(*words: str) -> float:
        parts = job("eval.every=100", "train.num_epochs=2", *words).parts
        return next(part.seconds for part in parts if part.name == "evaluations")

    fiftieth, half = evaluations("data.eval_split=0.02"), evaluations("data.eval_split=0.5")
    assert half / fiftieth == pytest.approx(0.98 / 0.02), (
        "rows that are not counted are the steps of an epoch"
    )
    few, more = (
        evaluations("data.eval_split=0.02", f"eval.samples={number}", f"eval.max_new_tokens={tokens}")
        - fiftieth
        for number, tokens in ((5, 16), (100, 32))
    )
    at_once = Layout.parse(job().layout)
    turns = math.ceil(100 / (at_once.data_ranks * at_once.micro_batch_size))
    assert turns > 1 and more / few == pytest.approx(2 * turns)


@pytest.mark.parametrize("words", [("model.name=Qwen/Qwen3-0.6B",), ("method=lora",), ("cluster.gpus=64",)])
def test_the_margin_is_never_below_a_step_and_a_checkpoint(words: tuple[str, ...]) -> None:
    answer = plan(config.load(None, [*RUN, *words]))
    assert job(*words).margin >= answer.choice.seconds.total + answer.workload.checkpoint_bytes / 1e9 + 60


@pytest.mark.ci
def test_machines_are_given_or_chosen_within_the_bounds_or_refused() -> None:
    assert (job().machines, job().gpus) == (2, 8)
    assert (job("cluster.gpus=4").machines, job("cluster.gpus=4").gpus) == (1, 4)
    assert job(nodes=4).machines == 4
    long = ("train.max_steps=20000", "cluster.gpus=64")
    cheap, fast = job(*long, by="24h"), job(*long, budget=400.0)
    assert cheap.world < fast.world and cheap.seconds > fast.seconds
    assert (fast.cost(fast.seconds) or 500) <= 400 and cheap.seconds <= 24 * 3600
    says([*cheap.why, *fast.why])
    with refuses(UserError):
        job(nodes=2, budget=9.0)
    with refuses(NothingFits):
        job(by="15min", *long)  # noqa: B026


def test_an_elastic_job_has_limits_for_each_number_of_machines_and_leaves_its_layout_open() -> None:
    words = ("train.global_batch_size=96", "layout={zero: 3, dp_shard: auto, dp_replicate: auto}")
    two, three = (job(*words, nodes=number) for number in (2, 3))
    both = job(*words, least=2, nodes=3)
    assert (both.least, both.machines, both.limit) == (2, 3, two.limit) and two.limit > three.limit
    assert both.layout == three.layout and both.command[5:-1] == words
    assert any(two.layout in sentence for sentence in both.why)
    several = ("train.max_steps=30000", "cluster.time_limit=2h")
    two, three = (job(*words, *several, nodes=number) for number in (2, 3))
    both = job(*words, *several, least=2, nodes=3)
    assert (both.jobs, both.parts) == (
        three.jobs,
        three.parts,
    ) and both.most_jobs == two.jobs > three.jobs > 1
    assert any(f"at most {two.jobs} jobs" in sentence for sentence in both.why)
    with refuses(UserError):
        job("layout=zero3x16", least=2, nodes=3)
    with refuses(NothingFits):
        job("train.global_batch_size=32", "layout={zero: 3, dp_shard: auto}", least=2, nodes=3)


def test_what_is_left_is_counted_and_a_site_with_shorter_jobs_gets_several(tmp_path: Path) -> None:
    output = f"output={tmp_path}"
    whole = job(output).parts[0].seconds
    tree = config.load(None, [*RUN, output]).model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(json.dumps(tree), encoding="utf-8")
    (tmp_path / "checkpoints" / "step-600").mkdir(parents=True)
    assert job(output).parts[0].seconds == pytest.approx(0.4 * whole)
    assert job(output, "output_exists=replace").parts[0].seconds == pytest.approx(whole)
    parts = job("train.max_steps=30000", "cluster.time_limit=2h")
    assert parts.limit == 7200 and parts.jobs == 5  # 6 h at most, and each has 20 min less
    stops, start = parts.parts[-2:]
    assert (start.seconds, start.most) == (4 * 600, 5 * 600), (
        "the jobs of the expected steps, and those of the upper end"
    )
    assert stops.seconds == pytest.approx(3 * 98.3, rel=0.01) and stops.most == pytest.approx(
        4 * 98.3, rel=0.01
    )
    assert job("output=~/runs/a").output == str(Path.home() / "runs/a")
    for words in (
        ["cluster.time_limit=10min"], ["cluster.time_limit=24:00:00"], [output, "train.max_steps=600"]
    ):  # fmt: skip
        with refuses(UserError):
            job(*words)
    check_output(config.load(None, [*RUN, output, "data.train=/tmp/ray/_ray_pkg_1/rows.jsonl"]))
    with refuses(UserError):
        check_output(config.load(None, [*RUN, output, "train.learning_rate=1e-3"]))
    with refuses(UserError):
        job("train.max_steps=null")
    with refuses(UserError):
        job("cluster.gpu=cpu", "cluster.gpus=2", "cluster.memory_gib=200")


def test_outputs_and_caches_are_below_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # which gets the cache
    shared = job("cluster.storage=/shared/me", "output=runs/My Run!")
    assert shared.output == "/shared/me/runs/My Run!" and shared.name == "my-run"
    assert shared.command[-2:] == ("output=/shared/me/runs/My Run!", "data.cache=/shared/me/cache")
    assert shared.environment["HF_HOME"] == "/shared/me/hf"
    assert job("cluster.storage=/shared/me", "data.cache=made").command[-1] == "data.cache=/shared/me/made"
    store = job("cluster.storage=s3://bucket/me", "output=/local/run")
    assert (store.mount, store.output, store.storage) == ("/storage", "/local/run", "s3://bucket/me")
