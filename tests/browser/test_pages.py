"""Every page as a reader sees it: charts drawn, nothing wider than the window, no complaint, no request."""

import pytest
from browser_looks import LOOKS
from sweeps import bench_row, write_sweep

pytestmark = [pytest.mark.ci, pytest.mark.browser]


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
@pytest.mark.parametrize("kind", ["run", "comparison", "plan", "dryrun", "sweep", "simulated"])
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


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_small_charts_share_the_width_of_the_page(opened, pages, size):
    window = opened(pages["sweep"], size)
    box = window.page.locator("#chart-by_axis_speed").bounding_box()["width"]
    assert box - 60 < window.page.locator("#chart-by_axis_speed canvas").bounding_box()["width"] <= box


def shown(window) -> list[list[str]]:
    """Cells of the rows that the table of a sweep shows, without the box to choose the row."""
    rows = "[...document.querySelectorAll('#experiments tbody tr')]"
    return window.page.evaluate(f"{rows}.map(row => [...row.cells].slice(1).map(cell => cell.textContent))")


def column(window, name: str) -> list[str]:
    """Cells of one column of the table of a sweep."""
    names = window.page.locator("#experiments th button").all_text_contents()
    return [row[names.index(name)] for row in shown(window)]


def test_a_sweeps_table_is_sorted_by_speed_at_first_and_by_any_column(opened, pages):
    window = opened(pages["sweep"])
    speeds = [float(text.replace(",", "")) for text in column(window, "tokens/s/rank") if text]
    assert len(speeds) == 18 and speeds == sorted(speeds, reverse=True)
    assert column(window, "tokens/s/rank")[-2:] == ["", ""]  # those that failed are last
    window.page.locator("#experiments th button", has_text="predicted tokens/s/rank").first.click()
    assert column(window, "status")[-2:] == ["out of memory", "refused"]  # with a predicted speed, too
    head = window.page.locator("#experiments th button", has_text="layout").first
    head.click()
    layouts = column(window, "layout")
    head.click()
    assert column(window, "layout")[0] == [text for text in layouts if text][-1]
    assert window.page.locator("#experiments th[aria-sort=descending]").count() == 1


def test_a_sweeps_table_is_filtered_by_words_and_by_the_values_of_an_axis(opened, pages):
    window = opened(pages["sweep"])
    window.page.get_by_label("status", exact=True).select_option("out of memory")
    (row,) = shown(window)
    assert "Out of <memory> on rank 3." in row
    assert "1 of 20 experiments" in window.texts("#experiments .note")[0]
    window.page.get_by_label("status", exact=True).select_option("all")
    window.page.get_by_label("words").fill("dp2 large")
    assert set(column(window, "model")) == {"large <b>"} and len(shown(window)) == 3
    window.page.get_by_label("words").fill("no such word")
    assert shown(window) == []


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_chosen_experiments_stand_side_by_side(opened, pages, size):
    window = opened(pages["sweep"], size)
    boxes = window.page.locator("#experiments tbody input")
    boxes.nth(0).check()
    assert window.page.locator("#chosen").is_hidden()
    boxes.nth(1).check()
    heads = window.texts("#chosen thead th")
    assert len(heads) == 3 and all(head.startswith("experiment ") for head in heads[1:])
    names = window.texts("#chosen tbody th")
    assert {"layout", "step", "time of a step, measured", "backward", "peak memory, measured"} <= {*names}
    assert "status" not in names  # both are done
    window.page.locator("#chosen button").click()
    assert window.page.locator("#chosen").is_hidden() and not boxes.nth(0).is_checked()


def test_a_thousand_experiments_are_sorted_and_filtered_at_once(opened, command, tmp_path):
    rows = [bench_row("small", 1 + n % 8, 1 + n // 8) for n in range(1000)]
    write_sweep(tmp_path, rows)
    command("report", tmp_path)
    window = opened(tmp_path / "report.html")
    assert len(shown(window)) == 100  # the others come as they are scrolled to
    window.page.locator("#experiments .tall").evaluate("box => { box.scrollTop = box.scrollHeight }")
    window.wait_for("document.querySelectorAll('#experiments tbody tr').length === 200")
    window.page.evaluate(
        """() => {
          const search = document.querySelector("#experiments input[type=search]");
          search.value = "dp3"; search.dispatchEvent(new Event("input"));
          document.querySelector("#experiments th button").click();
        }"""
    )
    assert "125 of 1,000" in window.texts("#experiments .note")[0]
