"""A suite's mistakes are named before its first stage starts, by the tools themselves."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from detection.commands import train_net
from kscl.benchmark.suite.check import check_command
from kscl.benchmark.suite.spec import read_suite
from kscl.benchmark.suite.stages import plan
from kscl.commands import pretrain
from linear_eval.commands import linear_eval
from tests.helpers.chain import smoke_suite
from tests.helpers.commands import tool
from tests.helpers.data.sets import small_voc, write_image


def problems_of(main, capsys, *words: str) -> list[str]:
    """Run a tool's check in this process; return what it calls fatal."""
    code = main(["--check", *words])
    report = json.loads(capsys.readouterr().out)
    fatal = [problem["what"] for problem in report["problems"] if problem["fatal"]]
    assert code == (1 if fatal else 0)
    assert report["good"] == (not fatal)
    return fatal


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_a_wrong_class_count_and_a_misspelt_override_are_named_before_a_stage(tmp_path, option):
    small_voc(tmp_path / "voc")
    path = smoke_suite(tmp_path)
    suite = yaml.safe_load(path.read_text())
    detection = suite["evaluations"]["detection"]["overrides"]
    detection |= {
        "DATASETS.TRAIN": [f"voc:{tmp_path}/voc:train"],
        "DATASETS.TEST": [f"voc:{tmp_path}/voc:test"],
        "MODEL.ROI_HEADS.NUM_CLASSES": 7,
    }
    del suite["contenders"]["kscl"]
    suite["evaluations"]["knn"]["overrides"]["KNN.NEIGHBOURS"] = 3
    path.write_text(yaml.safe_dump(suite))
    done = tool("run_suite", path, *option, timeout=600)
    assert done.returncode == 2
    for name in ("MODEL.ROI_HEADS.NUM_CLASSES", "KNN.NEIGHBOURS"):
        assert name in done.stderr
    shown = [line for line in done.stderr.splitlines() if "checks done" in line]
    assert [line.split(": ")[1].split(" ")[0] for line in shown] == ["0", "1", "2", "3"]
    assert not list(tmp_path.rglob("record.json"))
    assert not (tmp_path / "shapes").exists()  # made by the first stage


def test_stages_that_differ_only_in_seed_are_checked_once(tmp_path):
    stages = plan(read_suite(smoke_suite(tmp_path, seeds=[0, 1, 2])))
    missing = {stage.folder for stage in stages}
    commands = [check_command(stage, missing, "out") for stage in stages]
    asked = [command for command in commands if command is not None]
    # Of random and kscl: one pretraining, a probe and a conversion each, and one set of boxes.
    assert len(asked) == 3 * 7
    assert len(set(asked)) == 6


def test_a_pretraining_that_cannot_start_says_why(tmp_path, capsys):
    words = ("DATA.TRAIN", str(tmp_path / "none"), "BACKBONE.NAME", "resnet5000")
    fatal = problems_of(pretrain.main, capsys, "OUTPUT_DIR", str(tmp_path / "out"), *words)
    assert any("none" in text for text in fatal)
    assert any("resnet5000" in text for text in fatal)
    assert not (tmp_path / "out").exists()


def test_a_disk_without_room_for_a_pretraining_is_told_by_its_check(tmp_path, capsys, monkeypatch):
    for number in range(8):
        write_image(tmp_path / f"images/{number}.png", number)
    network = ("BACKBONE.NAME", "test_resnet", "DICTIONARY.QUEUE_LENGTH", "4")
    data = ("DATA.TRAIN", str(tmp_path / "images"), "SOLVER.BATCH_SIZE", "4")
    words = (*network, *data, "OUTPUT_DIR", str(tmp_path / "out"))
    assert problems_of(pretrain.main, capsys, *words) == []
    usage = shutil.disk_usage(tmp_path)._replace(free=12_345)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    (problem,) = problems_of(pretrain.main, capsys, *words)
    assert "Make room" in problem


def test_the_sets_of_the_neighbors_of_a_pretraining_are_checked_too(tmp_path, capsys):
    for number in range(8):
        write_image(tmp_path / f"images/class{number % 2}/{number}.png", number)
    network = ("BACKBONE.NAME", "test_resnet", "DICTIONARY.QUEUE_LENGTH", "4")
    data = ("DATA.TRAIN", str(tmp_path / "images"), "SOLVER.BATCH_SIZE", "4")
    knn = ("EVAL.KNN_PERIOD", "1", "EVAL.KNN_VAL", str(tmp_path / "images"), "EVAL.KNN_TRAIN")
    words = (*network, *data, "OUTPUT_DIR", str(tmp_path / "out"), *knn)
    assert problems_of(pretrain.main, capsys, *words, str(tmp_path / "images")) == []
    (problem,) = problems_of(pretrain.main, capsys, *words, "nowhere")
    assert "nowhere" in problem
    assert problems_of(pretrain.main, capsys, "--check-later", "nowhere", *words, "nowhere") == []


