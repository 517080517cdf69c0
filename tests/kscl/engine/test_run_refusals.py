"""Starts of pretraining that are refused: a folder of another run, or settings and data changed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kscl.commands.pretrain import main
from kscl.data.open import open_source
from kscl.engine.pretrain import data_fingerprint
from kscl.records.record import read_record
from kscl.run.checkpoint import CHECKPOINT_FOLDER, find_checkpoints
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


def test_resuming_with_other_images_is_refused(unfinished, images, tmp_path, error_of):
    other = shutil.copytree(images, tmp_path / "images")
    next(other.rglob("*.jpg")).write_bytes(b"changed")
    text = error_of(unfinished.command("--resume", more=["DATA.TRAIN", other]))
    assert f"DATA.TRAIN {other}" in text


def test_a_run_stopped_by_unreadable_images_resumes_when_more_are_allowed(
    with_broken, tmp_path, error_of
):
    run = Run(tmp_path / "run", with_broken(94, 95))  # of 96: in the last step of the epoch
    for flags in ([], ["--resume"]):
        text = error_of(run.command(*flags))
        assert "2 of the 96 images" in text
        assert "Raise DATA.MAX_BAD_FRACTION, and --auto-resume continues" in text
        assert run.state()["step"] == 4
    assert main(run.command("--resume", more=["DATA.MAX_BAD_FRACTION", 0.03])) == 0
    assert read_record(run.folder / "record.json")["metrics"]["bad_images"] == 2


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


def draw_two(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True)
    for name in ("a.png", "b.png"):
        pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def hash_of(where: str) -> str:
    return data_fingerprint(where, open_source(where))["hash"]


def test_lists_of_equal_names_but_other_photos_have_other_hashes(tmp_path):
    for number in range(2):
        draw_two(tmp_path / str(number), number)
        (tmp_path / str(number) / "list.txt").write_text("a.png\nb.png\n")
    shutil.copytree(tmp_path / "0", tmp_path / "copy")
    hashes = [hash_of(f"{tmp_path}/{name}/list.txt") for name in ("0", "1", "copy")]
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_split_that_was_moved_has_the_same_hash_and_a_changed_one_another(tmp_path):
    draw_two(tmp_path / "voc" / "JPEGImages", 0)
    (tmp_path / "voc/ImageSets/Main").mkdir(parents=True)
    (tmp_path / "voc/ImageSets/Main/train.txt").write_text("a\nb\n")
    for name in ("a", "b"):
        (tmp_path / f"voc/JPEGImages/{name}.png").rename(tmp_path / f"voc/JPEGImages/{name}.jpg")
    shutil.copytree(tmp_path / "voc", tmp_path / "elsewhere" / "moved")
    before = hash_of(f"voc:{tmp_path}/voc:train")
    assert hash_of(f"voc:{tmp_path}/elsewhere/moved:train") == before
    shutil.copy(tmp_path / "voc/JPEGImages/a.jpg", tmp_path / "voc/JPEGImages/b.jpg")
    draw_two(tmp_path / "other", 5)
    shutil.copy(tmp_path / "other/a.png", tmp_path / "voc/JPEGImages/b.jpg")
    assert hash_of(f"voc:{tmp_path}/voc:train") != before
