"""Tables for documents: the differences to a named row, and a board put between two marks."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import cv2
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from kscl.benchmark.leaderboard.differences import differences
from kscl.benchmark.leaderboard.exports import as_csv
from kscl.benchmark.leaderboard.page import page_data
from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.leaderboard.statistics import welch_interval
from kscl.benchmark.leaderboard.tables import all_scorers, insert, running_time
from kscl.benchmark.leaderboard.tables import pretraining_costs as costs
from kscl.benchmark.leaderboard.time_figure import _draw_line, _draw_reference, draw_time, lines_of
from kscl.commands.leaderboard import main
from kscl.errors import KsclError
from kscl.records import hits
from tests.helpers.leaderboard_records import (
    DETECTION,
    MOCO,
    backbone_of,
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

scores = st.floats(0, 100).map(lambda value: round(value, 1))


replicates = st.lists(scores, min_size=2, max_size=6).filter(lambda values: np.ptp(values) > 0)


DOCUMENT = "before\n<!-- board one -->\noutdated\n<!-- end of board one -->\nafter\n"


@given(replicates, replicates)
def test_the_interval_of_a_difference_is_welchs(one, other):
    expected = scipy.stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    assert welch_interval(one, other) == pytest.approx((expected.low, expected.high), abs=1e-6)


def levels(method, values):
    return [
        linear(value, sha(method, seed), details=described(method, seed))
        for seed, value in enumerate(values)
    ]


@pytest.fixture
def records(tmp_path):
    made = [*levels("moco", [60, 62, 64]), *levels("kscl", [61, 63.1, 64.9]), *levels("one", [70])]
    return write_all(tmp_path / "records", made)


def test_rows_differ_from_the_named_one_by_welch_and_by_seed(records):
    shown = differences(build_board([records]), "moco")
    (kscl,) = [line for line in shown.splitlines() if line.startswith("| kscl")]
    cells = [cell.strip() for cell in kscl.split("|")]
    low, high = welch_interval([61, 63.1, 64.9], [60, 62, 64])
    paired = scipy.stats.ttest_1samp([1, 1.1, 0.9], 0).confidence_interval(0.95)
    assert cells[2:6] == [
        "+1.00",
        f"{low:+.2f} to {high:+.2f}",
        f"{paired.low:+.2f} to {paired.high:+.2f}",
        "3 and 3",
    ]
    (one,) = [line for line in shown.splitlines() if line.startswith("| one")]
    assert one.count("one seed: none") == 2
    assert "| moco" not in shown


def test_a_base_that_is_not_there_is_refused_with_those_that_are(records):
    with pytest.raises(KsclError, match=r"mocco.* kscl; moco; one"):
        differences(build_board([records]), "mocco")


def epochs_in(table):
    return [cells_of(line)[2] for line in table.splitlines() if line.startswith("| moco")]


def test_a_base_of_two_lengths_is_named_with_its_epochs(tmp_path):
    made = []
    for epochs, level in ((100, 60), (200, 65)):
        settings = ("LABEL", "moco", "SOLVER.EPOCHS", str(epochs))
        made += runs(settings, level, seeds=2)
    board = build_board([write_all(tmp_path, made)], check_stale=False)
    with pytest.raises(KsclError, match=r"moco \(.*200 epochs\); moco \(.*100 epochs\)"):
        differences(board, "moco")
    shown = differences(board, "moco@200")
    assert set(epochs_in(shown)) == {"100"}
    assert set(epochs_in(differences(board, "moco@200,K=5,40%"))) == {"100"}
    with pytest.raises(KsclError, match="moco@200,K=3"):
        differences(board, "moco@200,K=3")


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_hits_come_back_as_they_were(right):
    text = hits.to_text(np.array(right))
    assert hits.from_text(text, len(right)).tolist() == right
    assert hits.from_text(text, len(right) + 8) is None
    assert hits.from_text("not base64!", len(right)) is None


def answers(method, seed, right):
    details = described(method, seed) | {"n": len(right), "right": hits.to_text(right)}
    return linear(100 * float(right.mean()), sha(method, seed), details=details)


def test_trials_of_a_backbone_count_once_among_the_images(tmp_path):
    chance = np.random.default_rng(1)
    ours = chance.random((3, 100)) < 0.6  # two trials on one backbone, and one on another
    theirs = chance.random(100) < 0.5
    made = [answers("kscl", 0, ours[0]), answers("kscl", 1, ours[2]), answers("moco", 0, theirs)]
    details = described("kscl", 0) | {"n": 100, "right": hits.to_text(ours[1])}
    again = linear(100 * float(ours[1].mean()), sha("kscl", 0), details=details, seed=1)
    shown = differences(build_board([write_all(tmp_path, [*made, again])]), "moco")
    mean = (ours[:2].mean(0) + ours[2]) / 2
    expected = scipy.stats.ttest_rel(100 * mean, 100 * theirs).confidence_interval(0.95)
    assert f"{expected.low:+.2f} to {expected.high:+.2f}" in shown


def test_a_protocol_that_only_the_base_has_gives_no_table(tmp_path):
    made = [*levels("moco", [60, 62]), *levels("kscl", [61, 63]), detection(40, sha("moco", 0))]
    shown = differences(build_board([write_all(tmp_path / "two", made)]), "moco")
    assert shown.count("Under ") == 1
    assert differences(build_board([write_all(tmp_path / "one", made[:2])]), "moco") == ""


def test_no_image_is_paired_where_one_record_does_not_say_what_was_right(tmp_path):
    right = np.arange(40) % 3 > 0
    made = [answers("kscl", 0, right), answers("moco", 0, ~right), *levels("moco", [1, 2])[1:]]
    assert "by image" not in differences(build_board([write_all(tmp_path, made)]), "moco")


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_cost_of_an_epoch_stands_beside_the_papers_and_the_count(tmp_path):
    def pretrained(minutes, *settings):
        figures = {"minutes_per_epoch": minutes, "mean_rank": 1.25}
        return [pretraining(*settings, seed=seed, metrics=figures) for seed in range(2)]

    shots = ("LABEL", "kscl", "METHOD.NUM_SHOTS")
    through = ("METHOD.GRAD_THROUGH_KEYS", "True", "KEY_ENCODER.TYPE", "shared")
    minibatch = ("LABEL", "simclr", "METHOD.NUM_SHOTS", "1", "DICTIONARY.TYPE", "minibatch")
    made = [
        *pretrained(0.5, *shots, "1"),
        *pretrained(0.4, "LABEL", "moco_v2", "METHOD.NUM_SHOTS", "1"),
        *pretrained(0.7, *shots, "3"),
        *pretrained(0.9, *shots, "5"),
        *pretrained(0.8, *minibatch, *through),
    ]
    shown = costs(build_board([write_all(tmp_path, made)], check_stale=False))
    lines = [cells_of(line) for line in shown.splitlines()[2:7]]
    rows = {(name.replace("\\", ""), shots): rest for name, shots, _, *rest in lines}
    assert rows["kscl", "3"] == ["0.70 ± 0.00", "1.75", "1.62", "1.50", "10.0", "1.25, 1.25"]
    assert rows["kscl", "5"][1:4] == ["2.25", "2.31", "2.00"]
    assert rows["kscl", "1"][1:4] == ["1.25", "1.00", "1.00"]
    assert rows["moco_v2", "1"][1:4] == ["1.00", "", "1.00"]
    assert rows["simclr", "1"][1:4] == ["2.00", "", "1.50"]


def test_what_was_not_pretrained_here_has_no_cost(records):
    assert costs(build_board([records])) == ""


def test_detections_are_shown_by_all_scorers(tmp_path):
    metrics = {"AP50": 60.0, "AP": 40.0, "AP75": 41.0}
    metrics |= {"coco-101pt/AP50": 61.0, "coco-101pt/AP": 39.5, "coco-101pt/AP75": 38.0}
    metrics |= {"coco-101pt/APm": 20.0, "coco-101pt/AR100": 44.0, "voc10-every-point/AP50": 62.0}
    metrics |= {"mask/AP50": 50.0, "mask/AP": 30.0, "mask/AP75": 31.0, "mask/APs": 12.0}
    details = described("moco", 0) | {"scorer": "voc07-11pt"}
    made = [evaluation("detection", DETECTION, metrics, sha("moco"), details=details)]
    board = build_board([write_all(tmp_path, made)])
    shown = all_scorers(board)
    header, _, row = shown.splitlines()[2:]
    names = ("voc07-11pt AP", "voc07-11pt AP50", "voc07-11pt AP75")
    others = ["coco-101pt AP", "coco-101pt AP50", "coco-101pt AP75", "voc10-every-point AP50"]
    assert cells_of(header)[2:] == [*names, *others]
    assert cells_of(row)[2:] == ["40.00", "60.00", "41.00", "39.50", "61.00", "38.00", "62.00"]
    # Tables stay narrow; the page and the CSV have a column for all of them.
    masks = ("mask/AP50", "mask/AP", "mask/AP75")
    assert board.sections[0].metrics == ("AP", "AP50", "AP75", *masks)
    (line,) = csv.DictReader(io.StringIO(as_csv(board)))
    assert {name: float(line[name]) for name in metrics} == metrics
    (protocol,) = page_data(board, tmp_path)["protocols"]
    assert set(protocol["metrics"]) == set(metrics)


def test_the_running_time_leaves_pauses_out_and_counts_overlaps_once():
    assert running_time([(100, 160), (0, 60), (30, 90), (40, 50)]) == 150


def test_the_board_goes_between_its_marks_and_says_where_it_is_from(records, tmp_path):
    document = tmp_path / "RESULTS.md"
    document.write_text(DOCUMENT)
    output = ["--output-dir", str(tmp_path / "board"), "--baseline", "moco"]
    for _ in range(2):  # again, over what it wrote itself
        assert main([str(records), *output, "--insert", str(document), "one"]) == 0
    text = document.read_text()
    assert text.startswith("before\n<!-- board one -->\n| method")
    assert text.endswith("<!-- end of board one -->\nafter\n")
    assert "outdated" not in text
    assert text.count("From 7 records; seeds 0; code ") == 1


def test_a_document_gets_the_named_columns_in_their_order(tmp_path, capsys):
    document = tmp_path / "RESULTS.md"
    document.write_text(DOCUMENT)
    folder = write_all(tmp_path / "in", [pretraining(seed=0), *levels("kscl", [61, 63])])
    words = [str(folder), "--no-stale-check", "--output-dir", str(tmp_path / "board")]
    into = ["--insert", str(document), "one", "--columns"]
    assert main([*words, *into, "top-1, method,pretrain min"]) == 0
    header, _, *rows = [it for it in document.read_text().splitlines() if it.startswith("|")]
    assert cells_of(header) == ["top-1", "method", "pretrain min"]
    assert {tuple(cells_of(row)) for row in rows} >= {("62.00 ± 1.41", "kscl", "")}
    assert main([*words, *into, "method,topp-1"]) == 2
    assert "'topp-1'" in capsys.readouterr().err
    assert main([*words, "--columns", "method"]) == 2
    assert "--insert" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", DOCUMENT + DOCUMENT, DOCUMENT.replace("end of ", "")])
def test_a_document_without_its_marks_is_left_as_it_is(tmp_path, text):
    document = tmp_path / "RESULTS.md"
    document.write_text(text)
    with pytest.raises(KsclError, match="once and in this order, <!-- board one -->"):
        insert(document, "one", "new")
    assert document.read_text() == text
    with pytest.raises(KsclError, match="No such file"):
        insert(tmp_path / "nowhere.md", "one", "new")


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
