"""What these tests share: one Chromium, a board with rows of every kind, and a pretended Slurm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.suite.stages import Stage
from kscl.commands.leaderboard import write_board
from tests.helpers.leaderboard_records import (
    PNG,
    a_whole_board,
    described,
    kscl,
    linear,
    pretraining,
    sha,
    write_all,
)
from tests.helpers.page.board_page import HOSTILE, pictures
from tests.helpers.page.browser import MISSING, chromium, complaints, open_page, requests
from tests.helpers.slurm import stage


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if MISSING:
        pytest.skip(MISSING)
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> SimpleNamespace:
    """A board with rows of every kind, one of them stale, one of them hostile."""
    folder = tmp_path_factory.mktemp("board")
    records = a_whole_board()
    records[0] = pretraining(*kscl(5, 0.4), details={"basis_figure": "../basis.png"})
    records.append(linear(30, sha("x"), name=HOSTILE, details=described(HOSTILE, 0, arch=HOSTILE)))
    write_all(folder / "records", records)
    (folder / "records" / "basis.png").write_bytes(PNG)
    (folder / "records" / "broken").mkdir()
    (folder / "records" / "broken" / "record.json").write_text("{")
    board = build_board([folder / "records"], check_stale=False)
    board.rows[2].stale = ["code was aaaa, is bbbb"]
    return SimpleNamespace(page=write_board(board, folder)["html"], folder=folder, board=board)


@pytest.fixture
def page(browser, files) -> Iterator[Any]:
    """The page, freshly opened; whatever was done to it, it must not have complained or asked."""
    open_page(browser, files.page)
    yield browser
    assert complaints(browser) == []
    assert set(requests(browser)) <= {files.page.as_uri(), "data:,"} | pictures(browser)


@pytest.fixture
def stages(tmp_path) -> list[Stage]:
    one = stage(tmp_path, "one")
    two = stage(tmp_path, "two", one, kind="knn")
    three = stage(tmp_path, "three")
    return [one, two, three, stage(tmp_path, "board", one, two, three, kind="board")]


@pytest.fixture
def state_dir(tmp_path) -> Path:
    return tmp_path / ".stages"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The commands of Slurm, which number jobs and write down what they are asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, line in {
        "sbatch": f"n=$(cat {folder}/n 2>/dev/null || echo 30); echo $((n+1)) | tee {folder}/n",
        "scancel": f'echo "$@" >> {folder}/cancelled',
        "scontrol": f'echo "$@" >> {folder}/controlled',
        "squeue": "",  # no job is queued
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder
