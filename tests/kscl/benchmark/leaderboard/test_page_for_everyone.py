"""The page on a wide and a narrow screen, by keyboard, with any theme, on paper, with few seeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kscl.commands.leaderboard import write_board
from kscl.records.record import Protocol
from tests.helpers.leaderboard_records import (
    DETECTION,
    MOCO,
    board_of,
    described,
    evaluation,
    kscl,
    linear,
    runs,
    sha,
)
from tests.helpers.page.axe import violations
from tests.helpers.page.board_page import ROWS, all_of, choose, method_button, one, sort_by
from tests.helpers.page.browser import MISSING, open_page

pytestmark = pytest.mark.full

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

LONG = "linear-cached-" + "with-a-very-long-name-" * 4 + "end"
SHEET = 1032  # pixels of a landscape A4 sheet between its margins
FITS = "const d = document.documentElement; return d.scrollWidth <= d.clientWidth"
LEFT = "return arguments[0].getBoundingClientRect().left"

# Where charts and what is in them are: [left, right, top, bottom] each.
BOXES = """
const edges = (element) => {
  const box = element.getBoundingClientRect();
  return [box.left, box.right, box.top, box.bottom];
};
const charts = [...document.querySelectorAll("#charts .chart")];
return charts.filter((chart) => chart.getClientRects().length).map((chart) => {
  const all = (css) => [...chart.querySelectorAll(css)].map(edges);
  return {
    box: edges(chart), marks: all(".whisker, .dot, .bar, .tick"), lines: all(".gridline"),
    data: all(".whisker, .bar"), bars: chart.classList.contains("bars"),
  };
});
"""


@contextmanager
def screen(driver: Any, width: int) -> Iterator[None]:
    size = {"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def settle(page: Any) -> None:
    page.execute_async_script("setTimeout(arguments[0], 150)")


@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_in_either_theme(browser, files, width):
    keys = [row.entry.key for row in files.board.rows[1:4]]
    with screen(browser, width):
        open_page(browser, files.page)
        browser.execute_script("location.hash = arguments[0]", f"compare={' '.join(keys)}")
        browser.execute_script("arguments[0].click()", method_button(browser, 1))
        browser.execute_script("arguments[0].click()", one(browser, ".panel .records summary"))
        settle(browser)
        for theme in ("light", "dark"):
            browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
            assert violations(browser) == []


def test_axe_would_find_what_is_wrong(browser, files):
    open_page(browser, files.page)
    browser.execute_script(
        "document.getElementById('summary').style.color = '#ccc';"
        "document.documentElement.dataset.theme = 'light'"
    )
    assert any(found.startswith("color-contrast") for found in violations(browser))


@pytest.mark.parametrize("width", [1280, 390])
def test_only_the_frame_scrolls_sideways_and_the_methods_stay(page, width):
    with screen(page, width):
        page.refresh()
        page.execute_script("arguments[0].click()", method_button(page, 1))
        settle(page)
        assert page.execute_script(FITS)
        frame, cell = one(page, "#frame"), one(page, f"{ROWS} th.first")
        before = page.execute_script(LEFT, cell)
        page.execute_script("arguments[0].scrollLeft = 300", frame)
        scrolled = page.execute_script("return arguments[0].scrollLeft", frame)
        assert scrolled > 0
        assert page.execute_script(LEFT, cell) == pytest.approx(before, abs=1)
        assert one(page, ".panel").size["width"] <= width


@pytest.mark.parametrize("width", [1280, 390])
def test_names_of_protocols_can_be_read_to_the_end(browser, tmp_path, width):
    records = [
        linear(50, sha("a"), protocol=Protocol(LONG, {"epochs": 1}), details=described("a", 0)),
        linear(60, sha("a"), details=described("a", 0)),
    ]
    file = write_board(board_of(tmp_path / "r", records), tmp_path, formats=["html"])["html"]
    with screen(browser, width):
        open_page(browser, file)
        groups = all_of(browser, ".groups .group")
        assert any(LONG in group.text.replace("\n", "") for group in groups)
        cut = "return arguments[0].scrollWidth > arguments[0].clientWidth + 1"
        assert not any(browser.execute_script(cut, group) for group in groups)
        choose(browser, LONG[:30])
        note = one(browser, "#protocol-note")
        assert "…" not in note.text
        assert not browser.execute_script(cut, note)


def test_a_sorted_column_says_so_and_its_header_is_a_button(page):
    head = sort_by(page, "1/top1")
    assert head.get_attribute("aria-sort") == "descending"
    heads = all_of(page, "thead .names th")
    assert len(all_of(page, "thead .names th > button")) == len(heads)
    assert len(all_of(page, "thead [aria-sort]")) == 1


def test_on_paper_nothing_is_cut_off_and_controls_are_gone(page):
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        with screen(page, SHEET):
            settle(page)
            assert page.execute_script(FITS)
        assert not one(page, ".controls").is_displayed()
        assert not one(page, "#theme").is_displayed()
        style = "const s = getComputedStyle(arguments[0]); return [s.overflow, s.maxHeight]"
        assert page.execute_script(style, one(page, "#frame")) == ["visible", "none"]
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_columns_without_any_value_are_left_out(browser, tmp_path):
    records = [linear(20.0 + i, sha(i), details=described(f"m{i}", 0)) for i in range(2)]
    file = write_board(board_of(tmp_path / "r", records), tmp_path, formats=["html"])["html"]
    open_page(browser, file)
    labels = [button.text for button in all_of(browser, "thead button")]
    assert labels[:2] == ["method", "backbone"]
    assert not {"K", "ρ", "epochs", "rank", "min / epoch", "views/s"} & set(labels)
    assert {"top-1", "top-5"} <= set(labels)


def test_a_protocol_has_columns_by_the_scorers_that_do_not_rank_it(browser, tmp_path):
    metrics = {"AP": 40.0, "coco-101pt/APs": 12.0, "voc10-every-point/AP": 43.0}
    made = evaluation("detection", DETECTION, metrics, sha("a"), details=described("moco", 0))
    file = write_board(board_of(tmp_path / "r", [made]), tmp_path, formats=["html"])["html"]
    open_page(browser, file)
    labels = [button.text for button in all_of(browser, "thead button")]
    shown = [label for label in labels if "AP" in label]
    assert shown == ["AP", "coco-101pt APs", "voc10-every-point AP"]


def test_the_plots_show_a_metric_of_masks(browser, tmp_path):
    metrics = {"AP50": 60.0, "AP": 40.0, "mask/AP": 37.5}
    made = [
        evaluation("detection", DETECTION, metrics, sha(n), details=described(f"m{n}", 0))
        for n in range(2)
    ]
    file = write_board(board_of(tmp_path / "r", made), tmp_path, formats=["html"])["html"]
    open_page(browser, file)
    choose = "const m = arguments[0]; m.value = '0/mask/AP'; m.dispatchEvent(new Event('change'))"
    browser.execute_script(choose, one(browser, "#metric"))
    assert one(browser, "#metric-note").get_attribute("textContent").startswith("mask AP under")
    assert len(all_of(browser, "#plot-bars rect")) == 2


def one_seed(folder: Path) -> Path:
    records = [*runs(kscl(5, 0.4), 68, seeds=1), *runs(MOCO, 67, seeds=1)]
    records.append(linear(21, sha("r"), details=described("random", 0) | {"n": 500}))
    return write_board(board_of(folder / "r", records), folder, formats=["html"])["html"]


def test_with_one_seed_bars_replace_plots_of_a_point_or_two(browser, tmp_path):
    open_page(browser, one_seed(tmp_path))
    settle(browser)
    assert len(all_of(browser, "#plot-bars rect")) == 3
    assert not any(
        one(browser, f"#plot-{name}").is_displayed() for name in ("shots", "rho", "cost")
    )


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("seeds", ["one seed", "several seeds"])
def test_axes_end_at_ticks_and_no_whisker_leaves_its_plot(browser, files, tmp_path, width, seeds):
    with screen(browser, width):
        open_page(browser, files.page if seeds == "several seeds" else one_seed(tmp_path))
        if seeds == "several seeds":
            choose(browser, "shapes-tiny-c4")
        settle(browser)
        boxes = browser.execute_script(BOXES)
        assert any(chart["data"] for chart in boxes)
        for chart in boxes:
            left, right, top, bottom = chart["box"]
            for mark in chart["marks"]:
                assert left - 1 <= mark[0], chart["box"]
                assert mark[1] <= right + 1, (mark, chart["box"])
                assert top - 1 <= mark[2]
                assert mark[3] <= bottom + 1
            # The first and the last tick enclose the data.
            low, high = (0, 1) if chart["bars"] else (2, 3)
            for mark in chart["data"]:
                assert min(line[low] for line in chart["lines"]) <= mark[low] + 1
                assert max(line[high] for line in chart["lines"]) >= mark[high] - 1
