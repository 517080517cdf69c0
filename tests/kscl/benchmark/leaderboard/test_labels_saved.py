"""How many labels a pretraining saves: the number, its interval, and what the board says."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from kscl.benchmark.leaderboard.answer import answers, warnings
from kscl.benchmark.leaderboard.labels_saved import FIGURE, interval, labels_saved, reached
from kscl.commands.leaderboard import write_board
from kscl.data.labeled import FRACTION_IN_PROTOCOL
from kscl.records.record import Protocol
from tests.helpers.leaderboard_records import (
    DETECTION,
    backbone_of,
    board_of,
    described,
    detection,
    pretraining,
    sha,
)

FRACTIONS = (0.1, 0.5, 1.0)
IMAGES = 400


def trial(ap: float, of: str, fraction: float, draw: int = 0, **details: object) -> dict:
    part = {} if fraction == 1 else {FRACTION_IN_PROTOCOL: fraction}
    named = {} if fraction == 1 else {"draw": draw}
    protocol = Protocol(f"{DETECTION.id}-{fraction}", DETECTION.definition | part)
    known = {"n_train": round(fraction * IMAGES), **named, **details}
    return detection(ap, of, protocol, details=known)


def records(kscl: list[list[float]], random: list[list[float]]) -> list[dict]:
    """Return detectors with these APs by seed and fraction; two draws are 1 above and below."""
    found = []
    for seed, aps in enumerate(kscl):
        made = pretraining(seed=seed)
        found.append(made)
        for fraction, ap in zip(FRACTIONS, aps, strict=True):
            each = [ap] if fraction == 1 else [ap - 1, ap + 1]
            found += [trial(it, backbone_of(made), fraction, i) for i, it in enumerate(each)]
    for seed, aps in enumerate(random):
        for fraction, ap in zip(FRACTIONS, aps, strict=True):
            words = described("random", seed)
            found.append(trial(ap, sha("random", seed), fraction, **words))
    return found


KSCL = [[20.0, 41.0, 50.0], [21.0, 40.0, 52.0], [19.0, 42.0, 51.0]]
RANDOM = [[5.0, 20.0, 35.0], [4.0, 21.0, 36.0], [6.0, 22.0, 37.0]]


def test_the_number_of_labels_is_on_the_line_over_their_logarithm():
    assert reached([10, 100, 1000], [20, 30, 50], 40) == pytest.approx(100 * 10**0.5)
    assert reached([10, 100, 1000], [20, 30, 50], 10) == 10  # or less
    assert reached([10, 100, 1000], [20, 30, 50], 51) is None
    # A curve that falls again has not reached it yet.
    assert reached([10, 100, 1000], [45, 30, 50], 40) == pytest.approx(100 * 10**0.5)


def test_at_the_ends_of_the_interval_welchs_test_has_p_of_5_percent():
    labels, curves = [40, 200, 400], np.array(KSCL)
    targets = [aps[-1] for aps in RANDOM]
    ends = interval(labels, curves, targets)
    assert ends is not None
    low, high = ends
    for number in (low, high):
        at = [np.interp(np.log(number), np.log(labels), curve) for curve in curves]
        assert stats.ttest_ind(at, targets, equal_var=False).pvalue == pytest.approx(0.05, abs=0.01)
    means = list(curves.mean(0))
    assert low < reached(labels, means, float(np.mean(targets))) < high


@pytest.mark.full
def test_the_interval_covers_the_true_number_in_95_percent_of_experiments():
    chance, labels, covered = np.random.default_rng(0), [40, 400], []
    for _ in range(150):  # the true curve rises from 20 to 40 and reaches 30 at the middle
        curves = np.array([20.0, 40.0]) + chance.normal(0, 2, (3, 2))
        low, high = interval(labels, curves, list(30 + chance.normal(0, 1, 3)))
        true = (40 * 400) ** 0.5
        covered.append((low is not None and low <= true) and (high is None or true <= high))
    assert np.mean(covered) > 0.92


def test_the_board_says_how_many_labels_reach_the_baseline(tmp_path):
    board = board_of(tmp_path / "records", records(KSCL, RANDOM))
    (found,) = labels_saved(board)
    # 20 at 40 labels, 41 at 200: 36 is reached on this line.
    expected = np.exp(np.log(40) + 16 / 21 * np.log(5))
    assert found.labels == pytest.approx(expected)
    assert found.fraction == pytest.approx(expected / IMAGES)
    assert found.seeds == 3
    assert found.sentence.startswith("Detector: kscl reaches random's full-data AP (36.0) with 34%")
    low, high = found.interval
    assert f"95% CI {100 * low:.2g}% to {100 * high:.2g}%" in found.sentence
    # The fractions are no comparisons of their own, and low scores are no surprise there.
    assert [it.protocol.split(" ")[0] for it in answers(board)] == [f"{DETECTION.id}-1.0"]
    assert warnings(board) == []
    written = write_board(board, tmp_path / "board")
    assert (tmp_path / "board" / FIGURE).read_bytes().startswith(b"\x89PNG")
    page, text = (written[name].read_text() for name in ("html", "md"))
    assert 'class="chart"' in page
    assert f"]({FIGURE})" in text
    assert "20.00 ± 1.00" in text  # over seeds: the draws of a seed are averaged
    (said,) = json.loads(written["json"].read_text())["labels_saved"]
    assert said["sentence"] == found.sentence


def test_a_row_that_stays_below_and_one_seed_are_said(tmp_path):
    (below,) = labels_saved(board_of(tmp_path / "below", records(RANDOM, KSCL)))
    assert (below.labels, below.fraction, below.interval) == (None, None, (None, None))
    assert "kscl does not reach random's full-data AP (51.0): 36.0 with all 400" in below.sentence
    (one,) = labels_saved(board_of(tmp_path / "one", records(KSCL[:1], RANDOM[:1])))
    assert (one.interval, one.seeds) == (None, 1)
    assert "95% CI not measured" in one.sentence


def test_a_board_without_fractions_has_no_labels_saved(tmp_path):
    full = [it for it in records(KSCL, RANDOM) if "draw" not in it["details"]]
    board = board_of(tmp_path / "records", full)
    assert labels_saved(board) == []
    assert "labels" not in write_board(board, tmp_path / "board")
