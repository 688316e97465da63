"""`meshtune report A B`: what differs, which figure is best, one page."""

import json

import pytest
from golden import refuses, says
from page_data import charts_of
from rich.console import Console
from rich.text import Text
from terminal import printed

from meshtune.commands.report import report
from meshtune.errors import UserError
from meshtune.report.compare import compare, comparison_page, panels
from meshtune.report.draw.table import Wrapped
from meshtune.rundir import RunDir

CONFIG = """\
model: {{name: tiny}}
data:
  train:
  - {{path: a.jsonl}}
  seq_len: {seq_len}
train: {{learning_rate: {rate}}}
output: runs/{rate}
"""


@pytest.fixture
def other(tmp_path, train, evaluation, run) -> RunDir:
    """A second run: twice the rate, better losses, slower, on newer versions; one of its prompts is new."""
    run.config_file.write_text(CONFIG.format(rate=0.1, seq_len=64))
    other = RunDir(tmp_path / "faster <b>").create()
    other.config_file.write_text(CONFIG.format(rate=0.2, seq_len=64))
    other.append({"kind": "run", "model": "tiny", "world": 1, "versions": {"torch": "10.0"}})
    for row in (
        *(train(step, loss=3.0 / step, tokens_per_second_per_gpu=50.0) for step in (1, 2, 3)),
        evaluation(3, 1.25),
    ):
        other.append(row)
    for prompt, answer in (("3+3=", "6"), ("5+5=", "11")):
        other.append_sample({"step": 3, "prompt": prompt, "expected": None, "answer": answer})
    return other


def lines(of) -> dict:
    return {line.name: line for line in of}


def test_figures_stand_beside_each_other_and_the_best_is_marked(run, other):
    figures = lines(compare([run.path, other.path]).figures)
    assert figures["held-out loss"].cells == ("2.0000", "1.2500")
    assert figures["held-out loss"].best == (False, True)
    assert figures["tokens/s"].cells == ("200", "50")
    assert figures["tokens/s"].best == (True, False)  # more is better
    assert figures["exact match"].cells == ("75.0%", "–")
    assert figures["steps"].best == (False, False)
    assert figures["status"].cells == ("finished", "stopped without an end")


def test_settings_and_versions_that_differ_are_listed_and_no_others(run, other):
    compared = compare([run.path, other.path])
    assert {n: line.cells for n, line in lines(compared.settings).items()} == {
        "train.learning_rate": ("0.1", "0.2")
    }
    assert lines(compared.environment)["versions.torch"].cells == ("9.9", "10.0")
    assert not compared.caution


def test_the_default_rate_is_compared_as_a_number(run, other):
    """Runs with LoRA: one with the default, one with 2e-4 as a setting."""
    tree = "model: {name: tiny}\nmethod: lora\ntrain: {learning_rate: RATE}\n"
    run.config_file.write_text(tree.replace("RATE", "null"))
    for rate, differ in (("2.0e-4", {}), ("1.0e-5", {"train.learning_rate": ("0.0002", "1e-05")})):
        other.config_file.write_text(tree.replace("RATE", rate))
        settings = lines(compare([run.path, other.path]).settings)
        assert {name: line.cells for name, line in settings.items()} == differ


def test_losses_of_other_held_out_tokens_are_not_ranked(run, other):
    other.config_file.write_text(CONFIG.format(rate=0.1, seq_len=128))
    compared = compare([run.path, other.path])
    says(compared.caution)
    assert lines(compared.figures)["held-out loss"].best == (False, False)
    assert lines(compared.figures)["tokens/s"].best == (True, False)


def test_each_run_has_a_curve_of_its_own_colour(run, other):
    drawn = {panel.key: panel for panel in panels(compare([run.path, other.path]))}
    first, second = drawn["loss"].series
    assert (first.name, second.name) == ("run", "faster <b>")
    assert first.colour != second.colour
    assert second.y == (3.0, 1.5, 1.0)
    assert [one.name for one in drawn["exact_match"].series] == ["run"]
    assert {"loss", "eval_loss", "learning_rate", "speed"} <= drawn.keys()


def test_long_runs_are_drawn_as_running_means(run, other, train):
    for step in range(4, 101):
        other.append(train(step))
    drawn = {panel.key: panel for panel in panels(compare([run.path, other.path]))}
    assert drawn["loss"].unit == "per label token, running mean"
    assert [len(one.x) for one in drawn["loss"].series] == [4, 100]
    averaged = [key for key, panel in drawn.items() if "running mean" in panel.unit]
    assert {"learning_rate", "eval_loss"} < drawn.keys() - {*averaged} and {"loss", "speed"} <= {*averaged}


