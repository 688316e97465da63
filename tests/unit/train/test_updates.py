"""Number and learning rates of a run's updates, as the settings and the data's length give them."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from golden import refuses, says

from meshtune import config, length
from meshtune.api import build, output
from meshtune.api.resolve import rate_in_words, schedule_of
from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.optim.schedule import learning_rates
from meshtune.rundir import RunDir
from meshtune.schedules import SCHEDULES
from meshtune.units import scientific


def load(*overrides: str) -> Config:
    return config.load(None, ["model.name=x", *overrides])


@pytest.mark.parametrize(
    ("overrides", "rate", "words"),
    [
        ([], 1e-5, "1e-5 (default for method=full), cosine"),
        (["method=lora"], 2e-4, "2e-4 (default for method=lora), cosine"),
        (["method=lora", "train.learning_rate=1e-5"], 1e-5, "1e-5, cosine"),
        (["train.learning_rate=3.5e-4", "train.lr_scheduler=linear"], 3.5e-4, "3.5e-4, linear"),
    ],
)
def test_the_default_learning_rate_is_the_methods_and_is_called_default(
    overrides: list[str], rate: float, words: str
) -> None:
    read = load(*overrides, "train.warmup_steps=2")
    assert read.learning_rate == rate and rate_in_words(read) == words
    assert schedule_of(read, 50)(3) == pytest.approx(rate)  # the first after warm-up


def test_the_run_folder_records_that_the_rate_is_the_default_and_is_the_same_run(tmp_path: Path) -> None:
    """Its config with another method is trained at that method's rate, and says that this is the default."""
    read, file = load("method=lora", f"output={tmp_path}"), tmp_path / "config.yaml"
    file.write_text(output.resolved(read, RunDir(tmp_path)).to_yaml())
    assert "  learning_rate: null  # 2e-4, the default of method lora\n" in file.read_text()
    again = config.load(file, ["method=full", "output=other"])
    assert rate_in_words(again) == "1e-5 (default for method=full), cosine"
    recorded = config.load(file)
    assert output.settings(recorded)["train"]["learning_rate"] == 2e-4  # shown by trackers
    for rate, count in (("2e-4", 0), ("1e-5", 1)):
        other = load("method=lora", f"train.learning_rate={rate}", f"output={tmp_path}")
        assert len(list(output.differences(output.settings(other), output.settings(recorded)))) == count
        file.write_text(output.resolved(other, RunDir(tmp_path)).to_yaml())
        assert config.load(file, ["method=full"]).learning_rate == other.learning_rate  # it was asked for
    assert list(output.differences(output.settings(read), output.settings(recorded))) == []


@pytest.mark.parametrize(
    ("overrides", "steps", "sentence"),
    [
        (["train.global_batch_size=64"], 6, (
            "The run has only 6 updates: 384 sequences x 1 epoch in global batches of 64. Set "
            "train.global_batch_size=19, or train.num_epochs=4, for 20 or more."
        )),
        (["train.global_batch_size=64", "train.num_epochs=3"], 18, "Set train.global_batch_size=57, or"),
        (["train.global_batch_size=64", "train.num_epochs=0.05"], 1, (
            "Set train.num_epochs=4, for 20 or more; a smaller train.global_batch_size needs fewer epochs."
        )),
        (["train.global_batch_size=64", "train.num_epochs=4"], 24, None),
        (["train.global_batch_size=64", "train.max_steps=5"], 5, None),  # asked for
        (["train.global_batch_size=1", "train.num_epochs=0.05"], 20, None),
    ],
)  # fmt: skip
def test_a_global_batch_that_leaves_few_updates_is_named_with_figures_and_the_remedy(
    overrides: list[str], steps: int, sentence: str | None
) -> None:
    said = length.few_updates(load(*overrides), 384, steps)
    assert (sentence in said) if sentence else said == ""


