"""Figures of the leaderboard: 2,000 records into tables and a page, and the page at work."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from kscl.benchmark.leaderboard.rows import build_board
from kscl.commands.leaderboard import write_board
from kscl.records.record import Json
from tests.benchmarks.harness import SkippedError, figure, seconds
from tests.helpers.leaderboard_records import described, kscl, linear, runs, sha, write_all
from tests.helpers.page.browser import MISSING, chromium, open_page

RECORDS = 2000

# From the click to the frame after the rows stand in their new order.
SORT = """
const done = arguments[arguments.length - 1];
const button = document.querySelector(`thead button[data-key="${arguments[0]}"]`);
const start = performance.now();
button.click();
document.body.offsetHeight;
requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
"""


def mixed_records() -> list[Json]:
    """As a large study leaves them: two seeds, each pretrained, probed, compared and fine-tuned."""
    records: list[Json] = []
    shots = 1
    while len(records) < RECORDS:
        shots += 1
        records += runs(kscl(shots, 0.4), 50 + shots % 20, seeds=2, trials=1)
    return records[:RECORDS]


def lone_records() -> list[Json]:
    """The widest board: every record is a row of its own."""
    return [
        linear(
            20 + 70 * (i * 7919 % RECORDS) / RECORDS,
            sha(i),
            details=described(f"method {i}", seed=0, epochs=i) | {"n": 5000},
        )
        for i in range(RECORDS)
    ]


@figure("leaderboard_write", "2,000 records → Markdown and page", at_most=5, unit=" s")
def leaderboard_write() -> float:
    folder = Path(tempfile.mkdtemp())
    try:
        records = write_all(folder / "records", mixed_records())
        return seconds(lambda: write_board(build_board([records]), folder, formats=("md", "html")))
    finally:
        shutil.rmtree(folder)


@figure("leaderboard_sort", "sorting a page of 2,000 rows in Chromium", at_most=200, unit=" ms")
def leaderboard_sort() -> float:
    """Return the slowest of several sorts, by text and by numbers, up and down."""
    if MISSING:
        raise SkippedError(MISSING)
    folder = Path(tempfile.mkdtemp())
    try:
        records = write_all(folder / "records", lone_records())
        page = write_board(build_board([records]), folder, formats=("html",))["html"]
        with chromium() as browser:
            open_page(browser, page)
            keys = ["0/top1", "0/top1", "method", "epochs", "interval", "0/top5"]
            return max(browser.execute_async_script(SORT, key) for key in keys)
    finally:
        shutil.rmtree(folder)
