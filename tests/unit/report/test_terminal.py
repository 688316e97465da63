import runpy
import xml.etree.ElementTree as ElementTree

import pytest
from rich.text import Text

from meshtune.report.run.tables import curve, resampled


def test_a_falling_curve_starts_at_the_top_left_and_ends_at_the_bottom_right():
    lines = curve([4.0, 3.0, 2.0, 1.0], steps=(1, 4), width=16, height=4).plain.splitlines()
    assert lines[0].startswith("4 ┤───")
    assert lines[3].startswith("1 ┤")
    assert lines[3].endswith("╰───")
    assert lines[4].split() == ["└", "1", "─" * 11, "4"]


def test_every_column_of_a_curve_is_drawn():
    lines = curve(
        [float(value % 7) for value in range(40)], steps=(1, 40), width=40, height=6
    ).plain.splitlines()[:6]
    assert all(any(line[3 + column : 4 + column].strip() for line in lines) for column in range(40))


@pytest.mark.parametrize("values", [[], [2.0], [3.0, 3.0, 3.0]])
def test_a_curve_of_nothing_of_one_value_and_of_equal_values_is_no_error(values):
    assert curve(values, steps=(1, max(1, len(values)))).plain


def test_resampling_keeps_the_mean():
    assert resampled([1.0, 2.0, 3.0, 4.0], 2) == [1.5, 3.5]
    assert resampled([1.0, 2.0], 4) == [1.0, 1.0, 2.0, 2.0]


def test_the_picture_is_one_svg_that_fetches_nothing():
    script = runpy.run_path("scripts/readme_picture.py")
    terminal_picture, prompt = script["terminal_picture"], script["prompt"]
    svg = terminal_picture(prompt("meshtune train a.yaml"), Text("loss <1> & falling"))
    text = "".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ")
    assert "meshtune train a.yaml" in text
    assert "loss <1> & falling" in text
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
