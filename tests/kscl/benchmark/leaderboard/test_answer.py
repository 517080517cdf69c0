"""The board begins with its answer, and says when there is none."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from kscl.benchmark.leaderboard.board import HEADLINE, METRICS
from kscl.benchmark.leaderboard.page import ANSWERS_SHOWN, page
from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.leaderboard.writing.answer import answers, detectable, warnings
from kscl.commands.leaderboard import main
from kscl.config.merge import load_config
from kscl.engine.doubts import doubts
from kscl.records.record import Protocol
from tests.helpers.leaderboard_records import (
    described,
    detection,
    evaluation,
    pretraining,
    sha,
    write_all,
)


def records(kscl: list[float], random: list[float], **changes: object) -> list[dict]:
    """Detectors on pretrained backbones and on random weights, with these APs by seed."""
    found = []
    for seed, ap in enumerate(kscl):
        made = pretraining(seed=seed, **changes)
        found += [made, detection(ap, made["details"]["outputs"]["backbone"])]
    for seed, ap in enumerate(random):
        found.append(detection(ap, sha("random", seed), details=described("random", seed)))
    return found


def board_of(folder, *aps: list[float], **changes: object):
    write_all(folder, records(*aps, **changes))
    return build_board([folder], check_stale=False, with_reported=False)


@pytest.mark.parametrize(
    ("kscl", "verdict"),
    [
        ([30.0, 30.5, 31.0], "adds"),
        ([10.0, 10.5, 11.0], "costs"),
        ([19.0, 22.0, 20.5], "no difference"),
    ],
)
def test_one_sentence_says_what_pretraining_adds(tmp_path, kscl, verdict):
    random = [20.0, 20.4, 20.9]
    (answer,) = answers(board_of(tmp_path, kscl, random))
    assert answer.sentence.startswith("Detector: ")
    assert verdict in answer.sentence
    expected = stats.ttest_ind(kscl, random, equal_var=False).confidence_interval(0.95)
    assert answer.interval == pytest.approx((expected.low, expected.high))
    assert answer.difference == pytest.approx(np.mean(kscl) - np.mean(random))
    assert answer.seeds == 3


def test_one_seed_gives_no_verdict(tmp_path):
    (answer,) = answers(board_of(tmp_path, [30.0], [20.0]))
    assert answer.interval is None
    assert "one seed" in answer.sentence
    assert "seeds: [0, 1, 2]" in answer.sentence  # how to get more


def test_a_difference_of_the_told_size_is_detected_as_often_as_promised():
    rng = np.random.default_rng(0)
    size, more = 2.0, 3
    told = detectable([0.0, size, -size], [0.0, size, -size], more)  # a spread of `size` each
    n = 3 + more
    one, other = rng.normal(told, size, (4000, n)), rng.normal(0, size, (4000, n))
    power = float((stats.ttest_ind(one, other, axis=1, equal_var=False).pvalue < 0.05).mean())
    assert power == pytest.approx(0.8, abs=0.05)


def test_detectors_that_are_all_too_low_are_not_compared_and_none_is_best(tmp_path):
    board = board_of(tmp_path, [-22.0, -22.1, -22.2], [-24.0, -24.1, -24.2])  # AP50 is 25 higher
    (section,) = board.sections
    assert all(row.results[section.protocol].measures["AP50"].mean < 5 for row in section.rows)
    for row in section.rows:
        for measure in row.results[section.protocol].measures.values():
            assert measure.standing.verdict == "not tested"
    (answer,) = answers(board)
    assert "too low to compare" in answer.sentence
    assert any("too low" in text for text in warnings(board))


def test_every_output_begins_with_the_answer_and_has_the_baseline(tmp_path, capsys):
    write_all(tmp_path / "in", records([30.0, 30.5, 31.0], [20.0, 20.4, 20.9]))
    out = tmp_path / "out"
    words = [str(tmp_path / "in"), "--output-dir", str(out), "--no-stale-check"]
    assert main([*words, "--baseline", "random"]) == 0
    content = json.loads((out / "leaderboard.json").read_text())
    (answer,) = content["answers"]
    assert answer["baseline"].startswith("random")
    sentence = answer["sentence"]
    assert capsys.readouterr().out.startswith(sentence)
    assert sentence.replace("+", "+") in (out / "leaderboard.html").read_text()
    text = (out / "leaderboard.md").read_text()
    assert text.index("Detector: ") < text.index("## Overview") < text.index("## Differences")


def test_a_page_shows_all_warnings_and_the_first_answers_above_its_table(tmp_path):
    board = board_of(tmp_path, [30.0, 31.0], [20.0, 21.0])
    sentences = [f"Answer {number}." for number in range(ANSWERS_SHOWN + 2)]
    for answers_, opened in ((sentences, 1), (sentences[:ANSWERS_SHOWN], 0)):
        above = page(board, "x", tmp_path, ["Warning: One.", "Warning: Two."], answers_)
        above, _, rest = above.partition("<details>")
        assert above.count("<p>Warning: ") == 2
        assert above.count("<p>Answer ") == ANSWERS_SHOWN
        assert rest.count("<summary>2 more</summary>") == opened
        assert rest.count("<p>Answer ") == 2 * opened


def test_rows_of_one_method_are_told_apart_in_words(tmp_path):
    records = [detection(20.0 + s, sha(s), details=described("random", s)) for s in (0, 1)]
    for shots in ("3", "5"):
        for seed in (0, 1):
            made = pretraining("METHOD.NUM_SHOTS", shots, seed=seed)
            records += [made, detection(30.0 + seed, made["details"]["outputs"]["backbone"])]
    write_all(tmp_path, records)
    found = answers(build_board([tmp_path], check_stale=False, with_reported=False))
    assert sorted(answer.sentence.split(" pretraining")[0] for answer in found) == [
        f"Detector: kscl (resnet50, K {shots}, ρ 40%, 200 epochs)" for shots in (3, 5)
    ]


def test_doubts_of_a_pretraining_are_on_the_board(tmp_path):
    board = board_of(tmp_path, [30.0, 31.0], [20.0, 21.0], details={"warnings": ["Look here."]})
    assert [text for text in warnings(board) if "Look here." in text]


def test_a_row_whose_pretraining_is_doubted_is_never_called_best(tmp_path):
    verdicts = []
    for found in ([], ["Nothing was learned."]):
        details = {"details": {"warnings": found}}
        board = board_of(tmp_path / str(len(found)), [30.0, 30.5], [20.0, 20.4], **details)
        (section,) = board.sections
        best = section.rows[0]
        assert best.entry.method == "kscl"
        verdicts.append(best.results[section.protocol].measures["AP"].standing.verdict)
    assert verdicts == ["best", "not tested"]


@pytest.mark.parametrize("kind", METRICS)
def test_every_kind_of_evaluation_has_an_answer(tmp_path, kind):
    metrics = {HEADLINE[kind]: 50.0, "AP50": 60.0}
    write_all(
        tmp_path,
        [
            evaluation(kind, Protocol(kind, {}), metrics, sha(name), details=described(name, 0))
            for name in ("random", "other")
        ],
    )
    (answer,) = answers(build_board([tmp_path], check_stale=False, with_reported=False))
    assert answer.metric == HEADLINE[kind]


def test_a_queue_as_long_as_the_data_and_a_failed_training_are_doubted():
    cfg = load_config(None, ["DICTIONARY.QUEUE_LENGTH", "256", "SOLVER.BATCH_SIZE", "64"])
    rising, falling = np.linspace(0.1, 0.9, 20).tolist(), np.linspace(0.9, 0.1, 20).tolist()
    assert doubts(cfg, 300, {"batch_top1": rising}) == []
    assert "QUEUE_LENGTH" in " ".join(doubts(cfg, 256, {"batch_top1": rising}))
    for length in (20, 22, 203):  # thinned curves have any length
        (fallen,) = doubts(cfg, 300, {"batch_top1": np.linspace(0.9, 0.1, length).tolist()})
        assert "fell" in fallen
    for curve in ([0.02] * 20, [0.02]):
        (doubt,) = doubts(cfg, 300, {"batch_top1": curve})
        assert "chance (1.6%)" in doubt
    small = load_config(None, ["DICTIONARY.QUEUE_LENGTH", "8", "SOLVER.BATCH_SIZE", "8"])
    assert doubts(small, 300, {"batch_top1": [0.3] * 20}) == []  # of 8 images that says little
    within = ["DICTIONARY.TYPE", "minibatch", "SOLVER.BATCH_SIZE", "64"]
    simclr = load_config(None, [*within, "METHOD.NUM_SHOTS", "1"])
    assert "fell" in " ".join(doubts(simclr, 300, {"instance_top1": falling}))


def test_a_queue_that_is_easy_at_first_is_no_reason_to_doubt():
    """Of a KSCL pretraining that learned: nearest neighbors of objects 57 %, untrained 39 %."""
    cfg = load_config(None, ["DICTIONARY.QUEUE_LENGTH", "256", "SOLVER.BATCH_SIZE", "64"])
    queue = np.repeat([0.186, 0.168, 0.178, 0.154, 0.123, 0.116, 0.116, 0.146], 3).tolist()
    batch = np.repeat([0.113, 0.141, 0.18, 0.223, 0.235, 0.246, 0.268, 0.283], 3).tolist()
    assert doubts(cfg, 1796, {"instance_top1": queue, "batch_top1": batch}) == []
