"""What tools/start.py tells and writes, with times that are given instead of measured."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kscl.benchmark.start.choose import Costs
from kscl.benchmark.suite.spec import Suite, read_suite
from kscl.benchmark.suite.stages import plan
from kscl.commands import prepare_data, start
from kscl.runtime.logs import clock
from tests.helpers.data.own_folders import write_folders, write_photos, write_xml

COSTS = Costs(
    moco_start=6.0,
    moco_epoch=1.0,
    kscl_epoch=2.0,
    convert=6.0,
    detection_start=20.0,
    iteration=0.3,
    probe=7.0,
)


@pytest.fixture
def boxes(tmp_path) -> Path:
    write_xml(tmp_path / "labels", write_photos(tmp_path / "photos", 16))
    where = ["--images", str(tmp_path / "photos"), "--annotations", str(tmp_path / "labels")]
    assert prepare_data.main(["own", *where, "--output-dir", str(tmp_path / "mine")]) == 0
    return tmp_path / "mine"


@pytest.fixture
def classes(tmp_path) -> Path:
    assert prepare_data.main(write_folders(tmp_path, {"red": 8, "blue": 8})) == 0
    return tmp_path / "mine"


@pytest.fixture
def measured(monkeypatch) -> None:
    monkeypatch.setattr("kscl.benchmark.start.measure.measure", lambda *_: COSTS)


def start_on(data: Path, gpus: int, monkeypatch, *more: str) -> Suite:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    output = data.parent / "output"
    assert start.main([str(data), "--output-dir", str(output), *more]) == 0
    return read_suite(output / "suite.yaml")


def test_the_estimate_is_told_for_each_kind_of_stage(boxes, measured, monkeypatch, capsys):
    suite = start_on(boxes, 0, monkeypatch, "--num-seeds", "1")
    told = capsys.readouterr().out
    epochs = suite.contenders[1].overrides["SOLVER.EPOCHS"]
    iterations = suite.evaluations[0].overrides["SOLVER.MAX_ITER"]
    seconds = {
        "pretrain": COSTS.moco_start + epochs * COSTS.moco_epoch,
        "convert": COSTS.convert,
        "detection": COSTS.detection_start + iterations * COSTS.iteration,
    }
    for kind, value in seconds.items():
        assert f"{kind} {clock(value)}" in told
    assert "1 seed, " in told
    assert "In all about " in told


def test_class_folders_alone_are_compared_by_probes(classes, measured, monkeypatch, capsys):
    suite = start_on(classes, 0, monkeypatch)
    assert [evaluation.kind for evaluation in suite.evaluations] == ["linear", "knn"]
    for evaluation in suite.evaluations:
        assert evaluation.overrides["DATA.TRAIN"] == str(classes / "classes/train")
        assert evaluation.overrides["DATA.VAL"] == str(classes / "classes/val")
    assert {contender.name for contender in suite.contenders} == {"random", "moco_v2", "kscl"}
    assert not any(stage.kind in ("convert", "detection") for stage in plan(suite))
    told = capsys.readouterr().out
    assert f"linear {clock(COSTS.probe)}" in told
    assert "detection" not in told


def test_a_machine_with_gpus_gets_the_recipes_of_the_paper(boxes, monkeypatch, capsys):
    suite = start_on(boxes, 4, monkeypatch)
    assert suite.num_gpus == 4
    assert [contender.pretrain for contender in suite.contenders] == [
        "",
        "pretrain/moco_v2_r50_200ep.yaml",
        "pretrain/kscl_k5_rho40_r50_200ep.yaml",
    ]
    (evaluation,) = suite.evaluations
    assert evaluation.config == "detection/voc0712_c4_24k_moco.yaml"
    assert evaluation.overrides["MODEL.ROI_HEADS.NUM_CLASSES"] == 2
    queue = suite.pretrain_overrides["DICTIONARY.QUEUE_LENGTH"]
    assert queue == 2 ** math.floor(math.log2(12 - 1))  # of 16 photos, 4 are to test on
    told = capsys.readouterr().out
    assert "Measuring" not in told
    assert "suite.yaml" in told


def test_on_gpus_the_seeds_are_those_asked_for_and_the_minutes_are_said_to_have_no_part(
    boxes, monkeypatch, capsys
):
    assert start_on(boxes, 4, monkeypatch, "--num-seeds", "5").seeds == (0, 1, 2, 3, 4)
    assert "whatever the --minutes" in capsys.readouterr().out


def test_a_set_given_as_a_dot_has_the_name_of_its_folder(boxes, monkeypatch):
    monkeypatch.chdir(boxes)
    suite = start_on(Path("."), 1, monkeypatch)
    assert suite.name.startswith(f"{boxes.name}, ")
    assert suite.evaluations[0].overrides["KSCL.PROTOCOL"] == f"{boxes.name}-c4-24k"


def test_a_machine_with_gpus_compares_class_folders_too(classes, monkeypatch):
    suite = start_on(classes, 1, monkeypatch)
    assert [evaluation.kind for evaluation in suite.evaluations] == ["linear"]


def test_the_cpu_is_used_if_asked_for_though_there_are_gpus(boxes, measured, monkeypatch):
    suite = start_on(boxes, 4, monkeypatch, "--cpu")
    assert suite.num_gpus == 1
    assert suite.evaluations[0].config == "detection/bccd_tiny_c4.yaml"
