"""Accuracy against the time of pretraining, as a picture."""

from __future__ import annotations

from pathlib import Path

import cv2
import pytest
from matplotlib.figure import Figure

from kscl.benchmark.leaderboard.time_figure import (
    _draw_line,
    _draw_reference,
    draw_time,
    lines_of,
)
from kscl.commands.leaderboard import main
from kscl.errors import KsclError
from tests.helpers.leaderboard_records import (
    MOCO,
    backbone_of,
    board_of,
    described,
    kscl,
    linear,
    pretraining,
    runs,
    sha,
    write_all,
)


def records_of_two_lengths() -> list:
    longer = ("SOLVER.EPOCHS", "400")
    return [
        *runs(kscl(5, 0.4), 60.0, seeds=3),
        *runs(kscl(5, 0.4, *longer), 64.0, seeds=3),
        *runs(MOCO, 59.0, seeds=3),
        linear(21.0, sha("random"), details=described("random", 0)),
    ]


def test_a_method_is_a_line_over_its_lengths(tmp_path: Path) -> None:
    board = board_of(tmp_path, records_of_two_lengths())
    section = next(each for each in board.sections if each.protocol.kind == "linear")
    lines = lines_of(section)
    assert sorted(len(points) for points in lines.values()) == [1, 2]
    (name,) = (name for name, points in lines.items() if len(points) == 2)
    assert "K=5" in name
    assert "40%" in name
    drawn = {measure.mean for points in lines.values() for _, measure in points}
    headline = section.protocol.headline
    pretrained = [row for row in section.rows if row.pretrainings]
    assert drawn == {row.results[section.protocol].measures[headline].mean for row in pretrained}


def test_the_tool_draws_a_picture(tmp_path: Path) -> None:
    folder = write_all(tmp_path / "records", records_of_two_lengths())
    picture = tmp_path / "new" / "time.png"
    words = [str(folder), "--no-stale-check", "--output-dir", str(tmp_path / "board")]
    assert main([*words, "--figure", str(picture)]) == 0
    image = cv2.imread(str(picture))
    assert image.min() < 100 < image.max()  # something is drawn


def test_an_interval_is_drawn_as_the_board_tells_it_and_never_below_zero(tmp_path: Path) -> None:
    made = [pretraining(*MOCO, seed=seed) for seed in range(2)]
    scored = [linear(top1, backbone_of(each)) for top1, each in zip((1.0, 9.0), made, strict=True)]
    (section,) = board_of(tmp_path, [*made, *scored]).sections
    ((_, measure),) = next(iter(lines_of(section).values()))
    panel = Figure().subplots()
    _draw_line(panel, "moco", [(1.0, measure)], 0)
    (line,) = panel.collections
    assert [y for _, y in line.get_segments()[0]] == list(measure.interval)
    assert measure.interval[0] == 0


def test_weights_without_pretraining_are_a_line_unless_that_would_flatten_the_others() -> None:
    panel = Figure().subplots()
    panel.plot([1, 2], [40.0, 50.0])
    before = panel.get_ylim()
    _draw_reference(panel, "random", 27.4)
    assert panel.get_ylim() == before
    _draw_reference(panel, "supervised", 53.0)
    assert panel.get_ylim()[1] > 53
    _, names = panel.get_legend_handles_labels()
    assert names == ["random: 27.4, not drawn", "supervised"]


def test_a_board_without_pretrainings_has_no_figure(tmp_path: Path) -> None:
    board = board_of(tmp_path, [linear(21.0, sha("random"), details=described("random", 0))])
    with pytest.raises(KsclError, match="--figure"):
        draw_time(board, tmp_path / "time.png", "a board")
