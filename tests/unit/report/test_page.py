import csv
import html.parser
import io
import json
import re

import pytest
from golden import says
from page_data import charts_of

from meshtune.meter.parts import PARTS
from meshtune.meter.rows import memory_row
from meshtune.report.draw.colours import COLOURS
from meshtune.report.run.parts import part_panels
from meshtune.report.run.report import report_page, run_page, write_report
from meshtune.units import MIB

NASTY = '</script><script>alert(1)</script><img src=x onerror=alert(2)> & "quoted"'


class Elements(html.parser.HTMLParser):
    """A page as a browser reads it: elements, their attributes, the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def rows_of(chart: dict) -> list[dict[str, str]]:
    """The data of a chart of lines."""
    return list(csv.DictReader(io.StringIO(chart["data"]["values"])))


def test_the_report_is_one_file_that_fetches_nothing(run):
    text = write_report(run).read_text()
    tags = Elements(text).tags
    assert not [tag for tag in tags if tag[0] in ("link", "img", "iframe")]
    assert not [attributes for tag, attributes in tags if tag == "script" and "src" in attributes]
    assert text.count("window.vegaEmbed=") == 1  # the library is inside, once
    assert "default-src 'none'" in text  # and the browser is told to fetch nothing
    assert not re.search(r'"url":', json.dumps(charts_of(text)))


def test_the_report_shows_headline_samples_settings_and_environment(run):
    text = Elements(report_page(run)).text
    assert "tiny, lora fine-tuning" in text and "75.0%" in text and "from 0.0%" in text and "2+2=" in text
    assert "model: {name: tiny}" in text and "config.yaml output=NEW" in text
    assert "versions.torch" in text and "9.9" in text


def test_the_footer_has_machine_versions_and_the_convention_of_mfu(empty, train):
    empty.append({"kind": "run", "device": "a <device>", "meshtune": "0.1", "torch": "9.9", "python": "3"})
    empty.append(train(1))
    footer = run_page(empty).footer
    says(footer)


def test_the_plots_hold_the_numbers_of_the_rows(run):
    rows = rows_of(charts_of(report_page(run))["loss"])
    assert [float(row["y0"]) for row in rows if row["y0"]] == [4.0, 2.0, 1.33333, 1.0]
    assert [int(row["x"]) for row in rows if row["y1"]] == [0, 2, 4]


def test_the_report_has_the_memory_of_the_last_start_as_a_table(run):
    assert "Memory of the first steps" not in report_page(run)
    for step, activations in ((1, 10), (2, 20), (3, 30), (4, 40)):  # resumed after step 2
        sizes = {"weights": 5 * 2**20, "gathered_weights": 0, "activations": activations * 2**20}
        run.append(memory_row(step, {"forward": ((5 + activations) * 2**20, sizes)}))
    text = Elements(report_page(run)).text
    assert "step 3 forward" in text and "step 4 forward" in text and "step 2 forward" not in text
    assert "activations3040" in text and "peak3545" in text and "gathered" not in text


@pytest.mark.all
def test_a_page_of_20_000_steps_is_small_and_its_lines_keep_their_extremes(empty, train, evaluation):
    losses = [3 + (step * 7919 % 1000) / 1000 for step in range(1, 20_001)]
    losses[4_321], losses[15_432] = 99.5, 0.125
    rows = [
        train(step, loss=loss, mfu=0.4 + loss / 100, mfu_6n=0.38 + loss / 100, grad_norm=loss * 1.2345,
              step_seconds=0.1234 + loss / 50, data_seconds=loss / 1000, learning_rate=1e-4 / step,
              tokens_per_second_per_gpu=10_000 * loss)
        for step, loss in enumerate(losses, 1)
    ]  # fmt: skip
    rows += [evaluation(step, 3.21 + 1 / step, exact_match=0.5) for step in range(100, 20_001, 100)]
    empty.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report_page(empty)
    assert len(text.encode()) <= 1.1e6
    assert "Where there are more than 600 steps" in text
    drawn = rows_of(charts_of(text)["loss"])
    assert len(drawn) <= 600
    assert (drawn[0]["x"], drawn[-1]["x"]) == ("1", "20000")
    values = [float(row["y0"]) for row in drawn if row["y0"]]
    assert (max(values), min(values)) == (99.5, 0.125)


def test_many_samples_are_cut_to_a_page_and_counted(empty):
    for number in range(300):
        empty.append_sample({"step": 0, "prompt": f"{number} " + "x" * 1000, "expected": "", "answer": "y"})
    text = report_page(empty)
    assert len(text) < 100_000
    assert re.search(r"2\d\d more are in samples.jsonl", text)


def test_prompts_are_without_control_tokens_and_a_switch_shows_them(run):
    assert "<input" not in report_page(run), "these prompts have no control tokens"
    prompt, question = "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n", "user\n2+2\nassistant"
    run.append_sample({"step": 0, "prompt": prompt, "question": question, "expected": "4", "answer": "5"})
    page = report_page(run)
    assert f"<span class='plain'>{question}</span><span class='exact'>&lt;|im_start|&gt;user" in page
    assert "<input type='checkbox' id='control-tokens'><label for='control-tokens'>" in page
    style = page[page.index("<style>") : page.index("</style>")]
    assert ".samples .exact, #control-tokens:checked ~ .wide .plain { display: none; }" in style
    assert "#control-tokens:checked ~ .wide .exact { display: inline; }" in style
    before_table = page[page.index("<input") : page.index("<table class='facts samples'>")]
    assert before_table.endswith("</label><div class='wide'>"), "the switch is a sibling of what it changes"


def test_samples_are_a_list_on_a_narrow_screen(run):
    page = report_page(run)
    cells = [
        attributes for tag, attributes in Elements(page).tags if tag == "td" and "data-name" in attributes
    ]
    assert [one["data-name"] for one in cells] == ["Prompt", "Expected", "Before", "At step 4"] * 2
    narrow = page[page.index("@media (max-width: 720px)") : page.index("@media print")]
    assert ".samples thead { display: none; }" in narrow
    assert ".samples, .samples tbody, .samples tr, .samples td { display: block; }" in narrow
    assert "content: attr(data-name)" in narrow and "min-width: 0" in narrow
    assert "width=device-width" in page and "overflow-wrap: anywhere" in page


def test_nothing_that_comes_from_data_becomes_markup(empty):
    plain = Elements(report_page(empty)).tags
    empty.append({"kind": "run", "model": NASTY, "method": NASTY, NASTY: NASTY, "versions": {NASTY: [NASTY]}})
    empty.append({"kind": "end", "step": 1, "status": NASTY})
    empty.append_sample({"step": 0, "prompt": NASTY, "expected": NASTY, "answer": NASTY})
    empty.config_file.write_text(f"# {NASTY}\n")
    parsed = Elements(report_page(empty))
    assert [tag for tag, _ in parsed.tags].count("script") == [tag for tag, _ in plain].count("script") == 0
    assert not [attributes for _, attributes in parsed.tags if "onerror" in attributes or "src" in attributes]
    assert parsed.text.count(NASTY) >= 8


def test_an_empty_run_and_a_run_of_one_step_have_a_page(empty, train):
    assert "Nothing has been measured yet." in report_page(empty)
    empty.append(train(1, loss=None, grad_norm=None, peak_memory_bytes=None))
    assert "loss" not in charts_of(report_page(empty))
    assert "speed" in charts_of(report_page(empty))


def test_time_by_part_and_memory_by_category_stand_beside_the_prediction(empty):
    predicted = {
        "parts": {"forward": 0.2, "backward": 0.4},
        "memory": {"weights": 2.0 * MIB, "activations": 1.0 * MIB, "overhead": 5.0 * MIB, "peak": 8.0 * MIB},
        "passes": [[0, "F", 0.0, 0.2, 0, 0], [1, "F", 0.2, 0.6, 1, 0]],
    }
    empty.append({"kind": "run", "layout": "mb1-ga1", "predicted": predicted})
    for step in range(1, 502):
        parts = dict.fromkeys(PARTS, 0.0) | {"forward": 0.1, "backward": 0.2 + 0.1 * (step % 2)}
        warm_up = {"warm_up": True} if step == 1 else {}
        row = {"kind": "time", "step": step, "seconds": sum(parts.values()), "parts": parts}
        empty.append(row | warm_up)
    for step in (2, 3):
        sizes = {"weights": 2 * MIB, "activations": step * MIB}
        phases = {"forward": ((2 + step) * MIB, sizes), "optimizer": (2 * MIB, {"weights": 2 * MIB})}
        empty.append(memory_row(step, phases))
    empty.append({"kind": "passes", "step": 4, "passes": [[0, "F", 0.1, 0.9, 0, 0], [0, "B", 1.0]]})
    empty.append(
        {"kind": "passes", "step": 4, "passes": [[0, "F", 0.1, 0.3, 0, 0], [1, "F", 0.3, 0.9, 1, 0]]}
    )
    panels = {panel.key: panel for panel in part_panels(empty.rows())}
    over = panels["time_parts"]
    assert (
        over.title == "Time of a step by part, means of 3 steps (without step 1: warm-up or watched memory)"
        and len(over.x) == 167
    )
    assert over.texts[0] == "steps 2 to 4" and over.parts["forward"][0] == pytest.approx(0.1)
    assert panels["time_beside"].parts["backward"] == (pytest.approx(0.25), 0.4)
    assert panels["memory_phases"].parts["activations"] == (2, 0, 3, 0, 0)
    assert [mark.text for mark in panels["memory_phases"].sections] == ["step 2", "step 3"]
    assert {band.name for band in panels["memory_phases"].bands} <= {*COLOURS}, "each phase has its colour"
    assert panels["memory_beside"].parts == {"weights": (2, 2), "activations": (3, 1)}
    assert panels["memory_beside"].ends == ("5.00 MiB", "3.00 MiB")
    assert panels["memory_beside"].title.endswith("measured in step 3, and predicted")
    empty.append({"kind": "train", "step": 4, "peak_memory_bytes": 6 * MIB})
    (title,) = (panel.title for panel in part_panels(empty.rows()) if panel.key == "memory_beside")
    assert title.endswith("and predicted; the highest peak of the run is 6.00 MiB"), "as the tile has it"
    pipelines = [panels["pipeline_measured"], panels["pipeline_predicted"]]
    assert [panel.title for panel in pipelines] == [
        "The pipeline in step 4, measured",
        "The pipeline, predicted",
    ]
    assert {panel.x_end for panel in pipelines} == {0.9}, "both have one axis"
    assert [panel.intervals[1].end for panel in pipelines] == [0.9, 0.6]
    assert {*panels} <= {*charts_of(report_page(empty))}
    empty.append({"kind": "run", "layout": "zero3x2-mb1-ga1"})
    for row in [row for row in empty.rows("time") if row["step"] < 4]:
        empty.append(row | {"step": row["step"] + 501})
    title = {panel.key: panel.title for panel in part_panels(empty.rows())}["time_parts"]
    assert (
        title == "Time of a step by part since the last start (without step 502: warm-up or watched memory)"
    )
