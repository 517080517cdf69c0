"""A suite's mistakes are named before its first stage starts, by the tools themselves."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import yaml

from detection.commands import train_net
from kscl.benchmark.suite.check import Request, check_of, check_stages, run_checks
from kscl.benchmark.suite.execute import TO_DO, State
from kscl.benchmark.suite.progress import CheckProgress
from kscl.benchmark.suite.spec import read_suite
from kscl.benchmark.suite.stages import plan
from kscl.commands import pretrain
from linear_eval.commands import linear_eval
from tests.helpers.chain import smoke_suite
from tests.helpers.commands import tool
from tests.helpers.data.sets import small_voc, write_image
from tests.helpers.slurm import stage

NETWORK = ("BACKBONE.NAME", "test_resnet", "DICTIONARY.QUEUE_LENGTH", "4", "SOLVER.BATCH_SIZE", "4")


def problems_of(main, capsys, *words: str) -> list[str]:
    """Run a tool's check in this process; return what it calls fatal."""
    code = main(["--check", *words])
    report = json.loads(capsys.readouterr().out)
    fatal = [problem["what"] for problem in report["problems"] if problem["fatal"]]
    assert code == (1 if fatal else 0)
    assert report["good"] == (not fatal)
    return fatal


def test_a_wrong_class_count_and_a_misspelt_override_are_named_before_a_stage(tmp_path):
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
    done = tool("run_suite", path, "--dry-run", timeout=600)
    assert done.returncode == 2
    for name in ("MODEL.ROI_HEADS.NUM_CLASSES", "KNN.NEIGHBOURS"):
        assert name in done.stderr
    shown = [line for line in done.stderr.splitlines() if "checks done" in line]
    assert [line.split(": ")[1].split(" ")[0] for line in shown] == ["0", "3"]
    assert not list(tmp_path.rglob("record.json"))
    assert not (tmp_path / "shapes").exists()  # made by the first stage


def test_stages_that_differ_only_in_seed_are_checked_once(tmp_path):
    stages = plan(read_suite(smoke_suite(tmp_path, seeds=[0, 1, 2])))
    missing = {stage.folder for stage in stages}
    requests = [check_of(stage, missing, "out") for stage in stages]
    wanted = [repr(request) for request in requests if request is not None]
    # random and kscl: one pretraining, a probe and a conversion each, and one set of boxes.
    assert len(wanted) == 3 * 7
    assert len(set(wanted)) == 6


def test_a_pretraining_that_cannot_start_says_why(tmp_path, capsys):
    words = ("DATA.TRAIN", str(tmp_path / "none"), "BACKBONE.NAME", "resnet5000")
    fatal = problems_of(pretrain.main, capsys, "OUTPUT_DIR", str(tmp_path / "out"), *words)
    assert any("none" in text for text in fatal)
    assert any("resnet5000" in text for text in fatal)
    assert not (tmp_path / "out").exists()


def test_a_disk_without_room_for_a_pretraining_is_told_by_its_check(tmp_path, capsys, monkeypatch):
    for number in range(8):
        write_image(tmp_path / f"images/{number}.png", number)
    data = ("DATA.TRAIN", str(tmp_path / "images"))
    words = (*NETWORK, *data, "OUTPUT_DIR", str(tmp_path / "out"))
    assert problems_of(pretrain.main, capsys, *words) == []
    usage = shutil.disk_usage(tmp_path)._replace(free=12_345)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    (problem,) = problems_of(pretrain.main, capsys, *words)
    assert "Make room" in problem


