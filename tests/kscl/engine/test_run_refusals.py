"""Starts of pretraining that are refused: a folder of another run, or settings and data changed."""

from __future__ import annotations

import shutil
import signal

import pytest

from kscl.commands.pretrain import main
from kscl.engine.checkpoint import CHECKPOINT_FOLDER, find_checkpoints
from tests.helpers.runs import Run, wait_until

ONE_EPOCH = ["SOLVER.EPOCHS", 1]

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_folder_with_something_else_is_refused_whatever_is_asked(images, tmp_path, error_of):
    run = Run(tmp_path / "run", images)
    run.folder.mkdir()
    (run.folder / "thesis.tex").write_text("years of work")
    for flags in ([], ["--auto-resume"], ["--resume"]):
        text = error_of(run.command(*flags))
        assert str(run.folder) in text
        assert "thesis.tex" in text


def test_resume_without_anything_to_resume_is_an_error(images, tmp_path, error_of):
    run = Run(tmp_path / "run", images)
    text = error_of(run.command("--resume"))
    assert str(run.folder) in text
    assert "--auto-resume" in text


def test_a_refused_start_leaves_the_folder_free_for_the_next(images, tmp_path, error_of):
    run = Run(tmp_path / "run", images, *ONE_EPOCH)
    assert str(tmp_path / "none") in error_of(run.command(more=["DATA.TRAIN", tmp_path / "none"]))
    assert main(run.command()) == 0


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory, images):
    """A run of which the last epoch is missing."""
    run = Run(tmp_path_factory.mktemp("unfinished") / "run", images)
    (process,) = run.start(more=["LOG.PERIOD", 1])
    wait_until(lambda: bool(find_checkpoints(run.folder / CHECKPOINT_FOLDER)))
    process.terminate()
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM
    return run


def words_of(line):
    return {word.strip(",.:;") for word in line.split()}


def test_resuming_with_settings_that_matter_changed_names_the_keys(unfinished, error_of):
    changed = ["METHOD.TEMPERATURE", 0.07, "SOLVER.EPOCHS", 9, "DATA.NUM_WORKERS", 2]
    for flag in ("--resume", "--auto-resume"):
        text = error_of(unfinished.command(flag, more=changed))
        lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
        assert {"0.2", "0.07"} <= words_of(lines["METHOD.TEMPERATURE"])
        assert {"3", "9"} <= words_of(lines["SOLVER.EPOCHS"])
        assert "NUM_WORKERS" not in text


def test_resuming_with_other_images_is_refused(unfinished, images, tmp_path, error_of):
    other = shutil.copytree(images, tmp_path / "images")
    next(other.rglob("*.jpg")).write_bytes(b"changed")
    text = error_of(unfinished.command("--resume", more=["DATA.TRAIN", other]))
    assert f"DATA.TRAIN {other}" in text
    assert "fingerprint" in text


def test_two_processes_never_write_to_one_folder(images, tmp_path, error_of, monkeypatch):
    monkeypatch.setattr("kscl.runtime.folder_lock.LOCK_PATIENCE", 0.2)
    run = Run(tmp_path / "run", images, "SOLVER.EPOCHS", 50)
    (process,) = run.start()
    wait_until(lambda: bool(find_checkpoints(run.folder / CHECKPOINT_FOLDER)))
    text = error_of(run.command("--auto-resume"))
    assert f"is writing to {run.folder}" in text
    process.kill()
    process.join()


def test_a_batch_that_ranks_cannot_share_is_refused(images, tmp_path):
    run = Run(tmp_path / "run", images, "SOLVER.BATCH_SIZE", 15, ranks=2)
    processes = run.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [2, 2]
    assert "multiple of 2" in run.log.read_text()


def test_the_nearest_neighbor_check_needs_two_sets_with_the_same_classes(
    images, tmp_path, error_of
):
    run = Run(tmp_path / "run", images, "EVAL.KNN_PERIOD", 1)
    assert "EVAL.KNN_TRAIN" in error_of(run.command())
    one_class = images / "class0"
    (tmp_path / "val").mkdir()
    shutil.copytree(one_class, tmp_path / "val" / "class0")
    sets = ["EVAL.KNN_TRAIN", images, "EVAL.KNN_VAL", tmp_path / "val"]
    assert "class1" in error_of(run.command(more=sets))
    assert [path.name for path in run.folder.iterdir()] == [".lock"]
