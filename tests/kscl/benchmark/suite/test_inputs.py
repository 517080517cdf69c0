"""A stage is run again when the data that it reads has changed."""

from __future__ import annotations

import json
import logging
import tarfile
from pathlib import Path

import pytest
import yaml

from kscl.benchmark.suite.execute import note_path
from kscl.benchmark.suite.spec import read_suite
from kscl.benchmark.suite.stages import plan
from kscl.commands import run_suite
from tests.helpers.chain import smoke_suite
from tests.helpers.data.own_folders import prepare, split_ids, write_scenes
from tests.helpers.data.photos import jpeg, photo
from tests.helpers.data.sets import small_voc, write_image

PRETRAINED = {"pretrain", "basis", "knn", "convert", "detection"}  # stages behind a pretraining


def pretrained_on(folder: Path, where: str) -> Path:
    """Return a suite that pretrains on these images."""
    path = smoke_suite(folder)
    suite = yaml.safe_load(path.read_text())
    suite["pretrain_overrides"]["DATA.TRAIN"] = where
    path.write_text(yaml.safe_dump(suite))
    return path


def keys(suite: Path) -> dict[str, str]:
    return {stage.name: stage.key for stage in plan(read_suite(suite))}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def mark_as_done(suite: Path) -> None:
    """Leave the notes and results of a suite that has run."""
    for stage in plan(read_suite(suite)):
        note = note_path(Path(read_suite(suite).output_dir) / ".stages", stage)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"key": stage.key, "kind": stage.kind, "seconds": 1.0}))
        Path(stage.folder).mkdir(parents=True, exist_ok=True)


def test_a_replaced_photo_is_followed_by_the_line_that_its_pretraining_is_run_again(
    tmp_path, caplog, monkeypatch, capsys
):
    monkeypatch.setattr(logging.getLogger("kscl"), "propagate", True)
    caplog.set_level(logging.WARNING)
    for number in range(3):
        write_image(tmp_path / f"photos/{number}.jpg", seed=number)
    suite = pretrained_on(tmp_path, str(tmp_path / "photos"))
    mark_as_done(suite)
    assert run_suite.main([str(suite), "--dry-run", "--skip-check"]) == 0
    assert caplog.messages == []
    write_image(tmp_path / "photos/1.jpg", seed=99)
    assert run_suite.main([str(suite), "--dry-run", "--skip-check"]) == 0
    told = {message.partition(" is run again: ")[0] for message in caplog.messages}
    assert told == {f"kscl/seed0/{kind}" for kind in PRETRAINED}


def test_a_replaced_photo_changes_the_pretraining_on_the_tiles_cut_from_it(tmp_path):
    write_scenes(tmp_path, 8, side=40)
    assert prepare(tmp_path) == 0
    suite = pretrained_on(tmp_path, str(tmp_path / "mine/tiles"))
    before = keys(suite)
    assert keys(suite) == before
    photo_of_tiles = tmp_path / f"photos/{split_ids(tmp_path, 'pretrain')[0]}.jpg"
    photo_of_tiles.write_bytes(jpeg(photo(99, 240, 320)))
    stages = {f"kscl/seed0/{kind}" for kind in PRETRAINED}
    assert changed(before, keys(suite)) == stages | {"leaderboard"}


def test_tiles_whose_photos_are_gone_can_still_be_pretrained_on(tmp_path):
    write_image(tmp_path / "mine/tiles/a-0.jpg", seed=1)
    (tmp_path / "mine/JPEGImages").mkdir()
    (tmp_path / "mine/JPEGImages/a.jpg").symlink_to(tmp_path / "gone.jpg")
    assert "kscl/seed0/pretrain" in keys(pretrained_on(tmp_path, str(tmp_path / "mine/tiles")))


def test_replaced_start_weights_change_the_pretraining_from_them(tmp_path):
    write_image(tmp_path / "photos/0.jpg", seed=0)
    path = pretrained_on(tmp_path, str(tmp_path / "photos"))
    suite = yaml.safe_load(path.read_text())
    suite["pretrain_overrides"]["BACKBONE.WEIGHTS"] = str(tmp_path / "start.pth")
    path.write_text(yaml.safe_dump(suite))
    (tmp_path / "start.pth").write_bytes(b"one")
    before = keys(path)
    (tmp_path / "start.pth").write_bytes(b"two")
    stages = {f"kscl/seed0/{kind}" for kind in PRETRAINED}
    assert changed(before, keys(path)) == stages | {"leaderboard"}


