"""Every page as a reader sees it: charts drawn, nothing wider than the window, no complaint, no request."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
@pytest.mark.parametrize("kind", ["run", "comparison", "plan", "dryrun"])
def test_a_page_draws_its_charts_and_asks_for_nothing(opened, pages, kind, size, scheme):
    window = opened(pages[kind], size, scheme)
    assert window.charts > 1
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert window.page.evaluate(overflow) <= 0
    red, green, blue = window.page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (red + green + blue > 3 * 128) == (scheme == "light")


def test_code_made_from_text_is_refused(opened, pages):
    window = opened(pages["run"])
    window.page.evaluate("setTimeout('window.made = true'); setTimeout(() => { window.later = true })")
    window.wait_for("window.later === true")
    assert not window.page.evaluate("window.made === true")
    refused = [line for line in window.complaints if "unsafe-eval" in line]
    assert refused == window.complaints != []
    window.complaints.clear()


def test_the_pointer_shows_the_values_of_a_step(opened, pages):
    window = opened(pages["run"])
    window.page.locator("#chart-loss canvas").hover(position={"x": 300, "y": 150})
    window.page.locator("#vg-tooltip-element.visible").wait_for()
    (shown,) = window.texts("#vg-tooltip-element")
    assert "at step" in shown and "train" in shown


def test_a_page_is_drawn_again_when_the_window_or_the_theme_changes(opened, pages):
    window = opened(pages["plan"])
    wide = window.page.locator("#chart-memory canvas").bounding_box()["width"]
    window.page.set_viewport_size({"width": 390, "height": 844})
    window.page.emulate_media(color_scheme="dark")
    window.wait_for(
        f"document.querySelector('#chart-memory canvas')?.getBoundingClientRect().width < {wide / 2}"
    )


def test_sliders_of_a_plan_show_another_plan(opened, pages):
    window = opened(pages["plan"])
    before = window.texts("#what-if-tiles dd")
    window.page.locator("#what-if input").first.evaluate(
        "input => { input.value = 0; input.dispatchEvent(new Event('input')); }"
    )
    assert window.texts("#what-if-tiles dd") != before
