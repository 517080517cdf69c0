"""A probe is not evaluated on the images it was trained on, unless one insists."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kscl.errors import KsclError
from linear_eval.check import refuse_overlap
from linear_eval.commands.linear_eval import main
from linear_eval.probe import load_linear_eval_config
from tests.helpers.data.digits import overrides, write_digits
from tests.helpers.data.sets import small_coco, small_voc, write_image


def folders(root: Path, count: int = 6) -> Path:
    for side, start in (("train", 0), ("val", 100)):
        for number in range(count):
            write_image(root / side / f"class{number % 2}" / f"{number}.png", start + number)
    return root


def check(train: Path, val: Path, cache: Path) -> None:
    words = ["DATA.TRAIN", str(train), "DATA.VAL", str(val), "DATA.CACHE_DIR", str(cache)]
    refuse_overlap(load_linear_eval_config(None, words))


def test_the_same_folder_a_link_to_it_and_copies_of_images_are_refused(tmp_path):
    root = folders(tmp_path / "data")
    check(root / "train", root / "val", tmp_path / "cache")
    (root / "again").symlink_to(root / "train")
    for val in (root / "train", root / "again"):
        with pytest.raises(KsclError, match="--allow-overlap"):
            check(root / "train", val, tmp_path / "cache")
    shutil.copy(root / "train/class0/0.png", root / "val/class1/copy.png")
    with pytest.raises(KsclError, match=r"copy\.png"):
        check(root / "train", root / "val", tmp_path / "cache")


def test_the_tool_evaluates_on_training_images_only_if_one_insists(tmp_path, capsys):
    digits = write_digits(tmp_path / "digits")
    probe = ("PROBE", "knn", "KNN.K", "[5]", "DATA.VAL", digits / "train")
    words = overrides(digits, tmp_path / "run", *probe)
    assert main(words) == 2
    assert "--allow-overlap" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["--check", *words]) == 1
    assert main(["--check", "--allow-overlap", *words]) == 0
    assert main(["--allow-overlap", *words]) == 0


@pytest.mark.parametrize("val", ["train", "both"])
def test_an_annotated_set_is_not_tested_on_its_training_images(tmp_path, val):
    voc = small_voc(tmp_path / "voc")
    (voc / "ImageSets/Main/both.txt").write_text("b\nc\n")
    words = ["PROBE", "svm", "DATA.TRAIN", f"voc:{voc}:train", "DATA.VAL"]
    refuse_overlap(load_linear_eval_config(None, [*words, f"voc:{voc}:test"]))
    with pytest.raises(KsclError, match=r"DATA\.VAL are in DATA\.TRAIN too"):
        refuse_overlap(load_linear_eval_config(None, [*words, f"voc:{voc}:{val}"]))


@pytest.mark.parametrize("most", [200_000, 1])  # of larger sets the paths are compared
def test_a_coco_set_is_not_tested_on_its_training_images(tmp_path, monkeypatch, most):
    monkeypatch.setattr("linear_eval.check.MOST_COMPARED", most)
    annotations, images = small_coco(tmp_path / "coco")
    where = f"coco:{annotations}:{images}"
    words = ["PROBE", "svm", "DATA.TRAIN", where, "DATA.VAL", where]
    with pytest.raises(KsclError, match="2 of the 2 images"):
        refuse_overlap(load_linear_eval_config(None, words))


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ({"train": "train", "test": "train"}, r"SETS\.mine\.test"),
        ({"train": "train", "val": "val", "test": "val"}, r"SETS\.mine\.test"),
        ({"train": "train", "val": "train", "test": "val"}, r"SETS\.mine\.val"),
    ],
)
def test_the_parts_of_a_set_of_the_linear_suite_share_no_images(tmp_path, parts, key):
    root = folders(tmp_path / "data")
    given = ", ".join(f"{part}: {root}/{name}" for part, name in parts.items())
    words = ["PROBE", "linear_suite", "SETS.mine", f"{{{given}}}"]
    with pytest.raises(KsclError, match=key):
        refuse_overlap(load_linear_eval_config(None, words))
    words[-1] = f"{{train: {root}/train, test: {root}/val}}"
    refuse_overlap(load_linear_eval_config(None, words))
