"""The leaderboard's page in a real Chromium, opened from a file, as a reader uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

from kscl.benchmark.leaderboard import page as page_package
from kscl.benchmark.leaderboard.rows import build_board
from kscl.commands.leaderboard import write_board
from kscl.records.record import Protocol
from tests.helpers.leaderboard_records import (
    DETECTION,
    MOCO,
    PNG,
    board_of,
    described,
    detection,
    evaluation,
    kscl,
    linear,
    pretraining,
    runs,
    sha,
    write_all,
)
from tests.helpers.page.axe import violations
from tests.helpers.page.board_page import (
    HOSTILE,
    ROWS,
    all_of,
    choose,
    column,
    follow,
    method_button,
    one,
    sort_by,
)
from tests.helpers.page.browser import MISSING, complaints, open_page

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.full


def open_board(browser: Any, folder: Path, records: list[Any], **options: Any) -> None:
    """Open the page of a board that is made of these records."""
    board = board_of(folder / "records", records, **options)
    open_page(browser, write_board(board, folder, formats=["html"])["html"])


def test_it_opens_from_a_file_and_asks_nobody(page, files):
    assert page.title == "KSCL leaderboard"
    assert one(page, "#summary").text == "8 rows · 75 records · 5 protocols"
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert len(all_of(page, ROWS)) == len(files.board.rows)


def test_its_policy_lets_no_request_out(browser, tmp_path, files):
    """Even a program inside the page could not call home: the browser refuses."""
    open_page(browser, files.page)
    script = """
    const done = arguments[arguments.length - 1];
    document.addEventListener("securitypolicyviolation", (e) => done(e.violatedDirective));
    fetch("https://example.org/").catch(() => {});
    """
    assert browser.execute_async_script(script) == "connect-src"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [("70", "70 + 1.5e-14", [60, 70, 80]), ("0", "10", [0, 5, 10]), ("1", "Infinity", [])],
)
def test_an_axis_has_ticks_even_if_values_differ_by_rounding_alone(page, low, high, expected):
    source = Path(page_package.__file__).with_name("plots.js").read_text()
    function = source[source.index("function niceTicks") :].partition("\n}\n")[0] + "}"
    assert page.execute_script(f"{function}; return niceTicks({low}, {high}, 2)") == expected


def test_a_click_on_a_column_sorts_by_it_and_another_turns_it_round(page):
    head = sort_by(page, "1/top1")
    values = [float(value) for value in column(page, "1/top1") if value]
    assert values == sorted(values, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    sort_by(page, "1/top1")
    values = [float(value) for value in column(page, "1/top1") if value]
    assert values == sorted(values)
    assert head.get_attribute("aria-sort") == "ascending"
    assert one(page, "#status").text == "Sorted by top-1 (b), ascending."
    names = sort_by(page, "method")
    assert names.get_attribute("aria-sort") == "ascending"
    assert len(all_of(page, "thead [aria-sort]")) == 1
    assert len(all_of(page, "thead .names th > button")) == len(all_of(page, "thead .names th"))
    assert column(page, "method") == sorted(column(page, "method"))


def test_rows_without_a_value_come_last_in_both_directions(page):
    for _ in range(2):
        sort_by(page, "4/AP")
        values = column(page, "4/AP")
        assert values[0]
        assert set(values[1:]) == {""}


def test_an_opened_row_moves_with_its_panel(page):
    method_button(page, 0).click()
    sort_by(page, "1/top1")
    sort_by(page, "1/top1")
    opened = one(page, "#rows tr.opened")
    assert "panel-row" in page.execute_script(
        "return arguments[0].nextElementSibling.className", opened
    )


def test_a_protocol_shows_its_own_rows_and_columns_only(page):
    choose(page, "shapes-tiny-c4")
    labels = [button.text for button in all_of(page, "thead button")]
    assert labels[:9] == [
        *("method", "AP", "95% interval", "rank", "AP50", "AP75", "epochs", "K", "ρ"),
    ]
    assert one(page, "#shared").text.startswith("All rows: backbone resnet50")
    assert "top-1" not in labels
    assert len(all_of(page, ROWS)) == 6
    assert column(page, "rank") == ["1", "1", "1", "4", "5", "6"]
    assert len(all_of(page, ".badge.tied")) == 2


def test_a_row_with_one_seed_has_no_rank_and_says_so(page):
    choose(page, "linear-cached")
    assert column(page, "method")[0] == "supervised"
    assert column(page, "rank")[0] == "–"
    assert one(page, f"{ROWS} .badge.single").text == "one seed"
    assert "test sampling only" in one(page, f"{ROWS} .interval").get_attribute("title")


def test_reported_rows_stand_apart_unranked_and_can_be_hidden(page):
    choose(page, "voc0712-c4-24k-moco")
    reported = all_of(page, "#reported-rows tr.reported")
    assert len(reported) == 6
    assert all("reported" in row.text for row in reported)
    assert not any(cell.text for cell in all_of(page, "#reported-rows .col-rank"))
    sort_by(page, "4/AP")
    assert len(all_of(page, ROWS)) == 1
    reported[0].find_element(By.CSS_SELECTOR, "button.open").click()
    assert "detection/README" in one(page, ".panel").text
    one(page, "#reported").click()
    assert not one(page, "#reported-rows").is_displayed()


def test_rows_are_filtered_by_method_and_by_text(page):
    chip = next(chip for chip in all_of(page, ".chip") if chip.text == "moco_v2")
    chip.click()
    assert column(page, "method") == ["moco_v2"]
    assert chip.get_attribute("aria-pressed") == "true"
    assert one(page, "#status").text == "1 of 8 rows"
    chip.click()
    one(page, "#search").send_keys("temperature 0.1")
    assert column(page, "method") == ["kscl"]
    one(page, "#search").clear()
    one(page, "#search").send_keys("no such thing")
    assert column(page, "method") == []


def test_a_row_opens_to_its_provenance(page, files):
    row = files.board.rows[1]
    method_button(page, 1).click()
    panel = one(page, ".panel")
    for _ in range(2):  # the records, and then what is folded inside them
        page.execute_script(
            "document.querySelectorAll('.panel details').forEach(d => d.open = true)"
        )
        page.execute_async_script("setTimeout(arguments[0], 100)")
    told = page.execute_script("return arguments[0].textContent", panel)
    made = row.pretrainings[0].record
    wanted = [
        *(made.config.hash, row.entry.config, made.code.source_hash),
        *(made.code.commit or "")[:10].split(),
        *(made.data["train"]["hash"], made.details["outputs"]["backbone"]),
        *("0, 1, 2", "tolerance", "NUM_SHOTS", "torch", "cores", "iterations"),
        "kscl reproduce FOLDER/run_",
    ]
    for words in wanted:
        assert words in told, words
    assert len(panel.find_elements(By.CSS_SELECTOR, ".records > details")) == len(row.records)
    target = panel.find_element(By.CSS_SELECTOR, ".record a").get_attribute("href")
    assert Path(unquote(urlparse(target).path)) in {file.path for file in row.records}


def test_a_row_shows_its_curves_classes_and_basis_images(page):
    method_button(page, 1).click()
    panel = one(page, ".panel")
    assert len(panel.find_elements(By.CSS_SELECTOR, ".plot.curves path")) == 3
    assert len(panel.find_elements(By.CSS_SELECTOR, ".plot.classes circle")) == 6
    image = panel.find_element(By.CSS_SELECTOR, ".basis img")
    assert page.execute_script("return arguments[0].naturalWidth", image) == 1


def test_a_stale_row_is_marked_and_says_why(page):
    (badge,) = all_of(page, ".badge.stale")
    assert badge.get_attribute("title") == "code was aaaa, is bbbb"
    method_button(page, 2).click()
    assert "code was aaaa, is bbbb" in one(page, ".panel .notice").text


def test_a_hostile_name_is_shown_and_does_nothing(page):
    sort_by(page, "method")
    button = next(b for b in all_of(page, f"{ROWS} button.open") if "onerror" in b.text)
    assert HOSTILE in button.text
    button.click()
    one(page, ".panel .records summary").click()
    assert HOSTILE in one(page, ".panel .records").text
    assert page.title == "KSCL leaderboard"
    assert all_of(page, "img[src='x']") == []
    assert len(all_of(page, "script")) == 2


def test_plots_show_the_rows_that_the_filters_leave(page):
    choose(page, "shapes-tiny-c4")

    def dots(plot: str) -> int:
        page.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 50))")
        return len(all_of(page, f"#plot-{plot} circle"))

    assert dots("shots") == 5  # random has no K
    assert dots("rho") == 4
    assert dots("cost") == 5
    assert dots("classes") == 6 * 6
    assert one(page, "#plot-classes").is_displayed()
    assert len(all_of(page, "#plot-curves path")) == 14
    next(chip for chip in all_of(page, ".chip") if chip.text == "moco_v2").click()
    assert dots("shots") == 0  # one point, which no line joins with another
    assert dots("rows") == 1
    assert len(all_of(page, "#plot-curves path")) == 3
    title = page.execute_script(
        "return document.querySelector('#plot-rows circle').parentNode.textContent"
    )
    assert title.startswith("moco_v2 · resnet50 · K 1 · 200 epochs")
    choose(page, "imagenet-linear-moco")
    assert dots("classes") == 0
    assert not one(page, "#plot-classes").is_displayed()  # no record of it has classes


def test_files_that_were_not_counted_are_named(page):
    assert "broken/record.json: It is not readable as JSON" in one(page, ".problems").text


def test_of_many_rows_those_are_in_the_page_that_one_has_come_to(browser, tmp_path):
    records = [linear(20 + i / 10, sha(i), details=described(f"m{i}", 0)) for i in range(200)]
    open_board(browser, tmp_path, records)
    assert 0 < len(all_of(browser, ROWS)) < 200
    assert column(browser, "method")[0] == "m199"
    sort_by(browser, "0/top1")
    sort_by(browser, "0/top1")
    assert column(browser, "method")[0] == "m0"
    first = method_button(browser, 0)
    browser.execute_script("arguments[0].focus()", first)
    first.send_keys(Keys.END)
    assert len(all_of(browser, ROWS)) == 200
    assert browser.switch_to.active_element.text.startswith("m199")
    assert complaints(browser) == []


@pytest.mark.parametrize("what", ["only pretrainings", "odd details"])
def test_a_board_with_little_to_show_opens_all_the_same(browser, tmp_path, what):
    odd = {"curves": {"loss": [1, "x", None]}, "per_class": {"a": None}, "certificate": None}
    records = [pretraining(details={"curves": {"epoch": [1, 2], "loss": [2, 1]}})]
    if what == "odd details":
        made = pretraining(details=odd)
        backbone = made["details"]["outputs"]["backbone"]
        records = [made, linear(50, backbone, details=odd, data={"val": {"hash": "a", "path": 3}})]
    open_board(browser, tmp_path, records)
    method_button(browser, 0).click()
    for fold in all_of(browser, ".panel .records > details > summary"):
        fold.click()
    assert all_of(browser, ".panel .facts")
    assert complaints(browser) == []


def test_everything_works_from_the_keyboard(page):
    first = method_button(page, 0)
    page.execute_script("arguments[0].focus()", first)
    focused = page.switch_to.active_element
    focused.send_keys(Keys.ENTER)
    assert first.get_attribute("aria-expanded") == "true"
    focused.send_keys(Keys.ARROW_DOWN)
    assert page.switch_to.active_element == method_button(page, 1)
    page.switch_to.active_element.send_keys(Keys.END)
    assert page.switch_to.active_element == method_button(page, -1)
    page.switch_to.active_element.send_keys(Keys.HOME)
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert first.get_attribute("aria-expanded") == "false"
    assert page.switch_to.active_element == first
    first.send_keys("/")
    assert page.switch_to.active_element == one(page, "#search")
    header = one(page, 'thead button[data-key="method"]')
    page.execute_script("arguments[0].focus()", header)
    header.send_keys(Keys.SPACE)
    assert column(page, "method") == sorted(column(page, "method"))


def test_tab_reaches_every_control_and_what_has_the_focus_is_seen(page):
    page.execute_script("document.activeElement.blur()")
    seen = []
    for _ in range(14):
        page.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(page.switch_to.active_element)
    ids = {element.get_attribute("id") for element in seen}
    assert {"theme", "protocol", "search", "frame"} <= ids
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert page.execute_script(outline) == "solid"


def brightness(page: Any) -> int:
    color = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in color.strip("rgb()").split(",")[:3])


def test_it_is_light_or_dark_as_the_system_or_the_reader_wishes(page):
    def system(scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    try:
        system("dark")
        assert brightness(page) < 150
        system("light")
        assert brightness(page) > 600
        theme = one(page, "#theme")
        theme.click()
        theme.click()
        assert theme.text == "Theme: dark"
        assert brightness(page) < 150
        system("dark")
        theme.click()
        theme.click()
        assert theme.text == "Theme: light"
        assert brightness(page) > 600
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


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
const charts = [...document.querySelectorAll("#plot-rows .chart, #charts .chart")];
return charts.filter((chart) => chart.getClientRects().length).map((chart) => {
  const all = (css) => [...chart.querySelectorAll(css)].map(edges);
  return {
    box: edges(chart), marks: all(".whisker, .dot, .tick"), lines: all(".gridline"),
    data: all(".whisker"), bars: chart.classList.contains("bars"),
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
        follow(browser, f"compare={' '.join(keys)}")
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


def test_a_phone_shows_each_method_and_its_headline_without_scrolling(page, files):
    with screen(page, 390):
        page.refresh()
        settle(page)
        cells = all_of(page, f"{ROWS} > .col-0-top1 .value")
        assert [cell.text for cell in cells]
        right = "return arguments[0].getBoundingClientRect().right"
        assert all(page.execute_script(right, cell) < 390 for cell in cells)
        # The answer, the chart and the table come in this order.
        tops = [one(page, css).location["y"] for css in ("#answer", "#chart", "#board")]
        assert tops == sorted(tops)


def test_predictions_on_test_images_are_shown_beside_the_truth(browser, tmp_path):
    names = ("random", *(f"m{number}" for number in range(4)))
    made = [
        detection(30.0 + i, sha(name), details=described(name, 0) | {"pictures": "found.png"})
        for i, name in enumerate(names)
    ]
    folder = write_all(tmp_path / "r", made)
    for run in folder.iterdir():
        (run / "found.png").write_bytes(PNG)
    board = build_board([folder], check_stale=False, with_reported=False)
    open_page(browser, write_board(board, tmp_path, formats=["html"])["html"])
    captions = [it.text for it in all_of(browser, "#pictures figcaption")]
    assert captions == ["m3: AP 34.0", "m2: AP 33.0", "m1: AP 32.0", "random: AP 30.0"]
    widths = "return [...document.querySelectorAll('#pictures img')].map((i) => i.naturalWidth)"
    assert browser.execute_script(widths) == [1, 1, 1, 1]


@pytest.mark.parametrize("width", [1280, 390])
def test_names_of_protocols_can_be_read_to_the_end(browser, tmp_path, width):
    records = [
        linear(50, sha("a"), protocol=Protocol(LONG, {"epochs": 1}), details=described("a", 0)),
        linear(60, sha("a"), details=described("a", 0)),
    ]
    with screen(browser, width):
        open_board(browser, tmp_path, records)
        groups = all_of(browser, ".groups .group")
        assert any(LONG in group.text.replace("\n", "") for group in groups)
        cut = "return arguments[0].scrollWidth > arguments[0].clientWidth + 1"
        assert not any(browser.execute_script(cut, group) for group in groups)
        choose(browser, LONG[:30])
        note = one(browser, "#protocol-note")
        assert "…" not in note.text
        assert not browser.execute_script(cut, note)


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
    open_board(browser, tmp_path, records)
    labels = [button.text for button in all_of(browser, "thead button")]
    assert labels[:2] == ["method", "top-1"]
    assert not {"backbone", "K", "ρ", "epochs", "rank", "min / epoch", "views/s"} & set(labels)
    assert {"top-1", "top-5"} <= set(labels)


def test_a_protocol_has_columns_by_the_scorers_that_do_not_rank_it(browser, tmp_path):
    metrics = {"AP": 40.0, "coco-101pt/APs": 12.0, "voc10-every-point/AP": 43.0}
    made = evaluation("detection", DETECTION, metrics, sha("a"), details=described("moco", 0))
    open_board(browser, tmp_path, [made])
    labels = [button.text for button in all_of(browser, "thead button")]
    shown = [label for label in labels if "AP" in label]
    assert shown == ["AP", "coco-101pt APs", "voc10-every-point AP"]


def test_the_plots_show_a_metric_of_masks(browser, tmp_path):
    metrics = {"AP50": 60.0, "AP": 40.0, "mask/AP": 37.5}
    made = [
        evaluation("detection", DETECTION, metrics, sha(n), details=described(f"m{n}", 0))
        for n in range(2)
    ]
    open_board(browser, tmp_path, made)
    choose = "const m = arguments[0]; m.value = '0/mask/AP'; m.dispatchEvent(new Event('change'))"
    browser.execute_script(choose, one(browser, "#metric"))
    assert one(browser, "#metric-note").get_attribute("textContent").startswith("mask AP under")
    assert len(all_of(browser, "#plot-rows circle")) == 2


def open_one_seed(browser: Any, folder: Path) -> None:
    records = [*runs(kscl(5, 0.4), 68, seeds=1), *runs(MOCO, 67, seeds=1)]
    records.append(linear(21, sha("r"), details=described("random", 0) | {"n": 500}))
    open_board(browser, folder, records)


def test_every_row_has_a_dot_and_plots_of_a_point_or_two_are_not_drawn(browser, tmp_path):
    open_one_seed(browser, tmp_path)
    settle(browser)
    assert len(all_of(browser, "#plot-rows circle")) == 3
    assert len(all_of(browser, "#plot-rows .whisker")) == 3
    assert not any(
        one(browser, f"#plot-{name}").is_displayed() for name in ("shots", "rho", "cost")
    )


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("seeds", ["one seed", "several seeds"])
def test_axes_end_at_ticks_and_no_whisker_leaves_its_plot(browser, files, tmp_path, width, seeds):
    with screen(browser, width):
        if seeds == "one seed":
            open_one_seed(browser, tmp_path)
        else:
            open_page(browser, files.page)
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
