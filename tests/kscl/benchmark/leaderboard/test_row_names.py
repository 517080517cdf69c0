"""Rows say what they are: width, size and label, and a baseline can name one of two alike."""

from __future__ import annotations

import itertools

import pytest

from kscl.benchmark.leaderboard import tables as cells
from kscl.benchmark.leaderboard.differences import differences, named_rows
from kscl.benchmark.leaderboard.statistics import t_interval
from kscl.benchmark.suite.spec import read_suite
from kscl.benchmark.suite.stages import plan
from kscl.errors import KsclError
from tests.helpers.leaderboard_records import board_of, described, detection, pretraining, sha

NARROW = {"kwargs": {"channels": [8, 16, 32, 64]}, "parameters": 480_000}


def random_rows(folder, narrow: dict) -> list:
    """A narrow network and a standard one, both of random weights, and how detectors saw them."""
    records = [detection(20.0, sha("standard"), details=described("random", 0))]
    records.append(detection(10.0, sha("narrow"), details=described("random", 0, **narrow)))
    return board_of(folder, records).rows


def test_a_network_of_another_width_than_its_name_says_tells_it(tmp_path):
    shown = sorted(cells.identity(row)[1] for row in random_rows(tmp_path, NARROW))
    assert shown == ["resnet50", "resnet50 (8–64 channels, 0.5 M parameters)"]


def test_pretrainings_tell_their_width_too(tmp_path):
    words = ("BACKBONE.KWARGS.channels", "[16, 32, 64, 128]")
    (row,) = board_of(tmp_path, [pretraining(*words, details={"parameters": 2_100_000})]).rows
    assert cells.identity(row)[1] == "resnet50 (16–128 channels, 2.1 M parameters)"


def test_networks_that_only_a_detector_saw_are_told_apart_by_their_arguments(tmp_path):
    rows = random_rows(tmp_path, {"arch_kwargs": NARROW["kwargs"]})  # as older records say it
    assert [row.entry.width for row in rows] == ["", "8–64 channels"]


@pytest.mark.parametrize("baseline", ["random@8-64 channels", "random@8–64 channels"])
def test_a_baseline_names_one_of_two_random_rows(tmp_path, baseline):
    rows = random_rows(tmp_path / "one", NARROW)
    assert [row.entry.width for row in named_rows(rows, baseline)] == ["8–64 channels"]
    records = [
        detection(
            ap, sha(arch), details={"backbone": {"method": "random", "arch": arch, "seed": 0}}
        )
        for arch, ap in (("resnet18", 10.0), ("resnet50", 20.0))
    ]
    board = board_of(tmp_path / "two", records)
    with pytest.raises(KsclError, match="resnet18"):
        differences(board, "random")
    assert "+10.00" in differences(board, "random@resnet18")


def test_the_name_of_a_contender_without_pretraining_reaches_its_detector(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text(
        "name: two kinds of random weights\noutput_dir: out\n"
        "contenders: {random: {arch: resnet50}, small: {arch: resnet18}}\n"
        "evaluations: {detection: {config: detection/shapes_tiny_c4.yaml}}\n"
    )
    labels = {
        stage.name: [w for k, w in itertools.pairwise(stage.arguments) if k == "KSCL.LABEL"]
        for stage in plan(read_suite(path))
        if stage.kind == "detection"
    }
    assert labels == {"random/seed0/detection": [], "small/seed0/detection": ["small"]}


def test_an_interval_of_ap_never_goes_below_zero(tmp_path):
    details = [described("random", seed) for seed in range(3)]
    aps = (0.5, 4.0, 1.0)
    assert t_interval(aps)[0] < -1
    records = [
        detection(ap, sha(seed), details=details[seed], seed=seed) for seed, ap in enumerate(aps)
    ]
    (row,) = board_of(tmp_path, records).rows
    (result,) = row.results.values()
    assert result.measures["AP"].interval == (0.0, t_interval(aps)[1])
