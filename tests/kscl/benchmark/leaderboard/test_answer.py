"""The board begins with its answer, and says when there is none."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest
from scipy import stats

from kscl.benchmark.leaderboard.answer import (
    ONE_FILE,
    ONE_SEED,
    advice,
    answers,
    detectable,
    scores,
    warnings,
)
from kscl.benchmark.leaderboard.differences import differences
from kscl.benchmark.leaderboard.exports import as_csv
from kscl.benchmark.leaderboard.page import ANSWERS_SHOWN, page
from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.leaderboard.tables import compact, markdown, overview_cells
from kscl.commands.leaderboard import main
from kscl.records.hits import to_text
from kscl.records.record import Metric, Protocol, TaskInfo, record_id
from tests.helpers.leaderboard_records import (
    described,
    detection,
    evaluation,
    linear,
    pretraining,
    sha,
    write_all,
)


def overview_of(board) -> str:
    return compact(*overview_cells(board))


def joined(shown: str) -> str:
    """Return what a terminal shows without its line breaks."""
    return " ".join(shown.split())


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


def test_one_seed_gives_the_difference_with_its_interval_over_test_images(tmp_path):
    chance = np.random.default_rng(0)
    right = {"kscl": chance.random(400) < 0.7, "random": chance.random(400) < 0.5}
    found = []
    for name, bits in right.items():
        details = described(name, 0) | {"n": 400, "right": to_text(bits)}
        found.append(linear(100 * float(bits.mean()), sha(name), details=details))
    write_all(tmp_path, found)
    (answer,) = answers(build_board([tmp_path], check_stale=False, with_reported=False))
    low, high = stats.ttest_rel(*(100 * bits for bits in right.values())).confidence_interval(0.95)
    assert (answer.interval, answer.p) == (None, None)
    assert answer.interval_over_images == pytest.approx((low, high))
    means = [100 * bits.mean() for bits in right.values()]
    assert answer.sentence == (
        f"Classifier (linear probe): kscl {means[0]:.1f} vs. {means[1]:.1f} top-1 with random "
        f"weights ({means[0] - means[1]:+.1f}; 95% CI over test images {low:.1f} to {high:.1f}). "
        "One seed: seed-to-seed variation not measured."
    )


def test_one_seed_of_detectors_is_paired_by_the_same_resamples_of_test_images(tmp_path):
    chance = np.random.default_rng(0)
    shared = chance.normal(0, 3, 500)  # the images that were drawn move both
    aps = {"kscl": 30 + shared + chance.normal(0, 0.5, 500), "random": 20 + shared}
    write_all(
        tmp_path,
        [
            detection(ap, sha(name), details=described(name, 0) | {"resampled_AP": [*aps[name]]})
            for name, ap in (("kscl", 30.0), ("random", 20.0))
        ],
    )
    (answer,) = answers(build_board([tmp_path], check_stale=False, with_reported=False))
    low, high = np.percentile(aps["kscl"] - aps["random"], [2.5, 97.5])
    assert answer.interval_over_images == pytest.approx((low, high))
    assert f"(+10.0; 95% CI over test images {low:.1f} to {high:.1f})" in answer.sentence


def test_one_seed_without_anything_about_images_still_gives_the_difference(tmp_path):
    (answer,) = answers(board_of(tmp_path, [30.0], [20.0]))
    assert answer.interval_over_images is None
    assert "kscl 30.0 vs. 20.0 AP with random weights (+10.0; " in answer.sentence
    assert answer.sentence.endswith(ONE_SEED)


def test_the_answer_and_the_table_never_disagree(tmp_path):
    """Above noise by the plain test, and not once corrected for the third row."""
    aps = {"kscl": [21.2, 22.4, 21.9], "moco_v2": [20.9, 21.0, 22.3], "random": [20.0, 20.5, 20.3]}
    write_all(
        tmp_path,
        [
            detection(ap, sha(name, seed), details=described(name, seed))
            for name, values in aps.items()
            for seed, ap in enumerate(values)
        ],
    )
    plain = stats.ttest_ind(aps["kscl"], aps["random"], equal_var=False)
    assert plain.pvalue < 0.05
    board = build_board([tmp_path], check_stale=False, with_reported=False)
    (section,) = board.sections
    standing = {
        row.entry.method: row.results[section.protocol].measures["AP"].standing
        for row in section.rows
    }
    (answer,) = [it for it in answers(board) if it.row.startswith("kscl")]
    assert standing["kscl"].verdict == "best"
    assert standing["random"].verdict == "not distinguishable"
    assert answer.p == standing["random"].p > 0.05
    assert "no difference shown between kscl and random weights" in answer.sentence
    assert answer.interval[0] < 0 < answer.interval[1]
    shown = f"{answer.interval[0]:+.2f} to {answer.interval[1]:+.2f}"
    assert shown in differences(board, "random")
    lines = csv.DictReader(as_csv(board, ["random"]).splitlines())
    (line,) = [line for line in lines if line["method"] == "kscl"]
    assert float(line["difference_to_random_low"]) == pytest.approx(answer.interval[0])


def test_how_to_get_more_seeds_is_said_once_behind_the_answers_that_lack_them(tmp_path, capsys):
    both = records([30.0], [20.0])
    both += [linear(60.0, sha("kscl"), details=described("kscl", 0))]
    both += [linear(50.0, sha("random"), details=described("random", 0))]
    write_all(tmp_path / "in", both)
    out = tmp_path / "out"
    words = [str(tmp_path / "in"), "--output-dir", str(out), "--no-stale-check"]
    assert main([*words, "--baseline", "random"]) == 0
    content = json.loads((out / "leaderboard.json").read_text())
    said = {
        "terminal": joined(capsys.readouterr().out),
        "md": (out / "leaderboard.md").read_text().replace("\\", ""),
        "html": (out / "leaderboard.html").read_text().partition('type="application/json"')[0],
        "json": json.dumps({name: content[name] for name in ("answers", "advice")}),
    }
    for text in said.values():
        assert text.count(ONE_SEED) == 2
        assert text.count("--num-seeds 3") == text.count("Without a suite") == 1
        assert text.rindex(ONE_SEED) < text.index("--num-seeds 3")


def test_no_seeds_are_advised_where_there_are_enough_or_they_would_not_help(tmp_path):
    for name, aps in (("enough", ([30.0, 31.0], [20.0, 21.0])), ("too low", ([-22.0], [-24.0]))):
        assert advice(answers(board_of(tmp_path / name, *aps))) == []


def test_a_difference_of_the_told_size_is_detected_as_often_as_promised():
    rng = np.random.default_rng(0)
    size, more = 2.0, 3
    told = detectable([0.0, size, -size], [0.0, size, -size], more)  # a spread of `size` each
    n = 3 + more
    one, other = rng.normal(told, size, (4000, n)), rng.normal(0, size, (4000, n))
    power = float((stats.ttest_ind(one, other, axis=1, equal_var=False).pvalue < 0.05).mean())
    assert power == pytest.approx(0.8, abs=0.05)


def test_only_pretraining_adds_or_costs_and_no_number_is_negated_twice(tmp_path):
    good, poor = [30.0, 30.4, 30.8], [20.0, 20.4, 20.8]
    better, worse = board_of(tmp_path / "a", good, poor), board_of(tmp_path / "b", poor, good)
    (added,), (cost,) = answers(better), answers(worse)
    assert added.sentence.startswith(
        "Detector: kscl pretraining adds 10.0 AP over random weights (95% interval 9.1 to 10.9, "
    )
    assert cost.sentence == (
        "Detector: kscl pretraining costs 10.0 AP against random weights (95% interval 9.1 to "
        "10.9, 3 seeds)."
    )
    assert (cost.difference, cost.interval[0]) == (
        pytest.approx(-10),
        pytest.approx(-10.9, abs=0.1),
    )
    (lower,), (higher,) = answers(better, ["kscl"]), answers(worse, ["kscl"])
    for answer, order in ((lower, "lower"), (higher, "higher")):
        assert answer.sentence == (
            f"Detector: with random weights AP is 10.0 {order} than with kscl (95% interval 9.1 "
            "to 10.9, 3 seeds)."
        )


def test_of_two_baselines_the_pretrained_one_is_compared_with_the_other(tmp_path):
    board = board_of(tmp_path, [30.0, 30.4, 30.8], [20.0, 20.4, 20.8])
    for baselines in (["kscl", "random"], ["random", "kscl"]):
        (answer,) = answers(board, baselines)
        assert "kscl pretraining adds 10.0 AP over random weights" in answer.sentence


def test_random_weights_under_another_name_are_not_called_pretraining(tmp_path):
    found = records([30.0, 30.4, 30.8], [])
    source = {"certificate": {"source": {"layout": "random"}}}
    for seed, ap in enumerate((20.0, 20.4, 20.8)):
        details = described("narrow", seed) | source
        found.append(detection(ap, sha("narrow", seed), details=details))
    write_all(tmp_path, found)
    board = build_board([tmp_path], check_stale=False, with_reported=False)
    (answer,) = answers(board, ["kscl"])
    assert "with narrow AP is 10.0 lower than with kscl" in answer.sentence


def test_every_output_begins_with_the_answer_and_has_the_baseline(tmp_path, capsys):
    write_all(tmp_path / "in", records([30.0, 30.5, 31.0], [20.0, 20.4, 20.9]))
    out = tmp_path / "out"
    words = [str(tmp_path / "in"), "--output-dir", str(out), "--no-stale-check"]
    assert main([*words, "--baseline", "random"]) == 0
    content = json.loads((out / "leaderboard.json").read_text())
    (answer,) = content["answers"]
    assert answer["baseline"].startswith("random")
    sentence = answer["sentence"]
    assert sentence in joined(capsys.readouterr().out)
    assert sentence.replace("+", "+") in (out / "leaderboard.html").read_text()
    with (out / "leaderboard.csv").open() as file:
        lines = {line["method"]: line for line in csv.DictReader(file)}
    for part, expected in zip(
        ("", "_low", "_high"), (answer["difference"], *answer["interval"]), strict=True
    ):
        assert float(lines["kscl"][f"difference_to_random{part}"]) == pytest.approx(expected)
        assert lines["random"][f"difference_to_random{part}"] == ""
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
        f"Detector: kscl (K {shots})" for shots in (3, 5)
    ]


def test_several_rows_of_random_weights_are_named_to_choose_the_baseline_from(tmp_path, capsys):
    found = records([30.0, 31.0], [20.0, 21.0])
    for seed in (0, 1):
        narrow = described("random", seed, kwargs={"channels": [8, 16, 32, 64]})
        small = described("random", seed, arch="resnet18")
        found.append(detection(10.0 + seed, sha("narrow", seed), details=narrow))
        found.append(detection(15.0 + seed, sha("small", seed), details=small))
    write_all(tmp_path / "in", found)
    words = [str(tmp_path / "in"), "--output-dir", str(tmp_path / "out"), "--no-stale-check"]
    assert main(words) == 0
    _, _, line = joined(capsys.readouterr().out).partition("Several rows")
    line = "Several rows" + line.partition(" The page is")[0]
    names = re.findall('--baseline "(.*?)"', line)
    assert {"random@8-64 channels", "random@resnet18"} < {*names}
    assert len(names) == 3
    text = (tmp_path / "out/leaderboard.md").read_text().replace("\\", "")
    content = json.loads((tmp_path / "out/leaderboard.json").read_text())
    assert line in text
    assert line in content["advice"]
    for name in names:
        assert main([*words, "--baseline", name]) == 0
        said = capsys.readouterr().out
        assert "Several rows" not in said
        assert "\nDetector: " in said


def test_doubts_of_a_pretraining_are_on_the_board(tmp_path):
    words = "Look here (it is 1.5), or there. Do something."
    board = board_of(tmp_path, [30.0, 31.0], [20.0, 21.0], details={"warnings": [words]})
    assert [text for text in warnings(board) if words in text]
    (line,) = [line for line in csv.DictReader(as_csv(board).splitlines()) if line["warnings"]]
    assert (line["method"], line["warnings"]) == ("kscl", words)
    shown = markdown(board, "x").partition("## Overview")[2].splitlines()
    assert next(line for line in shown if line.startswith("| kscl")).endswith("| Look here |")
    assert sum(words in line and "kscl" in line for line in shown) == 1  # the protocol's row


def test_a_row_whose_pretraining_is_doubted_is_never_called_best(tmp_path):
    verdicts = []
    for found in ([], ["Nothing was learned."]):
        details = {"details": {"warnings": found}}
        board = board_of(tmp_path / str(len(found)), [30.0, 30.5], [20.0, 20.4], **details)
        (section,) = board.sections
        best = section.rows[0]
        assert best.entry.method == "kscl"
        verdicts.append(best.results[section.protocol].measures["AP"].standing.verdict)
        (answer,) = answers(board)
        assert ("kscl: see the warnings" in answer.sentence) is bool(found)
    assert verdicts == ["best", "not tested"]


def test_a_task_that_no_module_here_knows_has_its_title_label_and_direction(tmp_path):
    error = Metric("error", "my error", digits=3, headline=True, lower_is_better=True)
    task = TaskInfo("mine", "Mine", "mine", "image-classification", [error])
    values = {"kscl": (9.0, 9.1, 9.2), "random": (20.0, 20.1, 20.2)}
    found = [
        evaluation(
            "mine",
            Protocol("mine", {}),
            {"error": value},
            sha(name, seed),
            task=task,
            details=described(name, seed),
        )
        for name, of_name in values.items()
        for seed, value in enumerate(of_name)
    ]
    write_all(tmp_path, found)
    board = build_board([tmp_path], check_stale=False, with_reported=False)
    (section,) = board.sections
    best, worst = (row.results[section.protocol].measures["error"] for row in section.rows)
    assert (best.standing.verdict, best.standing.rank) == ("best", 1)
    assert worst.standing.verdict == "below the best"
    (answer,) = answers(board)
    assert answer.sentence.startswith("Mine: with kscl my error is 11.0 lower than with random")
    text = markdown(board, "x")
    assert "my error" in text
    assert "9.100 ± 0.100" in text


LOW, HIGH = [-20.4, -20.5, -20.3], [-19.4, -19.5, -19.3]  # AP50 is 25 higher: 4.6 and 5.6


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


def verdicts_of(board) -> dict[str, str]:
    (section,) = board.sections
    return {
        row.entry.method: row.results[section.protocol].measures["AP"].standing.verdict
        for row in section.rows
    }


def test_a_detector_that_is_too_low_is_never_best_though_another_one_is_not(tmp_path):
    found = records(LOW, HIGH)
    for record in found:
        if record["kind"] == "detection" and record["metrics"]["AP"] < -20:
            record["metrics"]["AP"] += 3.0  # the poorer AP50 has the better AP
    ids = [{**record, "id": record_id(record)} for record in found]
    write_all(tmp_path, ids)
    board = build_board([tmp_path], check_stale=False, with_reported=False)
    assert board.problems == []
    assert verdicts_of(board) == {"kscl": "not tested", "random": "not tested"}
    assert "**" not in overview_of(board)
    (answer,) = answers(board)
    assert "cannot be compared" in answer.sentence
    assert "the lowest AP50 4.5 of kscl is too low" in answer.sentence
    assert "adds" not in answer.sentence
    warning, starts = warnings(board)
    assert warning.startswith("Detector: kscl, ")
    assert "lowest AP50 4.5" in warning
    assert "not ranked" in warning
    assert "the best AP50 is 5.6." in starts


@pytest.mark.parametrize(("ap", "works"), [(-0.2, False), (0.1, True)])  # AP50 24.8 and 25.1
def test_a_comparison_without_any_working_detector_says_so(tmp_path, ap, works, capsys):
    write_all(tmp_path / "in", records([ap, ap, ap], [-10.0, -10.1, -10.2]))
    words = [str(tmp_path / "in"), "--output-dir", str(tmp_path / "out"), "--no-stale-check"]
    assert main(words) == 0
    sentence = f"the best AP50 is {ap + 25:.1f}. Below 25, this compares starts of training"
    for said in (
        joined(capsys.readouterr().out),
        (tmp_path / "out/leaderboard.md").read_text(),
        (tmp_path / "out/leaderboard.html").read_text(),
        (tmp_path / "out/leaderboard.json").read_text(),
    ):
        assert (sentence in said) is not works


def test_what_is_gained_over_a_detector_that_is_too_low_is_told_with_that(tmp_path):
    (answer,) = answers(board_of(tmp_path, [30.0, 30.5, 31.0], LOW))
    assert "kscl pretraining adds 50.9 AP over random weights" in answer.sentence
    assert "lowest AP50 4.5 of random weights is too low" in answer.sentence


def test_one_run_that_is_too_low_keeps_its_row_from_being_called_best(tmp_path):
    assert verdicts_of(board_of(tmp_path, [30.0, 30.5, -22.0], [1.0, 1.1, 1.2])) == {
        "kscl": "not tested",
        "random": "not tested",
    }


def with_all_alternatives(folder) -> None:
    """KSCL, one file of ImageNet weights, and random weights, also trained 2.5 times as long."""
    found = records([30.0, 30.5, 31.0], [20.0, 20.4, 20.9])
    for seed, ap in enumerate([44.0, 44.1, 44.2]):
        about = {"backbone": {"method": "imagenet", "arch": "resnet50"}}
        found.append(detection(ap, sha("imagenet"), details=about, seed=seed))
        about = described("random", seed) | {"longer": 2.5}
        about["backbone"] = about["backbone"] | {"method": "random_longer", "weights": "random"}
        found.append(detection(29.0 + seed / 10, sha("random", seed), details=about, seed=seed))
    write_all(folder, found)


def test_one_line_per_task_compares_all_that_one_could_do_instead(tmp_path):
    with_all_alternatives(tmp_path)
    board = build_board([tmp_path], check_stale=False, with_reported=False)
    said = "Detector: imagenet: 44.1 AP. kscl: 30.5. Random, trained 2.5 times as long: 29.1. "
    assert scores(board) == [f"{said}Random weights: 20.4."]
    (section,) = board.sections  # a longer training has the protocol of the others
    assert "trained 2.5× as long" in overview_of(board)
    assert len(section.rows) == 4
    compared = {answer.row.split()[0]: answer for answer in answers(board)}
    assert set(compared) == {"kscl", "imagenet", "random_longer"}
    assert compared["random_longer"].interval is not None
    assert compared["imagenet"].sentence.endswith(ONE_FILE)  # which more seeds would not change
    assert advice(answers(board)) == []
