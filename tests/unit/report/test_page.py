import html.parser
import json
import re

from meshtune.report.page import page, write_report

NASTY = '</script><script>alert(1)</script><img src=x onerror=alert(2)> & "quoted"'


class Elements(html.parser.HTMLParser):
    """What a browser would make of a page: elements, their attributes, the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def figures_of(text: str) -> dict:
    found = re.search(r"const FIGURES = (\{.*?\}), THEMES = ", text)
    return json.loads(found[1]) if found else {}


def test_the_report_is_one_file_that_fetches_nothing(run):
    text = write_report(run).read_text()
    tags = Elements(text).tags
    assert not [tag for tag in tags if tag[0] in ("link", "img", "iframe")]
    assert not [attributes for tag, attributes in tags if tag == "script" and "src" in attributes]
    assert text.count("plotly.js v") == 1  # its banner: the library is inside, once


def test_the_report_shows_headline_samples_settings_and_environment(run):
    text = Elements(page(run)).text
    for shown in (
        "tiny, lora fine-tuning",
        "75.0%",
        "from 0.0%",
        "2+2=",
        "model: {name: tiny}",
        "versions.torch",
        "9.9",
    ):
        assert shown in text


def test_the_plots_hold_the_numbers_of_the_rows(run):
    trained, held_out = figures_of(page(run))["loss"]["data"]
    assert trained["y"] == [4.0, 2.0, 1.33333, 1.0]
    assert held_out["x"] == [0, 2, 4]


def test_nothing_that_comes_from_data_becomes_markup(empty):
    plain = Elements(page(empty)).tags
    empty.append({"kind": "run", "model": NASTY, "method": NASTY, NASTY: NASTY, "versions": {NASTY: [NASTY]}})
    empty.append({"kind": "end", "step": 1, "status": NASTY})
    empty.append_sample({"step": 0, "prompt": NASTY, "expected": NASTY, "answer": NASTY})
    empty.config_file.write_text(f"# {NASTY}\n")
    parsed = Elements(page(empty))
    assert [tag for tag, _ in parsed.tags].count("script") == [tag for tag, _ in plain].count("script") == 0
    assert not [attributes for _, attributes in parsed.tags if "onerror" in attributes or "src" in attributes]
    assert parsed.text.count(NASTY) >= 8


def test_an_empty_run_and_a_run_of_one_step_have_a_page(empty, train):
    assert "Nothing has been measured yet." in page(empty)
    empty.append(train(1, loss=None, grad_norm=None, peak_memory_bytes=None))
    assert "loss" not in figures_of(page(empty))
    assert "speed" in figures_of(page(empty))