def test_images_that_would_stop_a_pretraining_are_named_by_its_check(tmp_path, capsys, monkeypatch):
    for number in range(8):
        write_image(tmp_path / f"images/{number}.png", number)
    network = ("BACKBONE.NAME", "test_resnet", "DICTIONARY.QUEUE_LENGTH", "4")
    data = ("DATA.TRAIN", str(tmp_path / "images"), "SOLVER.BATCH_SIZE", "4")
    groups = ("KEY_ENCODER.BATCH_NORM_GROUPS", "2")
    words = (*network, *data, *groups, "OUTPUT_DIR", str(tmp_path / "out"))
    for number in (3, 5):
        bad = tmp_path / f"images/{number}.png"
        bad.write_bytes(bad.read_bytes()[:-100])
    (problem,) = problems_of(pretrain.main, capsys, *words)
    assert "2 of the 8 images that were decoded cannot be read" in problem
    for name in ("3.png", "5.png"):
        assert str(tmp_path / "images" / name) in problem
    allowed = (*words, "DATA.MAX_BAD_FRACTION", "0.25")
    assert problems_of(pretrain.main, capsys, *allowed) == []
    (problem,) = problems_of(pretrain.main, capsys, *allowed, "DATA.BAD_IMAGES", "error")
    assert "3.png" in problem
    monkeypatch.setattr("kscl.engine.preview.check.DECODED_SAMPLE", 7)  # one of the two at least
    pretrain.main(["--check", *words])
    told = json.loads(capsys.readouterr().out)["problems"]
    assert [problem["kind"] for problem in told] == ["sample", "unreadable image"]
    assert told[0]["what"] == "a sample of 7 of the 8 images was decoded"
    assert "DATA.MAX_BAD_FRACTION = 0.01" in told[1]["fix"]


def test_every_image_of_an_evaluation_is_decoded_or_a_sample_is_named(
    tmp_path, capsys, monkeypatch
):
    words = ["BACKBONE.WEIGHTS", "random", "BACKBONE.NAME", "test_resnet"]
    for key, start in (("DATA.TRAIN", 0), ("DATA.VAL", 100)):
        for number in range(start, start + 8):
            write_image(tmp_path / key / f"class{number % 2}" / f"{number}.png", number)
        words += [key, str(tmp_path / key)]
    assert problems_of(linear_eval.main, capsys, *words) == []
    bad = tmp_path / "DATA.VAL/class1/105.png"
    bad.write_bytes(bad.read_bytes()[:-100])
    (problem,) = problems_of(linear_eval.main, capsys, *words)
    assert "1 of the 8 images" in problem
    assert "105.png" in problem
    monkeypatch.setattr("linear_eval.check.DECODED_SAMPLE", 3)
    linear_eval.main(["--check", *words])
    assert "a sample of 3 of the 8 images was decoded" in capsys.readouterr().out


def test_an_evaluation_that_cannot_start_says_why(tmp_path, capsys):
    words = ("DATA.TRAIN", str(tmp_path / "a"), "DATA.VAL", str(tmp_path / "b"))
    fatal = problems_of(linear_eval.main, capsys, *words, "BACKBONE.WEIGHTS", "gone.pth")
    assert any("DATA.TRAIN" in text for text in fatal)
    assert any("gone.pth" in text for text in fatal)


def test_a_fine_tuning_that_cannot_start_says_why(tmp_path, capsys):
    voc = small_voc(tmp_path / "voc")
    words = ("DATASETS.TRAIN", f"['voc:{voc}:train']", "DATASETS.TEST", f"['voc:{voc}:test']")
    config = ("--config-file", "detection/shapes_tiny_c4.yaml")
    later = ("--check-later", "MODEL.WEIGHTS")
    fatal = problems_of(train_net.main, capsys, *later, *config, *words)
    assert fatal
    good = (*words, "MODEL.ROI_HEADS.NUM_CLASSES", "2")
    assert problems_of(train_net.main, capsys, *later, *config, *good) == []