@pytest.mark.parametrize(
    ("overrides", "steps", "sentence"),
    [
        (["max_steps=5", "num_epochs=3"], 5, "5 steps: train.max_steps=5 ends it before"),
        (["max_steps=50", "num_epochs=3"], 18, "18 steps: train.num_epochs=3 ends it before train.max_steps"),
        (["max_steps=18", "num_epochs=3"], 18, "18 steps: train.max_steps=18 ends it before"),
        (["max_steps=1", "num_epochs=3"], 1, "1 step: train.max_steps=1 ends it before"),
        (["max_steps=50"], 50, ""),
        (["total_tokens=1310720"], 10, "10 steps: train.total_tokens=1310720 (a step has 131,072 tokens)."),
        (["total_tokens=1310721"], 11, "11 steps: train.total_tokens=1310721"),
        (["total_tokens=131072"], 1, "1 step: train.total_tokens=131072"),
        (["total_tokens=1e9", "max_steps=7"], 7, "7 steps: train.max_steps=7 ends it before train.total_tok"),
        (["total_tokens=1e6", "max_steps=9", "num_epochs=3"], 8, (
            "8 steps: train.total_tokens=1000000 (a step has 131,072 tokens) ends it before "
            "train.max_steps=9 and train.num_epochs=3."
        )),
        (["total_tokens=1e9", "num_epochs=3"], 18, "18 steps: train.num_epochs=3 ends it before train.total"),
        (["num_epochs=3"], 18, ""),
        ([], 6, ""),
    ],
)  # fmt: skip
def test_the_smaller_of_steps_and_epochs_ends_the_run_and_is_named(
    overrides: list[str], steps: int, sentence: str
) -> None:
    read = load("train.global_batch_size=64", *(f"train.{word}" for word in overrides))
    assert length.steps_of(read, 384) == steps
    said = length.ending(length.limits(read, 384))
    assert said.startswith(f"The run has {sentence}") if sentence else said == ""


def test_tokens_give_a_stream_its_length_and_are_no_fewer_than_a_step_has() -> None:
    read = load("data.streaming=true", "train.total_tokens=20e9")
    assert length.steps_of(read, None) == 152_588 == math.ceil(20e9 / (64 * 2048))
    for words in (["data.streaming=true"], ["data.streaming=true", "train.total_tokens=null"]):
        with refuses(UserError):
            length.steps_of(load(*words), None)
    with refuses(UserError):
        length.steps_of(load("train.total_tokens=131071"), 384)
    for wrong in ("0", "-5", "2.5e0", "many", "1e20"):
        with refuses(UserError):
            load(f"train.total_tokens={wrong}")


def test_the_schedule_spans_the_steps_that_the_tokens_give() -> None:
    by_tokens = load("train.total_tokens=1310720", "train.learning_rate=1")
    by_steps = load("train.max_steps=10", "train.learning_rate=1")
    rates = [
        [schedule_of(read, length.steps_of(read, 99_999))(step) for step in range(1, 11)]
        for read in (by_tokens, by_steps)
    ]
    assert rates[0] == rates[1] and rates[0][-1] < rates[0][1]