def test_answers_to_a_prompt_stand_side_by_side(run, other):
    samples = {one.prompt: one for one in compare([run.path, other.path]).samples}
    assert list(samples) == ["2+2=", "3+3=", "5+5="]
    assert samples["3+3="].answers == ("7", "6")
    assert samples["5+5="].answers[0] is None
    assert samples["3+3="].expected == "6"


def test_the_page_is_whole_and_what_comes_from_runs_is_escaped(run, other):
    text = comparison_page(compare([run.path, other.path])).html()
    assert text.count("window.vegaEmbed=") == 1
    assert "<b>" not in text
    charts = charts_of(text)
    colour = next(
        layer["encoding"]["color"] for layer in charts["loss"]["layer"] if "color" in layer["encoding"]
    )
    assert colour["scale"] == {"domain": ["run", "faster <b>"], "range": ["#0072b2", "#d55e00"]}
    y = charts["grad_norm"]["layer"][0]["encoding"]["y"]
    assert y["axis"]["title"] == "L2 norm"
    for shown in ("Settings that differ", "train.learning_rate", "versions.torch", "3+3=", "MFU counts"):
        assert shown in text


def test_the_command_writes_the_page_and_prints_the_figures(run, other, tmp_path, capsys):
    report([run.path, other.path])
    out, progress = capsys.readouterr()
    assert progress == f"meshtune: reading {run.path}, {other.path} and drawing the page …\n"
    assert out.splitlines()[-1] == str(tmp_path / "comparison.html")
    assert "train.learning_rate" in out
    report([run.path, other.path], out=tmp_path / "here.html", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["report"] == str(tmp_path / "here.html")
    assert facts["settings"] == {"train.learning_rate": ["0.1", "0.2"]}
    assert facts["runs"][1]["last_eval_loss"] == 1.25


def test_runs_that_can_not_be_compared_are_refused(run, tmp_path):
    with pytest.raises(UserError) as caught:
        report([run.path, tmp_path / "a", tmp_path / "b"])
    assert [problem.split(" holds")[0] for problem in caught.value.problems] == [
        str(tmp_path / "a"), str(tmp_path / "b"),
    ]  # fmt: skip
    with refuses(UserError):
        compare([run.path, run.path])


def test_folders_of_the_same_name_are_told_apart_by_their_paths(run, tmp_path):
    twin = RunDir(tmp_path / "twin" / "run").create()
    twin.append({"kind": "run", "world": 1})
    compared = compare([run.path, twin.path])
    assert compared.names == ("run", "twin/run")
    comparison_page(compared)


def test_facts_are_words_and_a_long_path_breaks_after_a_slash(run, other, monkeypatch, capsys):
    run.append({"kind": "run", "trainable_parameters": 642176, "loss_function": None})
    other.append({"kind": "run", "trainable_parameters": 2432, "loss_function": "mine.loss"})
    paths = [f"/shared/{name}/corpora/conversations/train.jsonl" for name in ("first", "other")]
    for each, path in zip((run, other), paths, strict=True):
        each.config_file.write_text(f"data: {{train: {path}, max_samples: {'null' if each is run else 9}}}\n")
    compared = compare([run.path, other.path])
    assert compared.as_dict()["environment"]["trainable_parameters"] == ["642176", "2432"]
    assert "trainable parameters" in comparison_page(compared).html()
    monkeypatch.setenv("COLUMNS", "80")
    Console(width=80).print(comparison_page(compared))
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if "trainable" in line)
    assert line.split() == ["trainable", "parameters", "642,176", "2,432"]
    (line,) = (line for line in out.splitlines() if "loss function" in line)
    assert line.split()[2:] == ["–", "mine.loss"]
    (line,) = (line for line in out.splitlines() if "max_samples" in line)
    assert line.split() == ["data.max_samples", "–", "9"]
    assert "/shared/first/corpora/" in out and " conversations/train.jsonl" in out


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a/b", ["a/b"]),
        ("/data/rows/a.jsonl", ["/data/", "rows/", "a.jsonl"]),
        ("a" * 12, ["a" * 8, "a" * 4]),
    ],
)
def test_lines_end_after_slashes(text, lines):
    assert printed(Wrapped(Text(text)), 8).split() == lines


def test_what_an_earlier_version_lacked_and_is_off_is_no_difference(run, other):
    run.config_file.write_text(CONFIG.format(rate=0.2, seq_len=64) + "new: {on: false, list: [], rate: 3}\n")
    assert {n: line.cells for n, line in lines(compare([run.path, other.path]).settings).items()} == {
        "new.rate": ("3", "–")
    }


def test_losses_of_other_parts_of_the_training_rows_are_not_ranked(run, other):
    run.config_file.write_text("data: {train: [{path: a.jsonl}], eval_split: 0.1}\n")
    other.config_file.write_text("data: {train: [{path: b.jsonl}], eval_split: 0.1}\n")
    says(compare([run.path, other.path]).caution)
