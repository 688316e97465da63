"""Length and price of a whole run: prices by kind, epochs that `meshtune data` has counted."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from golden import refuses, says
from made_plans import load, workload
from rich.console import Console

from meshtune import config
from meshtune.api.resolve import inputs_of
from meshtune.data.pack import Dataset
from meshtune.errors import UserError
from meshtune.length import steps_of
from meshtune.plan.cluster import cluster_of, prices_of
from meshtune.plan.cost import run_length
from meshtune.plan.explanation import explain
from meshtune.plan.hardware import catalogue
from meshtune.report.plan.documents import explained
from meshtune.sections import ClusterConfig
from meshtune.units import money

Settings = Callable[..., list[str]]


# prices #


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.toml", 'currency = "EUR"\nh100-sxm = 2.5\nmi300x = 2\n'),
        ("p.yaml", "currency: EUR\nh100-sxm: 2.5\nmi300x: 2\n"),
    ],
)
def test_a_file_has_the_prices_of_several_kinds_and_their_currency(
    name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    for gpu, price in (("h100-sxm", 2.5), ("mi300x", 2), ("a100-80", None)):
        cluster = cluster_of(ClusterConfig(gpu=gpu, price_per_gpu_hour=str(tmp_path / name)))
        assert (cluster.price, cluster.currency) == (price, "EUR")


def test_a_number_is_the_price_of_the_clusters_kind() -> None:
    assert prices_of(2.5, "h100-sxm", catalogue()) == ({"h100-sxm": 2.5}, "")
    assert prices_of(None, "h100-sxm", catalogue()) == ({}, "")
    table = {"mi300x": 1.5, "currency": "USD"}
    assert prices_of(table, "h100-sxm", catalogue()) == ({"mi300x": 1.5}, "USD")


def test_every_wrong_price_is_named(tmp_path: Path) -> None:
    table = {"h100": 2, "mi300x": -1, "a100-80": "two", "currency": 3, "nonsense": 1}
    with refuses(UserError) as refused:
        prices_of(table, "h100-sxm", catalogue())
    assert len(refused.value.problems) == 5
    (tmp_path / "bad.toml").write_text("h100-sxm = ")
    for file in ("bad.toml", "none.toml"):
        with refuses(UserError):
            prices_of(str(tmp_path / file), "h100-sxm", catalogue())
    for wrong in ("-3", "[1]", "true", ".inf", "{a: {b: 1}}"):
        with refuses(UserError):
            load(f"cluster.price_per_gpu_hour={wrong}")


def test_amounts_have_their_currency_and_no_exponent() -> None:
    assert money(0.0951, "USD") == "0.0951 USD" and money(398.127) == "398.13"
    assert money(1_234_567.8, "EUR") == "1,234,568 EUR" and money(0.00004) == "0.0000400"


# length #


def test_limits_without_data_give_steps_and_tokens_and_say_what_may_end_the_run_sooner() -> None:
    length = run_length(load("train.max_steps=100"))
    assert (length.steps, length.tokens, length.notes) == (100, 100 * 64 * 2048, ())
    both = run_length(load("train.max_steps=100", "train.num_epochs=3"))
    assert both.steps == 100
    says(both.notes)
    stream = run_length(load("data.streaming=true", "data.train=a.jsonl", "train.total_tokens=1e9"))
    says(stream.notes[0])
    assert stream.steps == 7630


def test_an_unknown_length_is_said_where_it_was_asked_for() -> None:
    assert run_length(load()).notes == ()
    for asked in ("train.num_epochs=2", "cluster.price_per_gpu_hour=2"):
        length = run_length(load(asked))
        assert length.steps is None
        says(length.notes[0])


def test_epochs_are_those_that_the_data_command_counted(settings: Settings, tmp_path: Path) -> None:
    words = settings("train.max_steps=null", "train.num_epochs=3", "train.global_batch_size=2")
    (tmp_path / "rows.jsonl").write_bytes(Path(words[1].partition("=")[2]).read_bytes())
    words.append(f"data.train={tmp_path / 'rows.jsonl'}")
    read = config.load(None, words)
    says(run_length(read).notes[0])
    train = inputs_of(read).prepared.train
    assert isinstance(train, Dataset)
    length = run_length(read)
    assert length.steps == steps_of(read, len(train)) and not length.missing
    assert length.tokens == length.steps * 2 * 128
    longer = config.load(None, [*words, "train.max_steps=100000"])
    assert run_length(longer).steps == length.steps == steps_of(longer, len(train))
    says(run_length(longer).notes[0])
    (shorter,) = (note for note in length.notes if "mean_document_tokens" in note)
    mean = round(train.mean_document_tokens)
    assert shorter.startswith(
        f"Documents of the rows have {mean} tokens (mean over tokens), those of the plan"
    )
    assert run_length(config.load(None, [*words, f"data.mean_document_tokens={mean}"])).notes == ()
    other = config.load(None, [*words, "data.seq_len=64"])
    assert run_length(other).steps is None, "other settings were not counted"
    elsewhere = config.load(None, [*words, "train.global_batch_size=4", "data.mean_document_tokens=9"])
    assert run_length(elsewhere).steps == steps_of(elsewhere, len(train))
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    says(run_length(read).notes[0])


def test_an_explained_layout_has_hours_and_price_unless_its_batch_is_another() -> None:
    planned = workload(seq_len=2048)
    kind = next(name for name, gpu in catalogue().items() if gpu.node == 8 and not gpu.measured)
    read = load(f"cluster.gpu={kind}", "cluster.price_per_gpu_hour=2", "train.max_steps=100")
    one = explain(read, planned, "zero3x8-mb1-ga8")
    assert one.run.seconds == 100 * one.choice.seconds.total and one.run.cost == 2 * one.run.gpu_hours
    assert one.as_dict()["run"] == vars(one.run)
    file = io.StringIO()
    Console(file=file, width=120).print(explained([one]))
    assert one.run.sentence() in " ".join(file.getvalue().split())
    assert f"8 x {kind} (not measured)" in file.getvalue()
    assert explain(read, planned, "zero3x8-mb1-ga4").run.seconds is None