def test_a_replaced_basis_image_changes_its_figures_alone(tmp_path):
    image = tmp_path / "shown.jpg"
    write_image(image, seed=1)
    suite = smoke_suite(tmp_path, basis_image=str(image))
    before = keys(suite)
    write_image(image, seed=2)
    assert changed(before, keys(suite)) == {"kscl/seed0/basis", "leaderboard"}


def test_a_basis_image_that_the_suite_draws_is_known_by_its_stage(tmp_path):
    suite = smoke_suite(tmp_path)
    before = keys(suite)
    write_image(tmp_path / "shapes/unlabeled/000000.jpg", seed=1)  # as the first stage will
    assert keys(suite) == before


@pytest.mark.parametrize("pattern", ["train-{000..002}.tar", "train-*.tar"])
def test_a_replaced_shard_of_a_pattern_changes_the_pretraining_on_it(tmp_path, pattern):
    suite = pretrained_on(tmp_path, str(tmp_path / "shards" / pattern))
    missing = keys(suite)  # is told by the check of the stage

    def pack(number: int, seed: int) -> None:
        write_image(tmp_path / "image.png", seed)
        shard = tmp_path / f"shards/train-{number:03d}.tar"
        shard.parent.mkdir(exist_ok=True)
        with tarfile.open(shard, "w") as file:
            file.add(tmp_path / "image.png", "000000.png")

    for number in range(3):
        pack(number, seed=number)
    before = keys(suite)
    assert before != missing
    first = tmp_path / "shards/train-000.tar"
    first.touch()  # only its time changes
    assert keys(suite) == before
    pack(2, seed=99)
    stages = {f"kscl/seed0/{kind}" for kind in PRETRAINED}
    assert changed(before, keys(suite)) == stages | {"leaderboard"}


@pytest.mark.parametrize("name", ["voc:{}:", "voc_2007_"])
def test_a_replaced_image_changes_the_stages_that_read_it(tmp_path, monkeypatch, name):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    voc = small_voc(tmp_path / "VOC2007")
    first = name.format(voc)
    sets = {"DATASETS.TRAIN": [f"{first}train"], "DATASETS.TEST": [f"{first}test"]}
    path = smoke_suite(tmp_path)
    suite = yaml.safe_load(path.read_text())
    suite["evaluations"]["detection"]["overrides"] |= sets
    path.write_text(yaml.safe_dump(suite))
    before = keys(path)
    assert before == keys(path)
    write_image(voc / "JPEGImages/a.jpg", seed=99)
    assert changed(before, keys(path)) == {
        "random/seed0/detection",
        "kscl/seed0/detection",
        "leaderboard",
    }


def test_a_replaced_image_of_a_set_of_the_linear_suite_changes_its_stage(tmp_path):
    sets = {part: str(tmp_path / "flowers" / part) for part in ("train", "test")}
    for where in sets.values():
        write_image(Path(where) / "rose" / "a.jpg", seed=1)
    evaluation = {
        "kind": "linear_suite",
        "config": "configs/linear_eval/linear_suite.yaml",
        "overrides": {"SETS.flowers": sets},
    }
    path = smoke_suite(tmp_path, evaluations={"sets": evaluation})
    before = keys(path)
    write_image(Path(sets["test"]) / "rose" / "a.jpg", seed=2)
    assert changed(before, keys(path)) == {"random/seed0/sets", "kscl/seed0/sets", "leaderboard"}


def test_an_edited_list_of_training_images_changes_its_stage(tmp_path):
    subset = tmp_path / "subset.txt"
    evaluation = {
        "kind": "linear",
        "config": "configs/linear_eval/linear_cached.yaml",
        "overrides": {"DATA.SUBSET": str(subset)},
    }
    path = smoke_suite(tmp_path, evaluations={"few": evaluation})
    found = []
    for name in ("a.jpg", "b.jpg"):
        subset.write_text(f"{name}\n")
        found.append(keys(path))
    assert found[0]["random/seed0/few"] != found[1]["random/seed0/few"]


def test_a_replaced_image_of_a_text_list_changes_the_pretraining_on_it(tmp_path):
    listed = tmp_path / "list.txt"
    listed.write_text("far/a.jpg\n")
    path = pretrained_on(tmp_path, str(listed))
    found = []
    for seed in (1, 2):
        write_image(tmp_path / "far/a.jpg", seed=seed)
        found.append(keys(path))
    assert found[0]["kscl/seed0/pretrain"] != found[1]["kscl/seed0/pretrain"]
