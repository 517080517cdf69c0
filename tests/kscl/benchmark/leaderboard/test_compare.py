"""Rows compared: by the command in Markdown, and on the page with its state in the address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from kscl.benchmark.leaderboard.differences import comparison, difference, named_rows, pairs
from kscl.commands.compare import main
from kscl.errors import KsclError
from kscl.records.hits import to_text
from tests.helpers.leaderboard_records import (
    MOCO,
    backbone_of,
    board_of,
    kscl,
    linear,
    pretraining,
    write_all,
)
from tests.helpers.page.board_page import HOSTILE, all_of, choose, column, follow, one, sort_by
from tests.helpers.page.browser import MISSING, open_page

IMAGES = 400
SHOTS = kscl(5, 0.4)
CLASSES = ["cat", "dog", "<b>cow</b>"]

needs_chromium = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def probed(settings: tuple[str, ...], right: np.ndarray) -> list[Any]:
    """Return a pretraining and its probe for each row of right (seeds, images)."""
    records = []
    for seed, answers in enumerate(right):
        made = pretraining(*settings, seed=seed)
        details = {
            "n": len(answers),
            "right": to_text(answers),
            "classes": CLASSES,
            "per_class": [50.0 + seed, 60.0, 70.0],
        }
        top1 = 100 * float(answers.mean())
        records += [made, linear(top1, backbone_of(made), details=details)]
    return records


@pytest.fixture(scope="module")
def right() -> dict[str, np.ndarray]:
    chance = np.random.default_rng(0)
    return {"kscl": chance.random((4, IMAGES)) < 0.7, "moco_v2": chance.random((3, IMAGES)) < 0.6}


@pytest.fixture
def records(tmp_path: Path, right: dict[str, np.ndarray]) -> list[Any]:
    return [*probed(SHOTS, right["kscl"]), *probed(MOCO, right["moco_v2"])]


def test_the_intervals_are_those_of_scipys_tests(tmp_path, records, right):
    board = board_of(tmp_path, records)
    (section,) = board.sections
    one_row, other = (named_rows(board.rows, name)[0] for name in ("kscl", "moco_v2"))
    found = difference(section, one_row, other)
    ours, theirs = (100 * right[name].mean(axis=1) for name in ("kscl", "moco_v2"))
    welch = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    by_seed = stats.ttest_rel(ours[:3], theirs).confidence_interval(0.95)
    images = 100 * (right["kscl"].mean(axis=0) - right["moco_v2"].mean(axis=0))
    by_image = stats.ttest_1samp(images, 0).confidence_interval(0.95)
    assert found.mean == pytest.approx(ours.mean() - theirs.mean())
    assert found.welch == pytest.approx(tuple(welch))
    assert found.by_seed == pytest.approx(tuple(by_seed))
    assert found.by_image == pytest.approx(tuple(by_image))
    assert found.shared == 3
    (pair,) = pairs(section)
    assert pair["welch"] == pytest.approx(tuple(welch), abs=1e-3)  # kscl is the better, so first


def test_the_command_prints_differences_classes_settings_and_costs(tmp_path, records, capsys):
    folder = write_all(tmp_path / "records", records)
    assert main(["moco_v2", "kscl", "--no-stale-check", "--folders", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| B .*\| +\+\d+\.\d\d \| +[+-]\S+ to [+-]\S+ \|.*4 and 3, 3 shared", shown)
    assert "not recorded" not in shown
    assert re.search(r"^- A: moco\\_v2 .*\n- B: kscl ", shown)
    assert r"- METHOD.NUM\_SHOTS: A 1; B 5" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "SEED" not in shown
    assert "pretrain min" in shown
    assert re.search(r"\| cat +\| +51.00 \| +51.50 ", shown)  # means over 3 and 4 seeds
    assert "<b>" not in shown
    assert not Path("output/leaderboard").exists()


def test_what_records_do_not_hold_is_said(tmp_path):
    bare = [linear(50.0, "a" * 64), linear(60.0, "b" * 64)]
    board = board_of(tmp_path, bare)
    assert "not recorded" in comparison(board, [row.entry.key for row in board.rows])
    assert "one seed: none" in comparison(board, [row.entry.key for row in board.rows])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["kscl"], "two or more"),
        (["kscl", "simclr"], "simclr"),
        (["kscl", "kscl"], "twice"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused_by_name(tmp_path, records, names, said):
    board = board_of(tmp_path, records)
    with pytest.raises(KsclError, match=said):
        comparison(board, names)


def tick(page: Any, number: int) -> None:
    page.execute_script("arguments[0].click()", all_of(page, "#rows .pick")[number])


@needs_chromium
def test_ticked_rows_are_compared_under_the_protocol_that_is_shown(page, files):
    choose(page, "shapes-tiny-c4")
    rows = files.board.sections[3].rows
    assert files.board.sections[3].protocol.id == "shapes-tiny-c4"
    tick(page, 1)
    assert "another row" in one(page, "#comparison").text
    tick(page, 3)
    cells = [cell.text for cell in all_of(page, "#differences-3 tbody tr:nth-child(2) td")]
    found = difference(files.board.sections[3], rows[3], rows[1])
    assert found.welch is not None
    ends = " to ".join(f"{end:+.2f}".replace("-", "−") for end in found.welch)
    assert cells[1] == f"{found.mean:+.2f}".replace("-", "−")
    assert cells[2] == ends
    assert cells[4] == "not recorded"
    assert len(all_of(page, ".compare-classes circle")) == 2 * 6
    assert "METHOD." in one(page, "#settings").text
    assert "pretrain min" in one(page, "#costs").text
    one(page, "#clear").click()
    assert not one(page, "#compare").is_displayed()


@needs_chromium
def test_a_link_shows_what_its_sender_saw(page, files):
    choose(page, "shapes-tiny-c4")
    next(chip for chip in all_of(page, ".chip") if chip.text == "kscl").click()
    one(page, "#search").send_keys("resnet50")
    sort_by(page, "3/AP75")
    sort_by(page, "3/AP75")
    tick(page, 0)
    tick(page, 2)

    def seen() -> tuple[Any, ...]:
        return (
            column(page, "method"),
            column(page, "3/AP75"),
            one(page, "#protocol").get_attribute("value"),
            one(page, "#search").get_attribute("value"),
            [chip.text for chip in all_of(page, ".chip[aria-pressed='true']")],
            one(page, "thead [aria-sort]").get_attribute("aria-sort"),
            one(page, "#comparison").text,
        )

    sent, link = seen(), page.current_url
    page.get("about:blank")
    page.get(link)
    assert seen() == sent
    assert sent[4] == ["kscl"]
    assert sent[5] == "ascending"
    follow(page, "protocol=none&sort=x&compare=zz&method=<b>")
    assert len(column(page, "method")) == len(files.board.rows)  # what is unknown is left out


@needs_chromium
def test_a_hostile_name_stays_text_in_a_comparison(page, files):
    keys = [row.entry.key for row in files.board.rows if row.entry.method in (HOSTILE, "moco_v2")]
    follow(page, f"compare={' '.join(keys)}")
    assert HOSTILE in one(page, "#comparison").text
    assert all_of(page, "img[src='x']") == []
    assert page.title == "KSCL leaderboard"


@needs_chromium
def test_rows_beyond_those_in_the_page_name_the_command(browser, tmp_path):
    from kscl.benchmark.leaderboard.differences import PAIRED_ROWS
    from kscl.commands.leaderboard import write_board

    records = [linear(20.0 + i, f"{i:064d}") for i in range(PAIRED_ROWS + 2)]
    board = board_of(tmp_path / "records", records)
    file = write_board(board, tmp_path, formats=["html"])["html"]
    open_page(browser, file)
    keys = f"{board.rows[0].entry.key} {board.rows[-1].entry.key}"
    follow(browser, f"compare={keys}")
    assert "use the command below" in one(browser, "#comparison table").text
    command = f"kscl compare {keys} --folders FOLDER"
    assert command in [code.text for code in all_of(browser, "#comparison code")]
