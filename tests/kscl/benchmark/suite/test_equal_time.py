"""Contenders that train for the same time: measured, kept in the suite file, and checked."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from kscl.benchmark.suite.equal_time import StepTimes, measure_steps, write_steps
from kscl.benchmark.suite.progress import report_seconds
from kscl.benchmark.suite.spec import read_suite
from kscl.benchmark.suite.stages import plan
from kscl.commands.equal_time import main
from kscl.errors import ConfigError, KsclError
from tests.helpers.runs import TINY, draw_images

SCREENS = ("screen_cifar10", "screen_cifar10_again", "screen_shapes")
SUITE = """\
name: tiny
output_dir: {folder}/output
contenders:
  moco_v2:
    pretrain: {folder}/tiny.yaml
    overrides: {{METHOD.NUM_SHOTS: 1, METHOD.SIMILARITY: cosine}}
  more:
    pretrain: {folder}/tiny.yaml
    overrides: {{METHOD.NUM_SHOTS: 6, VIEWS.SMALL.COUNT: 8, VIEWS.SMALL.SIZE: 32}}
  random: {{arch: test_resnet}}
pretrain_overrides: {{DATA.TRAIN: {folder}/images}}
evaluations:
  knn: {{config: linear_eval/knn.yaml}}
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    draw_images(tmp_path / "images", count=32)
    (tmp_path / "tiny.yaml").write_text(TINY)
    file = tmp_path / "suite.yaml"
    file.write_text(SUITE.format(folder=tmp_path))
    return file


def max_steps(file: Path) -> dict[str, int | None]:
    contenders = read_suite(file).contenders
    return {each.name: each.overrides.get("SOLVER.MAX_STEPS") for each in contenders}


def test_steps_take_as_long_as_the_epochs_of_the_reference() -> None:
    times = StepTimes({"moco": 20.0, "kscl": 50.0}, per_epoch={"moco": 31, "kscl": 62})
    assert times.equal_steps("moco", 30) == {"moco": 930, "kscl": 372}
    with pytest.raises(KsclError, match="simclr"):
        times.equal_steps("simclr", 30)


def test_steps_are_kept_in_the_suite_file_and_measured_anew(suite: Path) -> None:
    before = suite.read_text()
    times = StepTimes({"moco_v2": 20.0, "more": 50.0}, per_epoch={"moco_v2": 2, "more": 2})
    for counts in ({"moco_v2": 930, "more": 372}, {"moco_v2": 62, "more": 25}):
        write_steps(suite, times, counts)
        assert max_steps(suite) == {**counts, "random": None}
    assert suite.read_text().startswith(before)
    words = [word for stage in plan(read_suite(suite)) for word in stage.arguments]
    assert words.count("SOLVER.MAX_STEPS") == 2


def test_every_length_is_a_pretraining_of_its_own_with_the_same_label(suite: Path) -> None:
    words = "lengths: [1, 4]\nsteps: {moco_v2: 62, more: 25}\n"
    suite.write_text(suite.read_text().replace("  more:\n", "  more:\n    lengths: [2]\n") + words)
    assert max_steps(suite) == {"moco_v2": 62, "moco_v2_x4": 248, "more_x2": 50, "random": None}
    labels = {each.name: each.label for each in read_suite(suite).contenders}
    assert labels["moco_v2"] == labels["moco_v2_x4"] == "moco_v2"
    measured = read_suite(suite, steps={}).contenders
    assert [each.name for each in measured] == ["moco_v2", "more", "random"]


def test_each_length_may_have_seeds_of_its_own(suite: Path) -> None:
    words = "seeds: [0, 1, 2]\nsteps: {moco_v2: 62, more: 25}\n"
    given = "  more:\n    lengths: {4: [7], 1: [0, 1]}\n"
    suite.write_text(suite.read_text().replace("  more:\n", given) + words)
    contenders = read_suite(suite).contenders
    seeds = {each.name: list(each.seeds) for each in contenders}
    assert seeds == {"moco_v2": [0, 1, 2], "more_x4": [7], "more": [0, 1], "random": [0, 1, 2]}
    assert [each.lengths for each in contenders] == [(1,), (4,), (1,), (1,)]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("lengths: [0, 1]", "lengths"),
        ("lengths: [2, 2]", "lengths"),
        ("lengths: []", "lengths"),
        ("lengths: [1.5]", "lengths"),
        ("steps: {random: 5}", "random"),
        ("steps: {moco_v2: 0}", "whole number"),
        ("steps: {kscl: 5}", "kscl"),
        ("lengths: [1, 2]", "contender more: lengths multiply steps"),
        ("lengths: [1, 2]\nsteps: {moco_v2: 62}", "contender more: lengths multiply steps"),
    ],
)
def test_steps_and_lengths_that_mean_nothing_are_refused(
    suite: Path, line: str, named: str
) -> None:
    suite.write_text(f"{suite.read_text()}{line}\n")
    with pytest.raises(ConfigError, match=named):
        read_suite(suite)
    if "multiply" in named:  # what is to be measured
        assert read_suite(suite, steps={})