def test_the_remedies_for_few_updates_give_twenty() -> None:
    for sequences in (1, 7, 100, 384):
        for size in (1, 8, 64, 500):
            read = load(f"train.global_batch_size={size}")
            if said := length.few_updates(read, sequences, -(-sequences // size)):
                epochs = int(said.split("num_epochs=")[1].split(",")[0])
                assert -(-epochs * sequences // size) >= 20
                if "batch_size=" in said:
                    smaller = int(said.split("batch_size=")[1].split(",")[0])
                    assert -(-sequences // smaller) >= 20


@pytest.mark.parametrize(
    "overrides",
    [
        ["lr_scheduler=cosin"],
        ["lr_scheduler=cosine_with_min_lr"],
        ["lr_scheduler=inverse_sqrt", "min_lr_ratio=0.1"],
        ["lr_scheduler=constant", "warmup_steps=5"],
        ["lr_scheduler=constant", "warmup_ratio=0.1"],
        ["lr_scheduler=linear", "lr_scheduler_kwargs={power: 2}"],
        ["lr_scheduler_kwargs={powr: 2}"],
        ["min_lr_ratio=1.5"],
    ],
)
def test_a_setting_that_the_schedule_does_not_use_is_refused(overrides: list[str]) -> None:
    with refuses(UserError):
        load(*(f"train.{override}" for override in overrides))


def test_the_settings_reach_the_schedule() -> None:
    read = load("train.lr_scheduler=warmup_stable_decay", "train.min_lr_ratio=0.5", "train.warmup_steps=3",
                "train.lr_scheduler_kwargs={num_decay_steps: 8, decay_type: linear}")  # fmt: skip
    made, expected = schedule_of(read, 30), learning_rates(
        "warmup_stable_decay", peak=1e-5, warmup_steps=3, total_steps=30, min_ratio=0.5,
        arguments={"num_decay_steps": 8, "decay_type": "linear"},
    )  # fmt: skip
    assert [made(step) for step in range(1, 31)] == [expected(step) for step in range(1, 31)]
    assert made(30) == pytest.approx(1e-5 * (0.5 + 0.5 / 8))


def test_a_schedule_with_defaults_alone_is_taken() -> None:
    for kind, row in SCHEDULES.items():
        more = ["train.min_lr_ratio=0.1"] if row.needs_floor else []
        rates = schedule_of(load(f"train.lr_scheduler={kind}", *more), 40)
        assert max(rates(step) for step in range(1, 41)) == pytest.approx(1e-5)


def test_small_numbers_are_written_as_in_settings() -> None:
    assert [scientific(n) for n in (2e-4, 1e-5, 1.25e-6, 0.3)] == ["2e-4", "1e-5", "1.25e-6", "3e-1"]


def test_the_first_line_and_the_report_name_the_learning_rate(
    settings: Callable[..., list[str]], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    made = [word for word in settings("log.to=[console, jsonl]") if "train.learning_rate" not in word]
    with patch.object(build.Metrics, "open", wraps=build.Metrics.open) as opened:
        build.build(config.load(None, made))
    assert opened.call_args.kwargs["settings"]["train"]["learning_rate"] == 1e-5  # as dashboards log it
    out = capsys.readouterr()
    assert "Learning rate 1e-5 (default for method=full), cosine." in out.out + out.err
    rows = RunDir(tmp_path / "run").rows("run")
    assert rows.left_out == []  # rundir.py knows what a run writes
    assert rows[0]["learning_rate"] == "1e-5 (default for method=full), cosine"


@pytest.mark.parametrize(
    ("every", "steps"),
    [("200", 200), ("200 steps", 200), ("1 step", 1), ("0", 0), ("1 epoch", 6), ("0.5 epoch", 3),
     (".25 epochs", 2), ("2 epochs", 12), ("0.001 epoch", 1)],
)  # fmt: skip
def test_intervals_are_steps_or_epochs_of_the_data(every: str, steps: int) -> None:
    read = load(f"eval.every={every}", f"checkpoint.every={every}", "train.global_batch_size=64")
    assert read.eval.every == read.checkpoint.every
    assert length.steps_between(read.eval.every, read, 384) == steps
    again = Config.model_validate(yaml.safe_load(read.to_yaml()))
    assert again.eval.every == read.eval.every and type(again.eval.every) is type(read.eval.every)


@pytest.mark.parametrize(
    "every", ["0 epoch", "-1", "-0.5 epoch", "half an epoch", "0.5", "true", "[]", "1e400 epoch", "null"]
)
def test_an_interval_that_is_none_is_refused_with_an_example(every: str) -> None:
    with refuses(UserError):
        load(f"eval.every={every}")


def test_epochs_of_a_stream_are_refused_before_anything_loads() -> None:
    stream = ["data.streaming=true", "train.max_steps=9"]
    with refuses(UserError) as refused:
        load(*stream, "eval.every=0.5 epoch", "checkpoint.every=1 epoch")
    assert len(refused.value.problems) == 2
    assert load(*stream, "eval.every=200 steps").eval.every == 200


def test_an_editor_is_told_both_forms_of_an_interval() -> None:
    pydantic = Config.model_json_schema()["$defs"]["EvalConfig"]["properties"]["every"]["anyOf"]
    assert [form["type"] for form in pydantic] == ["integer", "string"]
    assert re.search(pydantic[1]["pattern"], "0.5 epoch") and re.search(pydantic[1]["pattern"], "200 steps")


@pytest.mark.ci
def test_a_run_evaluates_and_saves_at_parts_of_an_epoch(train: Callable[..., Any]) -> None:
    run = train("eval.every=0.5 epoch", "checkpoint.every=1 epoch", "train.max_steps=8")
    sequences = len(run.loader.dataset) / 4
    half, whole = math.ceil(sequences / 2), math.ceil(sequences)
    assert 1 < half < whole < 8
    assert [row["step"] for row in run.folder.rows("eval")] == [*range(half, 8, half), 8]
    assert set(range(whole, 8, whole)) < set(run.checkpoints.steps())


def test_a_run_that_goes_on_is_not_advised_to_change_its_global_batch() -> None:
    read = load("train.global_batch_size=64", "train.num_epochs=2")
    assert "train.global_batch_size=" in length.few_updates(read, 384, 12)
    says(length.few_updates(read, 384, 12, resumed=True))


@pytest.mark.parametrize(
    ("word", "limit"),
    [("max_steps=30", "max_steps"), ("num_epochs=5", "num_epochs"), ("total_tokens=3.9e6", "total_tokens")],
)
def test_a_run_behind_its_last_step_has_nothing_left_to_train(word: str, limit: str) -> None:
    read = load("train.global_batch_size=64", f"train.{word}")
    said = f"the checkpoint is of step 307, and train.{limit} ends the run after 30 steps. The model of step"
    assert said in length.nothing_left(read, 307, 30)
    assert length.nothing_left(read, 29, 30) == ""
    assert length.length_sentences(read, 384, 30, 307) == [length.nothing_left(read, 307, 30)]