def test_the_sets_of_the_neighbors_of_a_pretraining_are_checked_too(tmp_path, capsys):
    for number in range(8):
        write_image(tmp_path / f"images/class{number % 2}/{number}.png", number)
    data = ("DATA.TRAIN", str(tmp_path / "images"))
    knn = ("EVAL.KNN_PERIOD", "1", "EVAL.KNN_VAL", str(tmp_path / "images"), "EVAL.KNN_TRAIN")
    words = (*NETWORK, *data, "OUTPUT_DIR", str(tmp_path / "out"), *knn)
    assert problems_of(pretrain.main, capsys, *words, str(tmp_path / "images")) == []
    (problem,) = problems_of(pretrain.main, capsys, *words, "nowhere")
    assert "nowhere" in problem
    assert problems_of(pretrain.main, capsys, "--check-later", "nowhere", *words, "nowhere") == []


def test_images_that_would_stop_a_pretraining_are_named_by_its_check(tmp_path, capsys, monkeypatch):
    for number in range(8):
        write_image(tmp_path / f"images/{number}.png", number)
    data = ("DATA.TRAIN", str(tmp_path / "images"))
    groups = ("KEY_ENCODER.BATCH_NORM_GROUPS", "2")
    words = (*NETWORK, *data, *groups, "OUTPUT_DIR", str(tmp_path / "out"))
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
    monkeypatch.setattr("kscl.engine.check.DECODED_SAMPLE", 7)  # one of the two at least
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


# Many checks share few processes

TOOL = """
import os, sys, time
from kscl.data.annotations import Problem
from kscl.errors import KsclError

def check(word):
    if word == "die":
        os._exit(3)
    if word == "raise":
        raise ValueError("a bug")
    if word == "refuse":
        raise KsclError("what to fix")
    if word == "sleep":
        time.sleep(60)
    print("printed by a library")
    return [Problem(word, str(os.getpid()), "", "", fatal=word == "bad")]
"""


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """A function that checks some words; returns the first problem of each."""
    (tmp_path / "pretended.py").write_text(TOOL)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*words: str, processes: int = 1, timeout: float = 100.0) -> dict:
        requests = [Request("pretended", {"word": word}) for word in words]
        answered = run_checks(requests, processes, timeout)
        return {request.arguments["word"]: checked.problems[0] for request, checked in answered}

    return run


def test_checks_share_as_many_processes_as_there_are_places(answers):
    for processes in (1, 2):
        found = answers("a", "b", "bad", "c", processes=processes)
        assert {word: problem.kind for word, problem in found.items()} == dict(
            zip(*2 * [("a", "b", "bad", "c")], strict=True)
        )
        assert len({problem.where for problem in found.values()}) == processes


def test_a_check_that_ends_badly_is_reported_and_the_others_run(answers):
    found = answers("a", "die", "raise", "refuse", "b")
    assert "exit code 3" in found["die"].what
    assert "ValueError: a bug" in found["raise"].what
    assert found["refuse"].what == "what to fix"
    assert [found[word].kind for word in "ab"] == ["a", "b"]
    assert found["die"].fatal


def test_a_check_without_end_is_reported(answers):
    assert "more than 1 s" in answers("sleep", timeout=1.0)["sleep"].what


def test_only_a_check_that_has_passed_is_not_repeated(tmp_path, answers, monkeypatch):
    monkeypatch.setattr(
        "kscl.benchmark.suite.check.check_of",
        lambda stage, *_: Request("pretended", {"word": stage.kind}),
    )
    states = [State(stage(tmp_path, kind, kind=kind), TO_DO) for kind in ("good", "bad")]
    counts = []
    for _ in range(2):
        problems = check_stages(
            *(states, tmp_path, "out", 1), show=lambda done, total, name: counts.append(total)
        )
        assert [text.split(":")[0] for text in problems] == ["a/bad"]
    assert set(counts) == {2, 1}


def test_progress_is_one_line_on_a_terminal_and_the_ends_in_a_pipe(capsys, monkeypatch):
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        show = CheckProgress()
        for done in range(3):
            show(done, 2, "kscl/seed0/pretrain" if done else "")
        text = capsys.readouterr().err
        assert text.count("\n") == (1 if terminal else 2)  # the first and the last
        assert all(f"{done} of 2" in text for done in ((0, 1, 2) if terminal else (0, 2)))