@pytest.mark.parametrize("lengths", ["{0: [1]}", "{2: [0, 0]}", "{2: 3}", "{}"])
def test_lengths_with_seeds_that_mean_nothing_are_refused(suite: Path, lengths: str) -> None:
    given = f"  more:\n    lengths: {lengths}\n"
    suite.write_text(suite.read_text().replace("  more:\n", given))
    with pytest.raises(ConfigError, match="contender more: len"):
        read_suite(suite)


def test_the_tool_measures_all_contenders_in_one_process(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(suite), "--turns", "2", "--epochs", "6"]) == 0
    assert "Wrote the steps" in capsys.readouterr().out
    steps = max_steps(suite)
    assert steps["moco_v2"] == 12
    assert isinstance(steps["more"], int)
    assert 1 <= steps["more"] < 12  # its steps have many more views


@pytest.mark.parametrize(
    ("option", "value"),
    [("--epochs", "0"), ("--epochs", "-3"), ("--epochs", "nan"), ("--turns", "0")],
)
def test_options_that_mean_nothing_are_refused_and_the_file_is_kept(
    suite: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = suite.read_text()
    assert main([str(suite), f"{option}={value}"]) == 2
    assert option in capsys.readouterr().err
    assert suite.read_text() == before


def test_steps_written_by_hand_are_not_written_twice(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite.write_text(f"{suite.read_text()}steps: {{moco_v2: 5}}\n")
    before = suite.read_text()
    assert main([str(suite)]) == 2
    assert "`steps`" in capsys.readouterr().err
    assert suite.read_text() == before


def test_a_schedule_of_sizes_has_no_equal_time_and_the_error_says_so(suite: Path) -> None:
    sized = "METHOD.NUM_SHOTS: 6, INPUT.SIZE: [[0, 32], [1, 48]], SOLVER.EPOCHS: 2,"
    suite.write_text(suite.read_text().replace("METHOD.NUM_SHOTS: 6,", sized))
    with pytest.raises(ConfigError, match=r"equal time.*give one size"):
        measure_steps(read_suite(suite, steps={}), turns=1)


def test_contenders_on_different_data_have_no_equal_time(suite: Path, tmp_path: Path) -> None:
    draw_images(tmp_path / "others", count=64)
    text = suite.read_text().replace(
        "METHOD.NUM_SHOTS: 6,", f"METHOD.NUM_SHOTS: 1, DATA.TRAIN: {tmp_path}/others,"
    )
    suite.write_text(text)
    with pytest.raises(KsclError, match="32, 64 images"):
        measure_steps(read_suite(suite), turns=1)


def test_seconds_that_differ_too_much_are_warned_of() -> None:
    equal = report_seconds({"a": 100.0, "b": 114.0, "c": 105.0})
    assert "Warning" not in equal
    assert "+14%" in equal
    unequal = report_seconds({"a": 118.0, "b": 100.0})
    assert "(a, +18%)" in unequal
    assert unequal.splitlines()[-1].startswith("Warning")
    assert max(map(len, unequal.splitlines())) <= 100


@pytest.mark.parametrize("name", SCREENS)
def test_the_screening_gives_every_candidate_as_many_settings_and_no_reported_image(
    name: str,
) -> None:
    suite = read_suite(f"configs/suites/small/{name}.yaml")
    names = [contender.name for contender in suite.contenders]
    changed = r"(_(lr|tau|batch|momentum)\d+)*$"
    settings = Counter(re.sub(changed, "", each) for each in names)
    assert len(settings) >= 3
    assert len({*settings.values()}) == 1
    assert {*suite.steps} == {*names}
    (evaluation,) = suite.evaluations
    folders = {*suite.pretrain_overrides.values(), *evaluation.overrides.values()} - {0}
    screened = "shapes_screen" if name == "screen_shapes" else "cifar10_small"
    assert {folder.split("/")[1] for folder in folders} == {screened}
    assert "datasets/cifar10_small/test" not in folders
